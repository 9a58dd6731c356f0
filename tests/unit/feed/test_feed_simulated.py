"""Copies ahead of the loop on the simulated accelerator: its queues, clock and hazards."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten
from hasten.devices import runtime
from hasten.feed import Loader, Plan
from hasten.feed import place as place_module
from hasten.feed.place import Ahead
from hasten.simulate import Copy, Hazard, Sync
from hasten.vision.transforms import (
    Compose,
    Cutout,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
)
from slow_device import SLOW

PLAN = Plan(name="gather", reason="", copied=True, ahead_batches=2)


BESIDE = replace(PLAN, name="processes", workers=1, prefetch_batches=2, pinned=True)
"""By which a thread of its own pins and copies."""

BOTH = pytest.mark.parametrize("plan", [PLAN, BESIDE], ids=["the loop", "a thread"])


class Batch(list[Any]):
    """One whose memory is written to again as soon as nobody holds it."""


def items(buffers: int, count: int, *, pin: bool = True) -> Iterator[Any]:
    """Batches in memory that is used again, page-locked; never more than `buffers` at a time."""
    ordinary = (torch.empty(1000) for _ in range(buffers))
    free = deque(memory.pin_memory() if pin else memory for memory in ordinary)
    for number in range(count):
        memory = free.popleft()
        memory.fill_(float(number))
        batch = Batch([memory])
        weakref.finalize(batch, lambda memory=memory: (memory.fill_(-1.0), free.append(memory)))
        yield number, batch, [number]
        del batch


class Pages:
    """Page-locked memory that is used again at once, by whoever pins next: nobody looks for it
    whether a copy from it has run (PyTorch's own allocator does)."""

    def __init__(self, count: int) -> None:
        self.free = deque(torch.empty(1000).pin_memory() for _ in range(count))

    def pinned(self, batch: Any) -> Any:
        memory = self.free.popleft()
        memory.copy_(batch[0])
        found = Batch([memory])
        weakref.finalize(found, self.dropped, memory)
        return found

    def dropped(self, memory: torch.Tensor) -> None:
        memory.fill_(-1.0)
        self.free.append(memory)


def hazards_of_training(simulation: Any, plan: Plan) -> list[Hazard]:
    ahead = Ahead(torch.device("cuda", 0))
    for _, (batch,), _ in ahead.place(items(8, 20, pin=not plan.pins_beside), plan):
        (batch * 2).sum()
        assert isinstance(batch, torch.Tensor) and batch.is_cuda
    torch.cuda.synchronize()
    return [event for event in simulation.events if isinstance(event, Hazard)]


@BOTH
def test_memory_of_host_batches_is_not_used_again_before_its_copy_has_run(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        monkeypatch.setattr(place_module, "pin", Pages(8).pinned)
        assert hazards_of_training(simulation, plan) == []
        copies = [event for event in simulation.events if isinstance(event, Copy)]
        assert len(copies) == 20
        assert all(copy.pinned and copy.non_blocking for copy in copies)


@BOTH
def test_without_holding_them_it_is_and_that_is_seen(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would catch: the same code, whose hold on host batches is gone."""

    class Forgetful(deque[Any]):
        def append(self, value: Any) -> None:
            holds = len(value) == 2  # (event, host batch)
            super().append((value[0], None) if holds else value)

    monkeypatch.setattr(place_module, "deque", Forgetful)
    with hasten.simulate(spec=SLOW) as simulation:
        monkeypatch.setattr(place_module, "pin", Pages(8).pinned)
        found = hazards_of_training(simulation, plan)
        assert found and {hazard.kind for hazard in found} == {"source-changed"}


def test_batches_of_workers_are_pinned_and_copied_by_a_thread() -> None:
    seen = set()

    def move(*arguments: Any, **options: Any) -> Any:
        seen.add(threading.current_thread().name.rsplit("_", 1)[0])
        return hasten.move(*arguments, **options)

    with hasten.simulate(spec=SLOW) as simulation:
        given = []
        ahead = Ahead(torch.device("cuda", 0), move=move)
        for number, (batch,), indices in ahead.place(items(8, 20, pin=False), BESIDE):
            assert indices == [number]
            given.append(batch.mean())
        assert [float(mean) for mean in given] == [float(number) for number in range(20)]
        copies = [event for event in simulation.events if isinstance(event, Copy)]
        assert all(copy.pinned and copy.non_blocking for copy in copies[:20])
        assert not [event for event in simulation.events if isinstance(event, Hazard)]
    assert seen == {"hasten-feed-pin"}


@pytest.mark.parametrize("left", ["closed", "dropped", "at an end", "with an error"])
def test_the_thread_ends_however_the_epoch_does(left: str) -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        ahead = Ahead(torch.device("cuda", 0))
        placed = ahead.place(items(8, 20, pin=False), BESIDE)
        next(placed)
        assert _pinning_threads()
        if left == "closed":
            placed.close()
        elif left == "dropped":
            del placed
        elif left == "at an end":
            assert len(list(placed)) == 19
        else:
            with pytest.raises(ZeroDivisionError):
                _fails_in(placed)
            del placed
        assert not _pinning_threads()
        assert not [event for event in simulation.events if isinstance(event, Hazard)]


def _fails_in(placed: Iterator[Any]) -> None:
    for _ in placed:
        raise ZeroDivisionError


def _pinning_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hasten-feed-pin")]


def test_what_goes_wrong_in_the_thread_is_raised_by_the_loop_s_next() -> None:
    class Unpinnable:
        def pin_memory(self) -> None:
            raise RuntimeError("no page can be locked")

    def given() -> Iterator[Any]:
        yield from items(2, 2, pin=False)
        yield 2, Unpinnable(), [2]

    with hasten.simulate(spec=SLOW):
        found = []
        with pytest.raises(RuntimeError, match="no page can be locked"):
            for number, _, _ in Ahead(torch.device("cuda", 0)).place(given(), BESIDE):
                found.append(number)
        assert found == [0, 1]
        assert not _pinning_threads()


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((30, 100), float(index)), index


@pytest.mark.parametrize("taken", [False, True])
def test_worker_processes_and_the_device(taken: bool) -> None:
    dataset = Images()
    expected = list(DataLoader(dataset, 4))
    with hasten.simulate(spec=SLOW) as simulation:
        loader = (
            Loader.from_dataloader(DataLoader(dataset, 4, num_workers=2))
            if taken
            else Loader(dataset, 4, num_workers=2)
        )
        placed = loader.to("cuda")
        assert "pin       into page-locked memory: 1 thread" in placed.explain()
        for _ in range(2):
            loader.set_epoch(0)
            for ours, theirs in zip(placed, expected, strict=True):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        copies = [event for event in simulation.events if isinstance(event, Copy)]
        assert [copy for copy in copies if copy.pinned and copy.non_blocking]
        assert not [event for event in simulation.events if isinstance(event, Hazard)]
        loader.close()


def test_copies_run_beside_the_computation_and_the_host_does_not_wait() -> None:
    took = {}
    for ahead_batches in (0, 1, 2):
        with hasten.simulate(spec=SLOW) as simulation:
            device = torch.device("cuda", 0)
            weight = torch.ones(1000, device=device)
            torch.cuda.synchronize()
            begun, mark = simulation.clock.host_s, len(simulation.events)
            plan = replace(PLAN, ahead_batches=ahead_batches)
            placed = Ahead(device).place(items(8, 20), plan)
            for number, (batch,), _ in placed:
                weight = weight * batch
                waits = [e for e in simulation.events[mark:] if isinstance(e, Sync)]
                if ahead_batches and number < 2:
                    assert not waits
            torch.cuda.synchronize()
            took[ahead_batches] = simulation.clock.host_s - begun
    for ahead_batches in (1, 2):
        hidden = took[0] - took[ahead_batches]
        assert hidden > 18 * 0.0004, "all copies but the first are hidden"


class Drawing(Images):
    """Each sample draws."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((30, 100), float(index)) + torch.rand(1), index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["whole", "samples"])
def test_a_dataloader_with_nothing_ahead_and_the_device(kind: str, workers: int) -> None:
    """What the loop writes while a copy is under way is in the batches that it asks for later."""

    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(3)
        table = torch.arange(8000.0).reshape(40, 200)
        dataset: Any = TensorDataset(table) if kind == "whole" else Drawing()
        seen = []
        for _ in range(2):
            for batch in wrap(DataLoader(dataset, 4, shuffle=True, num_workers=workers)):
                work = batch[0] * 2 + torch.rand(1).to(batch[0].device)  # as dropout draws
                table.numpy()[:] += 1
                seen.append(work)
        return [work.cpu() for work in seen]

    expected = run(lambda given: given)
    with hasten.simulate(spec=SLOW) as simulation:
        loaders: list[Loader] = []

        def taken(given: Any) -> Any:
            loaders.append(Loader.from_dataloader(given, ahead=False))
            return loaders[-1].to("cuda")

        found = run(taken)
        for loader in loaders:
            loader.close()
        said = loaders[0].to("cuda").explain()
        copies = [event for event in simulation.events if isinstance(event, Copy)]
        assert sum(copy.pinned and copy.non_blocking for copy in copies) >= 20
        assert not [event for event in simulation.events if isinstance(event, Hazard)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    asked = "copied to the device when the loop asks for it, on a queue of its own"
    assert (asked in said) is (workers == 0) and "do not run beside" not in said


def test_a_loader_on_the_simulated_device_gives_what_the_host_gives() -> None:
    dataset = TensorDataset(torch.arange(400.0).reshape(100, 4), torch.arange(100))
    expected = list(Loader(dataset, 7, shuffle=True))
    with hasten.simulate() as simulation:
        for plan in ("resident", "gather", "inline"):
            loader = Loader(dataset, 7, shuffle=True, plan=plan)
            found = list(loader.to("cuda"))
            for ours, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        assert not [event for event in simulation.events if isinstance(event, Hazard)]
        assert runtime.accelerator() is not None


class Bytes(Dataset[Any]):
    """Images as bytes; by `fetch`, too, where `keyed`."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index


class KeyedBytes(Bytes):
    def fetch(self, index: int, key: int) -> Any:
        return self[index]


IMAGES = torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(12, 3, 8, 8).contiguous()
BYTES: dict[str, Any] = {
    "resident": TensorDataset(IMAGES, torch.arange(12)),
    "gather": TensorDataset(IMAGES, torch.arange(12)),
    "threads": KeyedBytes(),
    "processes": Bytes(),
    "inline": Bytes(),
}


@pytest.mark.parametrize("plan", BYTES)
def test_bytes_travel_and_floats_are_made_on_the_device(plan: str) -> None:
    changes = Compose(
        [RandomHorizontalFlip(), RandomCrop(1), Cutout(2), Normalize((0.0,) * 3, (1 / 255,) * 3)]
    )
    seen = []

    def transform(batch: Any, rng: Any) -> Any:
        seen.append((batch[0].dtype, batch[0].is_cuda, rng.uniform(1).is_cuda))
        return changes(batch, rng)

    options: Any = {"shuffle": True, "seed": 5, "device_transform": transform}
    expected = list(Loader(BYTES[plan], 4, plan="inline", **options).to("cpu"))
    seen.clear()
    with hasten.simulate(spec=SLOW) as simulation:
        with Loader(BYTES[plan], 4, plan=plan, **options) as loader:
            placed = loader.to("cuda")
            begun, found = len(simulation.events), []
            for images, labels in placed:
                found.append((images, labels))
                waits = [e for e in simulation.events[begun:] if isinstance(e, Sync)]
                assert not waits, "nor does the host wait for any of it"
            copied = sum(e.bytes for e in simulation.events if isinstance(e, Copy))
        for (images, labels), (wanted, whose) in zip(found, expected, strict=True):
            assert images.is_cuda and images.dtype == torch.float32
            assert torch.equal(images.cpu(), wanted) and torch.equal(labels.cpu(), whose)
    assert seen == [(torch.uint8, True, True)] * 3
    # An image has 192 bytes, and 768 as floats; the draws' keys and constants come beside it.
    assert 12 * 192 <= copied < 12 * 768
