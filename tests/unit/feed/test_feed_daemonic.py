"""A Loader in a process that may start no others: a worker of a DataLoader, or of a pool."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from torch.utils.data import DataLoader

from hasten.errors import UsageError
from hasten.feed import Loader
from hasten.feed.forking import no_workers_here

WHY = "this process is daemonic"


class Costly(kinds.Plain):
    """Computes for long enough that an epoch of it is worth worker processes."""

    def __getitem__(self, index: int) -> Any:
        ends = time.perf_counter() + 0.004
        while time.perf_counter() < ends:
            pass
        return torch.full((3,), float(index))


@pytest.fixture
def daemonic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Python itself goes by, when it refuses to start a process."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        multiprocessing.get_context("fork").Process(target=print).start()
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("daemonic")
def test_it_gives_the_batches_itself_and_says_why() -> None:
    with Loader(Costly(400), 16) as loader:
        batches = list(loader)
        assert loader.plan.name == "inline"
        assert str(loader.plan).count(WHY) == 1, "not again as the loop waits"
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(400.0))


@pytest.mark.usefixtures("daemonic")
def test_a_dataloader_that_is_taken_over_goes_on_there() -> None:
    original = DataLoader(Costly(400), 16)
    with Loader.from_dataloader(original) as loader:
        assert loader.plan.name == "inline"
        assert WHY in loader.plan.reason
        assert len(list(loader)) == 25


@pytest.mark.usefixtures("daemonic")
def test_a_worker_init_fn_is_for_workers_that_there_are_not() -> None:
    with Loader(kinds.Plain(), 4, worker_init_fn=print) as loader:
        assert loader.plan.name == "inline"
        assert WHY in loader.plan.reason
        assert len(list(loader)) == 6


@pytest.mark.usefixtures("daemonic")
@pytest.mark.parametrize(
    "made",
    [
        lambda: Loader(kinds.Plain(), 4, num_workers=2),
        lambda: Loader(kinds.Plain(), 4, plan="processes"),
        lambda: Loader(kinds.Stream(), 4, num_workers=1),
        lambda: Loader.from_dataloader(DataLoader(kinds.Plain(), 4, num_workers=1)),
        lambda: Loader.from_dataloader(DataLoader(kinds.Stream(), 4, num_workers=1)),
        lambda: Loader.from_dataloader(DataLoader(kinds.Plain(), 4), plan="processes"),
    ],
)
def test_workers_that_somebody_insists_on_are_refused_in_words(made: Any) -> None:
    with made() as loader, pytest.raises(UsageError, match=f"cannot be started: {WHY}"):
        list(loader)


def _count(data: Any, answers: Any) -> None:
    answers.put((no_workers_here(), len(list(Loader(data, 16)))))


def test_a_real_daemonic_process() -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_count, args=(Costly(400), answers), daemon=True)
    process.start()
    why, count = answers.get()
    process.join()
    process.close()
    answers.close()
    assert WHY in why
    assert count == 25
    assert no_workers_here() == ""
