"""Which data sets are recognised as tables, and that a table's memory is what it should be."""

from __future__ import annotations

from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from feed_datasets import same
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from hasten.feed import Plan, columns
from hasten.feed.order import OwnOrder
from hasten.feed.recognise import recognise
from hasten.feed.samples import Maker
from hasten.feed.sources import Gather, OnDevice
from hasten.feed.threads import Threads

CPU = torch.device("cpu")
WHOLE = TensorDataset(torch.arange(10.0))


class Doubling(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * value for value in super().__getitem__(index))


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("name", kinds.tables())
def test_recognised(name: str) -> None:
    dataset = kinds.tables()[name]
    table = recognise(dataset, default_collate)
    assert table is not None
    assert table.rows == len(dataset)
    indices = np.array([0, 2, 2, len(dataset) - 1])
    expected = default_collate([dataset[index] for index in indices.tolist()])
    assert same(table.take(indices), expected)
    assert same(table.on(CPU).batch(torch.from_numpy(indices)), expected)
    if table.one_part:
        assert same(table.take_in_parallel(indices), expected)


@pytest.mark.parametrize(
    "dataset",
    [
        kinds.Plain(),
        Doubling(torch.ones(3)),
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.ones(3).as_subclass(Named)),
        TensorDataset(torch.ones(3, 2).to_sparse()),
        ConcatDataset([WHOLE, kinds.Plain()]),
        ConcatDataset([WHOLE, TensorDataset(torch.ones(3, dtype=torch.float64))]),
        ConcatDataset([WHOLE, TensorDataset(torch.ones(3, 1))]),
        ConcatDataset([WHOLE, TensorDataset(torch.ones(3), torch.ones(3))]),
        Subset(WHOLE, ["a", "b"]),  # type: ignore[list-item]
        Subset(WHOLE, [11]),
        TensorDataset(torch.ones(0)),
    ],
)
def test_not_recognised(dataset: Any) -> None:
    assert recognise(dataset, None) is None


def test_a_collate_function_of_ones_own_is_left_alone() -> None:
    assert recognise(WHOLE, lambda samples: samples) is None


def test_a_data_set_that_is_changed_shows_the_change_on_the_device() -> None:
    dataset = TensorDataset(torch.zeros(6))
    table = recognise(dataset, None)
    assert table is not None
    source = OnDevice(table, OwnOrder(dataset, 3, shuffle=True, drop_last=False, seed=0), CPU)
    list(source.batches(0, 0))
    dataset.tensors[0].fill_(4)
    assert all(batch[0].eq(4).all() for _, batch, _ in source.batches(0, 0))


def test_resident_batches_are_those_of_gather() -> None:
    for dataset in kinds.tables().values():
        table = recognise(dataset, None)
        assert table is not None
        order = OwnOrder(dataset, 4, shuffle=True, drop_last=False, seed=3)
        resident, gather = OnDevice(table, order, CPU), Gather(table, order, pin=False)
        for first in (0, 1):
            pairs = zip(resident.batches(1, first), gather.batches(1, first), strict=True)
            for ours, theirs in pairs:
                assert ours[0] == theirs[0]
                assert same(ours[1], theirs[1])
                assert ours[2].tolist() == theirs[2].tolist()


def test_large_batches_are_copied_in_parallel_only_while_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = TensorDataset(torch.arange(64 * 70_000, dtype=torch.int32).reshape(64, -1))
    table = recognise(dataset, None)
    assert table is not None
    now = [0.0]
    cost = {"alone": 1.0, "parallel": 0.6}
    used = []

    def slow(name: str, function: Any) -> Any:
        def timed(indices: Any) -> Any:
            used.append(name)
            now[0] += cost[name]
            if len(used) == 6:
                cost["parallel"] = 5.0  # from here on somebody else wants the cores
            return function(indices)

        return timed

    monkeypatch.setattr(table, "batch", slow("alone", table.batch))
    monkeypatch.setattr(table, "batch_in_parallel", slow("parallel", table.batch_in_parallel))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    order = OwnOrder(dataset, 4, shuffle=True, drop_last=False, seed=0)
    source = Gather(table, order, pin=False, clock=lambda: now[0])
    for epoch in range(4):
        list(source.batches(epoch, 0))
    waits = ["parallel", *["alone"] * 8, "parallel", *["alone"] * 16, "parallel", *["alone"] * 32]
    assert used == ["alone", *["parallel"] * 5, *waits][:64]


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_threads_that_slept_are_given_time_to_wake(
    pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken to wait for a core, after each while in which one thread had copied."""
    dataset = TensorDataset(torch.arange(64 * 70_000, dtype=torch.int32).reshape(64, -1))
    table = recognise(dataset, None)
    assert table is not None
    now, used, asleep = [0.0], [], [True]

    def slow(name: str, cost_s: float, function: Any) -> Any:
        def timed(indices: Any) -> Any:
            used.append(name)
            now[0] += cost_s + (0.0003 if name == "parallel" and asleep[0] else 0.0)
            return function(indices)

        return timed

    monkeypatch.setattr(table, "batch", slow("alone", 1e-4, table.batch))
    together = slow("parallel", 6e-5, table.batch_in_parallel)
    monkeypatch.setattr(table, "batch_in_parallel", together)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    order = OwnOrder(dataset, 4, shuffle=True, drop_last=False, seed=0)
    source = Gather(table, order, pin=False, clock=lambda: now[0])
    now[0] += 1.0
    for _ in source.batches(0, 0):
        asleep[0] = pause_s > 0 or not used
        now[0] += pause_s
    assert used == ["alone", *["parallel"] * 15]


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Page-locked memory where there is no accelerator: ordinary memory, counted."""
    asked: list[Any] = []
    real = torch.empty

    def empty(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(arguments)
        return real(*arguments, **options)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.shape)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return asked


@pytest.mark.parametrize("name", kinds.tables())
def test_batches_in_page_locked_memory_are_the_same(name: str, pinning: list[Any]) -> None:
    dataset = kinds.tables()[name]
    table = recognise(dataset, None)
    assert table is not None
    order = OwnOrder(dataset, 4, shuffle=True, drop_last=False, seed=3)
    pairs = zip(
        Gather(table, order, pin=True).batches(0, 0),
        Gather(table, order, pin=False).batches(0, 0),
        strict=True,
    )
    for (_, pinned, _), (_, plain, _) in pairs:
        assert same(pinned, plain)
    assert len(pinning) == len(order) * len(plain)


def test_threads_write_into_page_locked_memory(pinning: list[Any]) -> None:
    found = []
    for pin in (True, False):
        maker = Maker(kinds.Fetching(), None, seed=0, skip_errors=False, batched=True)
        order = OwnOrder(maker.dataset, 4, shuffle=True, drop_last=False, seed=0)
        plan = Plan(name="threads", reason="", workers=2, prefetch_batches=2, pinned=pin)
        source = Threads(maker, plan, order, lambda index, message: None)
        found.append([batch for _, batch, _ in source.batches(0, 0)])
    assert same(*found)
    assert len(pinning) == len(order)


def test_one_thread_computes_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine another one is waited for, some ms at each of a thousand batches."""
    seen: list[int] = []
    collated = columns.Layout.collated

    def noting(self: Any, taken: Any) -> Any:
        seen.append(torch.get_num_threads())
        return collated(self, taken)

    monkeypatch.setattr(columns.Layout, "collated", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        table = recognise(Halved(torch.arange(2000.0 * 40).reshape(2000, 40)), None)
        assert table is not None
        seen.clear()
        table.batch(np.arange(1000))
        table.batch(np.arange(10))
        table.batch_in_parallel(np.arange(1000))
        assert seen == [1, 2, 2], "of few numbers PyTorch makes no use of others"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Halved(Dataset[Any]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] / 2
