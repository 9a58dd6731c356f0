"""Which plan is chosen, from measurements on a clock of the test's own."""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, TensorDataset

from hasten.devices import runtime
from hasten.feed import Loader, Plan
from hasten.feed import apart as apart_module
from hasten.feed import foresight as foresight_module
from hasten.feed import sizing as sizing_module
from hasten.feed.measure import measure
from hasten.feed.plan import duration
from hasten.feed.samples import Maker

GPU = torch.device("cuda", 0)


class Timed(kinds.Plain):
    """Samples that take time on a clock of the test's own, a share of it computing."""

    def __init__(
        self, seconds: float, *, busy: float = 1.0, count: int = 1000, free: float = 0.0
    ) -> None:
        super().__init__(count)
        self.free: float | None = free
        self.seconds = seconds
        self.busy = busy
        self.now = 0.0
        self.cpu = 0.0

    def __getitem__(self, index: int) -> Any:
        self.now += self.seconds
        self.cpu += self.seconds * self.busy
        return super().__getitem__(index)


class TimedFetching(Timed):
    def fetch(self, index: int, key: int) -> Any:
        return self[index]


class TimedDrawing(Timed):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), super().__getitem__(index)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: 1 << 30)


def planned(dataset: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    if isinstance(dataset, Timed):

        def timed(maker: Maker, count: int, batch: int, **options: Any) -> Any:
            cpu, none = (lambda: dataset.cpu), (lambda: 0.0)
            found = measure(maker, count, batch, cpu_clock=cpu, queued=none, **options)
            return found and replace(found, free=dataset.free)

        monkeypatch.setattr(sizing_module, "measure_apart", timed)
        options["clock"] = lambda: dataset.now
    return Loader(dataset, options.pop("batch_size", 16), **options).plan


@pytest.mark.parametrize(
    ("dataset", "name", "workers", "reason"),
    [
        (Timed(10e-6), "inline", 0, "10 µs a sample, too cheap to hand over"),
        (Timed(2e-3), "processes", 4, "2 ms a sample"),
        (Timed(2e-3, busy=0.1), "threads", 1, "2 ms a sample, mostly waiting"),
        (TimedDrawing(2e-3, busy=0.1), "processes", 4, "2 ms a sample, mostly waiting"),
        (
            Timed(2e-3, count=100),
            "inline",
            0,
            "2 ms a sample, 200 ms an epoch: too little to start processes for",
        ),
        (Timed(1.0, count=30), "processes", 2, "1 s a sample"),
        (TimedFetching(2e-3, free=0.9), "threads", 4, "2 ms a sample"),
        (TimedFetching(2e-3, free=0.1), "processes", 4, "2 ms a sample"),
        (
            TimedFetching(2e-3, free=0.4, count=100),
            "threads",
            4,
            "too little to start processes for",
        ),
        (TimedFetching(2e-3, free=0.1, count=100), "inline", 0, "hold the interpreter's lock"),
        (TimedFetching(2e-3, busy=0.4), "threads", 10, "mostly waiting"),
        (TimedFetching(1e-6), "inline", 0, "too cheap"),
        (kinds.Stream(), "inline", 0, "a stream"),
        (kinds.tables()["concat"], "gather", 0, "32 samples in memory"),
    ],
)
def test_choice(
    dataset: Any, name: str, workers: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(dataset, monkeypatch)
    assert (plan.name, plan.workers) == (name, workers)
    assert reason in str(plan)


@pytest.mark.parametrize(("free", "name"), [(0.4, "threads"), (0.1, "inline"), (None, "inline")])
def test_an_epoch_too_short_for_workers_may_have_threads(
    free: float | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.feed.choose.harmless", lambda dataset: True)
    short = Timed(2e-3, count=100)
    short.free = free
    plan = planned(short, monkeypatch)
    assert plan.name == name and "200 ms an epoch: too little to start processes for" in str(plan)
    assert ("hold the interpreter's lock" in str(plan)) == (free == 0.1)


class Database(Dataset[Any]):
    """Opens a connection in the first sample, as each worker is to have one of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        (value,) = self.connection.execute("select ?", (index,)).fetchone()
        time.sleep(0.002)
        return value, os.getpid()


def test_what_waits_and_opens_a_connection_is_made_by_processes_from_the_start(
    tmp_path: Path,
) -> None:
    """A thread here would open it, and workers could never be forked: four times as slow."""
    dataset = Database(tmp_path / "it.db")
    with Loader(dataset, 16) as loader:
        assert (loader.plan.name, loader.plan.head_batches) == ("processes", 0)
        batches = list(loader)
    assert torch.cat([values for values, _ in batches]).tolist() == list(range(1000))
    assert os.getpid() not in {int(pid) for _, pids in batches for pid in pids}
    assert dataset.connection is None


@pytest.mark.parametrize(
    ("kind", "seconds", "busy", "collate_s", "count", "name", "says"),
    [
        (Timed, 1e-6, 1.0, 0.5, 5000, "processes", "1 µs a sample, 500 ms to collate a batch"),
        (Timed, 1e-6, 1.0, 0.0029, 5000, "inline", "too cheap to hand over"),
        (Timed, 1e-6, 1.0, 0.02, 160, "inline", "20 ms to collate a batch, 200 ms an epoch"),
        (Timed, 2e-3, 0.1, 0.5, 5000, "processes", "500 ms to collate a batch"),
        (Timed, 2e-3, 0.1, 0.02, 5000, "threads", "mostly waiting"),
        (TimedFetching, 2e-3, 1.0, 0.5, 5000, "processes", "500 ms to collate a batch"),
        (TimedFetching, 2e-3, 1.0, 0.02, 5000, "threads", "2 ms a sample"),
    ],
)
def test_what_a_collate_function_takes_counts(
    kind: type[Timed],
    seconds: float,
    busy: float,
    collate_s: float,
    count: int,
    name: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As samples do; and threads leave it to the loop's, where processes share it out."""
    monkeypatch.setattr("hasten.feed.choose.harmless", lambda dataset: True)
    dataset = kind(seconds, busy=busy, count=count, free=1.0)

    def collate(samples: list[Any]) -> Any:
        dataset.now += collate_s
        return samples

    plan = planned(dataset, monkeypatch, collate_fn=collate)
    assert (plan.name, says in str(plan)) == (name, True), str(plan)


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 1)
    assert planned(Timed(2e-3), monkeypatch).name == "inline"
    assert planned(TimedDrawing(2e-3, busy=0.1), monkeypatch).name == "processes"


@pytest.mark.parametrize(("cores", "workers"), [(2, 2), (3, 3), (8, 8), (64, 16)])
def test_samples_that_compute_get_as_many_workers_as_there_are_cores(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: cores)
    assert planned(Timed(2e-3), monkeypatch).workers == workers
    threads = planned(TimedFetching(2e-3, free=0.9), monkeypatch)
    assert (threads.name, threads.workers) == ("threads", cores)
    asked = planned(Timed(2e-3), monkeypatch, num_workers=2 * cores)
    assert asked.workers == 2 * cores
    assert f"more than the {cores} cores" in str(asked)


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_bytes = 16 * (6 * 4 + 8)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: 9 * batch_bytes)
    plan = planned(Timed(2e-3), monkeypatch)
    assert plan.workers == 2
    assert "/dev/shm has room for 2 workers' batches" in str(plan)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: batch_bytes)
    assert "/dev/shm has room for no batches" in str(planned(Timed(2e-3), monkeypatch))


def test_a_worker_init_fn_is_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Timed(1e-6), monkeypatch, worker_init_fn=print)
    assert plan.name == "processes"


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table = kinds.tables()["whole"]
    asked: list[tuple[Any, dict[str, Any], str, int]] = [
        (Timed(2e-3), {"num_workers": 0}, "inline", 0),
        (table, {"num_workers": 0}, "gather", 0),
        (table, {"num_workers": 3}, "processes", 3),
        (Timed(1e-6), {"plan": "processes"}, "processes", 3),
        (kinds.Fetching(), {"plan": "threads", "num_workers": 7}, "threads", 7),
        (table, {"plan": "inline"}, "inline", 0),
        (table, {"plan": "resident"}, "gather", 0),
    ]
    for dataset, options, name, workers in asked:
        plan = planned(dataset, monkeypatch, **options)
        assert (plan.name, plan.workers) == (name, workers)
    plan = planned(table, monkeypatch, num_workers=9)
    assert "more than the 4 cores" in str(plan)
    assert planned(table, monkeypatch, num_workers=2, prefetch_factor=5).prefetch_batches == 10


class Batches(torch.utils.data.Sampler[list[int]]):
    """Batches of 64, which does not say so; drawing from it would be seen."""

    def __iter__(self) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize(
    "sampler",
    [Batches(), BatchSampler(SequentialSampler(range(1000)), 64, False)],
    ids=["own", "torch's"],
)
def test_a_batch_sampler_s_batches_are_what_counts(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(Timed(1e-3), monkeypatch, batch_size=1, batch_sampler=sampler)
    assert plan.name == "processes", "64 ms a batch, where a sample alone would be cheap"


def test_measuring_takes_half_a_second_and_passes_over_broken_samples() -> None:
    class Broken(Timed):
        def __getitem__(self, index: int) -> Any:
            if index % 2:
                raise OSError
            return super().__getitem__(index)

    def cost(dataset: Timed) -> Any:
        maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
        clock, cpu = (lambda: dataset.now), (lambda: dataset.cpu)
        return measure(maker, len(dataset), clock=clock, cpu_clock=cpu, queued=lambda: 0.0)

    measured = cost(Timed(0.1))
    assert measured.samples == 6
    assert measured.seconds == pytest.approx(0.1)
    assert cost(Timed(3.0)).samples == 1
    for seconds in (0.06, 0.5, 3.0):
        slow = Timed(seconds)
        cost(slow)
        assert slow.now < max(0.5 + 2 * seconds, 1.1 * seconds), "none of them is asked for again"
    assert cost(Timed(1e-3, busy=0.5)).cpu_seconds == pytest.approx(0.5e-3)
    assert 0 < cost(Broken(1e-3, count=21)).samples < 21


@pytest.mark.parametrize(("share", "crowded"), [(0.0, False), (0.1, False), (0.6, True)])
def test_what_samples_wait_for_a_core_is_seen_and_not_counted(share: float, crowded: bool) -> None:
    dataset = Timed(2e-3, busy=1 - share)
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    clock, cpu = (lambda: dataset.now), (lambda: dataset.cpu)
    waited = lambda: dataset.now - dataset.cpu  # noqa: E731
    found = measure(maker, len(dataset), clock=clock, cpu_clock=cpu, queued=waited)
    assert found is not None
    assert found.queued == pytest.approx(share)
    assert found.crowded == crowded
    assert found.seconds == pytest.approx(2e-3 * (1 - share))


@pytest.mark.parametrize("seconds", [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.49, 0.9])
@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_the_trial_takes_at_most_a_second(seconds: float, batch: int) -> None:
    """What takes longer than 0.9 s by itself is ended, see test_feed_measure."""
    dataset = Timed(seconds, count=100_000)
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    clock = lambda: dataset.now  # noqa: E731
    found = measure(maker, len(dataset), batch, clock=clock, cheap_s=0.002 / batch)
    assert found is not None
    assert dataset.now <= 1.0
    assert max(apart_module._PATIENCE_S, foresight_module._PATIENCE_S) < 1.0


class Nothing(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        raise OSError


def test_where_no_sample_comes_iterating_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(planned(Nothing(), monkeypatch)) == "inline - no sample could be measured"


def accelerator(monkeypatch: pytest.MonkeyPatch, *, free: int, overlap: bool = True) -> None:
    monkeypatch.setattr(runtime, "is_host", lambda device: device.type == "cpu")
    memory = runtime.Memory(free_bytes=free, total_bytes=1 << 40)
    monkeypatch.setattr(runtime, "memory", lambda device: memory)
    monkeypatch.setattr(runtime, "can_overlap", lambda device: overlap)
    monkeypatch.setattr(runtime, "can_pin", lambda device: overlap)
    monkeypatch.setattr(runtime, "stream", lambda device: object())


def test_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.zeros(1 << 10, 1 << 10))  # 4 MiB
    accelerator(monkeypatch, free=17 << 20)
    plan = Loader(data, 8).to(GPU).plan
    assert str(plan) == "resident - 1,024 samples take 4 MiB of 17 free on cuda:0"
    accelerator(monkeypatch, free=15 << 20)
    plan = Loader(data, 8).to(GPU).plan
    assert "too many for 15 MiB free" in str(plan)
    assert (plan.name, plan.pinned, plan.ahead_batches) == ("gather", True, 2)
    assert "page-locked memory" in plan.explain()
    assert Loader(data, 8, plan="resident").to(GPU).plan.name == "resident"
    assert not Loader(data, 8, pin_memory=False).to(GPU).plan.pinned
    accelerator(monkeypatch, free=15 << 20, overlap=False)
    plan = Loader(data, 8).to(GPU).plan
    assert (plan.pinned, plan.ahead_batches) == (False, 0)


def test_durations() -> None:
    found = [duration(s) for s in (4e-7, 1.25e-5, 3.6e-4, 2e-3, 0.5, 1.3, 250)]
    assert found == ["0.4 µs", "12 µs", "360 µs", "2 ms", "500 ms", "1.3 s", "250 s"]


class Harmless(torch.utils.data.Dataset[Any]):
    """Samples whose code leaves nothing behind, so that several threads may make them."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0)
        return torch.full((3, 32, 32), index / 1024), index % 10


def test_samples_that_mostly_wait_start_with_threads_enough_to_keep_the_cores_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer with sixteen of them was faster than eight that are told to grow."""
    for busy, threads in ((0.4, 10), (0.1, 16)):

        def waiting(maker: Maker, count: int, batch: int, *_: Any, **options: Any) -> Any:
            found = measure(maker, count, batch)
            taken = {"seconds": 2e-3, "cpu_seconds": 2e-3 * busy}  # noqa: B023
            return found and replace(found, **taken)

        monkeypatch.setattr(sizing_module, "measure_apart", waiting)
        plan = Loader(Harmless(), 16).plan
        assert (plan.name, plan.workers) == ("threads", threads), str(plan)
        assert "mostly waiting" in str(plan)
