"""How long the samples of a DataLoader that is taken over are tried for."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hasten.feed import Loader, asgiven, foresight
from hasten.feed.asgiven import Tried


class Still(Dataset[Any]):
    def __len__(self) -> int:
        return 200


class Timed(Still):
    """By a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.asked = seconds, 0.0, 0

    def __getitem__(self, index: int) -> Any:
        self.now += self.seconds
        self.asked += 1
        return torch.full((2,), float(index))

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "asked"), [(0.1, 6), (2.0, 2), (0.001, 1 + 3 * 64 + 8)])
def test_a_trial_takes_as_many_samples_as_there_is_time_for(
    seconds: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 samples of 0.1 s each took 6 s: the clock was looked at between batches alone."""
    dataset = Timed(seconds)
    clock = SimpleNamespace(perf_counter=dataset.time, thread_time=lambda: 0.0)
    monkeypatch.setattr(asgiven, "time", clock)
    maker = asgiven.AsGiven(dataset, default_collate, skip_errors=False, batched=True)
    batches = [list(range(64)), list(range(64)), list(range(64))]
    found = asgiven.AsGivenWork(maker, None).run(asgiven.Trial(batches))
    assert isinstance(found, Tried)
    assert found.batch_s == pytest.approx(64 * seconds) and found.busy == 0.0
    assert dataset.asked <= asked


class Stuck(Still):
    def __getitem__(self, index: int) -> Any:
        time.sleep(60)


def test_a_trial_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "_PATIENCE_S", 0.2)
    plan = Loader.from_dataloader(DataLoader(Stuck(), 4)).plan
    assert plan.name == "processes"
    assert plan.reason == "over 200 ms for a sample and to collate it"


class Opening(Still):
    """Opens its file in the first sample."""

    def __init__(self) -> None:
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = Path(__file__).open("rb")  # noqa: SIM115
        return index


class ReadingOn(Opening):
    """Reads on in a file that was open before."""

    def __init__(self) -> None:
        self.file = Path(__file__).open("rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> Any:
        return self.file.read(1)


class Seen(Still):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return index


class Over(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Opening, "its data set changes when it is asked for samples (Opening.file)"),
        (Seen, "its data set changes when it is asked for samples (Seen.seen)"),
        (lambda: Over(Seen()), "asked for samples (Over.inner, Seen.seen)"),
        (ReadingOn, "its samples read on in a file that was open before"),
    ],
)
def test_of_the_causes_the_one_is_said_that_holds(make: Any, reason: str) -> None:
    dataset = make()
    with Loader.from_dataloader(DataLoader(dataset, 4)) as loader:
        assert reason in loader.plan.reason
        assert " or " not in loader.plan.reason
    if isinstance(dataset, ReadingOn):
        dataset.file.close()
