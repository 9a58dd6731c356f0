"""Samples are tried in a process of its own: what it tells, and what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from torch.utils.data import Dataset

from hasten.feed import Loader, randomness
from hasten.feed import apart as apart_module
from hasten.feed import lateness as lateness_module
from hasten.feed import measure as measure_module
from hasten.feed.apart import measure_apart
from hasten.feed.samples import Maker


def tried(dataset: Any, batch: int = 4, collate: Any = None) -> Any:
    maker = Maker(dataset, collate, seed=0, skip_errors=False, batched=True)
    return measure_apart(maker, len(dataset), batch, clock=time.perf_counter)


def test_nothing_of_the_trial_stays() -> None:
    dataset = kinds.Plain(40)
    cost = tried(dataset)
    assert cost.samples == 40
    assert dataset.asked == []
    assert cost.bytes == 6 * 4 + 8
    assert cost.draws == frozenset() and not cost.opens and not cost.cut


def test_draws_are_seen_in_samples_and_in_the_collate_function() -> None:
    assert tried(kinds.Drawing()).draws == {"torch", "random", "numpy"}
    assert tried(kinds.Plain(), collate=kinds.drawing_collate).draws == {"torch", "numpy"}


class Opening(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "file"):
            self.file = Path(__file__).open("rb")  # noqa: SIM115 - left open, as people do
        return index


def test_files_left_open_are_seen() -> None:
    dataset = Opening()
    assert tried(dataset).opens
    assert not hasattr(dataset, "file")


class Stuck(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        time.sleep(60)


class Late(Dataset[Any]):
    """Nothing that it does would be left behind."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.4)
        return torch.zeros(2), index


class Dying(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        os._exit(3)


def test_a_trial_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart_module, "_PATIENCE_S", 0.1)
    cost = tried(Stuck())
    assert cost.cut and cost.seconds == 0.1
    plan = Loader(Stuck(), 4).plan
    assert plan.name == "processes", plan
    assert "over 100 ms a sample" in str(plan)


def test_a_thread_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart_module, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(os, "fork", None)
    before = randomness.save()
    cost = tried(Late())
    assert cost.cut and cost.seconds == 0.1
    (left,) = (t for t in threading.enumerate() if t.name == "hasten-feed-trial")
    torch.rand(1)
    now = randomness.save()
    left.join(10)
    assert not left.is_alive(), "the sample that it was at was its last"
    assert randomness.touched(now) == frozenset(), "what the loop drew meanwhile is not undone"
    randomness.restore(before)


class Quiet(Dataset[Any]):
    """Reads what it has and nothing else."""

    def __init__(self) -> None:
        self.rows = [list(range(n % 7 + 1)) for n in range(200)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([2 * number for number in self.rows[index]]), index


def padded(samples: list[Any]) -> Any:
    longest = max(len(row) for row, _ in samples)
    rows = [torch.nn.functional.pad(row, (0, longest - len(row))) for row, _ in samples]
    return torch.stack(rows), [label for _, label in samples]


def noted(samples: list[Any]) -> Any:
    NOTED.append(len(samples))
    return padded(samples)


NOTED: list[int] = []


def test_where_nothing_would_be_left_behind_no_process_is_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork copies each page that it counts references in: megabytes, for a moment."""
    forks: list[Any] = []
    fork = os.fork

    def counted() -> int:
        forks.append(None)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    before = randomness.save()
    cost = tried(Quiet(), collate=padded)
    assert (cost.samples, cost.draws, cost.opens, cost.steady) == (200, frozenset(), False, True)
    assert cost.collate_seconds > 0 and 8 < cost.bytes < 72
    assert randomness.touched(before) == frozenset() and not forks
    assert tried(Quiet(), collate=noted).samples == 200
    assert len(forks) == 1 and not NOTED, "the collate function leaves something: in a fork"
    tried(kinds.Plain())
    assert len(forks) == 2


def test_a_sample_that_ends_its_process_ends_the_trial_only() -> None:
    assert tried(Dying()) is None
    assert "no sample could be measured" in str(Loader(Dying(), 4).plan)


def test_cheap_samples_are_tried_for_longer_and_a_few_of_them_again() -> None:
    asked: list[int] = []

    class Noting(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return index

    dataset = Noting(1000)
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    now = iter(range(10**9))
    found = measure_module.measure(maker, 1000, clock=lambda: next(now) * 1e-5)
    assert found is not None and found.samples == len(set(asked[:1000])) == 1000
    again = [index for index in asked[:8] for _ in range(2)]
    assert asked[1000:] == again, "whether they are the same"
    asked.clear()
    found = measure_module.measure(maker, 1000, clock=lambda: next(now) * 2e-3)
    assert found is not None and found.samples == len(set(asked)) == 64, "0.05 s are over by then"
    asked.clear()
    found = measure_module.measure(maker, 1000, clock=lambda: next(now) * 2.4e-4)
    assert found is not None and found.samples == len(set(asked)) == 105, "0.05 s"


def test_of_samples_that_are_cheap_enough_no_more_is_asked() -> None:
    maker = Maker(kinds.Plain(1000), None, seed=0, skip_errors=False, batched=True)

    def tried(cheap_s: float) -> int:
        now = iter(range(10**9))
        clock = lambda: next(now) * 1e-5  # noqa: E731 - a sample takes that long
        found = measure_module.measure(maker, 1000, clock=clock, cheap_s=cheap_s)
        assert found is not None
        return found.samples

    assert tried(cheap_s=2e-5) == 64
    assert tried(cheap_s=0.5e-5) == 1000


class Large(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1 << 20, dtype=torch.uint8)


def test_of_a_huge_batch_a_part_is_put_together() -> None:
    given: list[int] = []

    def collate(samples: list[Any]) -> int:
        given.append(len(samples))
        return 0

    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    maker = Maker(Large(5000), collate, seed=0, skip_errors=False, batched=True)
    found = measure_module.measure(maker, 5000, 4096, clock=clock)
    assert found is not None and found.bytes == 1 << 20
    assert set(given) == {64}, "64 MiB"
    assert found.collate_seconds == pytest.approx(0.001 * 4096 / 64)


def test_a_collate_function_that_takes_long_does_not_hide_what_samples_cost() -> None:
    def collate(samples: list[Any]) -> Any:
        time.sleep(30)

    maker = Maker(kinds.Plain(50), collate, seed=0, skip_errors=False, batched=True)
    found = measure_apart(maker, 50, 8, clock=time.perf_counter)
    assert found is not None and not found.cut
    assert found.samples == 50 and found.collate_seconds > 0


def test_samples_that_all_fail_are_not_tried_for_ever() -> None:
    now = [0.0]

    class Failing(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            now[0] += 0.1
            self.asked.append(index)
            raise OSError

    dataset = Failing(1000)
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    assert measure_module.measure(maker, 1000, clock=lambda: now[0]) is None
    assert len(dataset.asked) == 6


@pytest.mark.parametrize(
    ("late", "free"),
    [([0.00007] * 99 + [0.140], 0.28), ([0.00007] * 99, 1.0), ([0.005] * 9, 0.0)],
)
def test_the_lock_is_judged_by_time(late: list[float], free: float) -> None:
    """One that waits for long asks seldom: by count, the first of these would be 0.99 free."""
    lock = lateness_module.Lock()
    lock._late, lock._idle = late, [0.003, 0.00007]
    assert lock.free(0.0005) == pytest.approx(free, abs=0.02)


class Sleeping(kinds.Plain):
    """Sleeps in the C library, with or without the interpreter's lock."""

    def __init__(self, count: int, *, holding: bool) -> None:
        super().__init__(count)
        self._sleep = (ctypes.PyDLL if holding else ctypes.CDLL)(None).usleep

    def __getitem__(self, index: int) -> Any:
        self._sleep(5000)
        return super().__getitem__(index)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of a C library found by none")
def test_how_much_of_a_sample_lets_go_of_the_lock_is_measured() -> None:
    free = []
    for holding in (True, False):
        data = Sleeping(1000, holding=holding)
        maker = Maker(data, None, seed=0, skip_errors=False, batched=True)
        found = measure_module.measure(maker, len(data))
        assert found is not None and found.free is not None
        free.append(found.free)
    assert free[0] < 0.5 < free[1]


@pytest.mark.parametrize(("each_s", "asked"), [(1e-5, False), (1e-3, True)])
def test_the_lock_is_not_asked_for_while_that_would_cost_samples_time(
    each_s: float, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []

    class Looking(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            alive.append(any(t.name == "hasten-feed-lock" for t in threading.enumerate()))
            return index

    maker = Maker(Looking(1000), None, seed=0, skip_errors=False, batched=True)
    now = iter(range(10**9))
    assert measure_module.measure(maker, 1000, clock=lambda: next(now) * each_s) is not None
    assert alive[0] and alive[20] == asked
    assert not alive[40], "nor while those are timed that count"


def test_where_a_thread_is_always_late_the_lock_tells_nothing() -> None:
    lock = lateness_module.Lock()
    lock._late, lock._idle = [0.001] * 9, [0.001] * 3
    assert lock.free(0.0015) is None
