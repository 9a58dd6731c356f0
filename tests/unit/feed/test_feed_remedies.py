"""What each plan would be quicker by, and the reasons that tell of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed import Loader, foresight
from hasten.feed import sizing as sizing_module
from hasten.feed.asgiven import Tried
from hasten.feed.measure import Measured

TENSORS = TensorDataset(torch.randn(40, 3), torch.arange(40))


class Scaled(Dataset[Any]):
    """Whole tensors, and something computed of them."""

    def __init__(self) -> None:
        self.rows = torch.arange(80, dtype=torch.uint8).reshape(40, 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].float() / 255


class Drawing(Dataset[Any]):
    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), random.random())


class Computing(Drawing):
    """Seen to draw nothing, and not to be whole tensors."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index * index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(9))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)


COST = Measured(samples=64, seconds=2e-3, cpu_seconds=2e-3, free=0.0, bytes=100)


@pytest.mark.parametrize(
    ("cost", "count", "remedy"),
    [
        (COST, 10**6, "cheaper"),
        (replace(COST, cpu_seconds=1e-4), 10**6, "cheaper"),
        (replace(COST, seconds=1e-6, cpu_seconds=1e-6), 10**6, "cheap"),
        (COST, 100, "lasting"),
        (replace(COST, steady=False), 10**6, "steady"),
        (replace(COST, shares=True), 10**6, "unshared"),
        (replace(COST, bytes=1 << 50), 10**6, "room"),
    ],
)
def test_by_what_samples_cost(
    cost: Measured, count: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: None)
    assert Loader(Drawing(count), 16).plan.remedy == remedy


def test_too_little_memory_for_as_many_workers_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: COST)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: 9 * 16 * COST.bytes)
    plan = Loader(Drawing(10**6), 16).plan
    assert (plan.workers, plan.remedy) == (2, "room")


@pytest.mark.parametrize(
    ("dataset", "options", "remedy"),
    [
        (TENSORS, {}, "rows"),
        (TENSORS, {"num_workers": 2}, "whole"),
        (TENSORS, {"num_workers": 0}, "rows"),
        (TENSORS, {"plan": "inline"}, "auto"),
        (TENSORS, {"plan": "processes"}, "auto"),
        (Scaled(), {}, "rows"),
        (Drawing(), {"num_workers": 2}, "auto"),
        (Drawing(), {"num_workers": 0}, "auto"),
        (Drawing(), {"plan": "threads"}, "auto"),
        (Stream(), {}, "stream"),
        (Stream(), {"num_workers": 2}, "stream"),
        (Stream(), {"num_workers": 4}, "cheaper"),
    ],
)
def test_of_a_loader(dataset: Any, options: dict[str, Any], remedy: str) -> None:
    assert Loader(dataset, 8, **options).plan.remedy == remedy


def test_only_a_data_set_that_computes_has_something_to_move_to_a_device() -> None:
    room = [torch.device("meta")]  # any that does not compute in host memory
    assert Loader(Scaled(), 8).to(room[0]).plan.remedy == "device_transform"
    assert Loader(TENSORS, 8).to(room[0]).plan.remedy == "rows"


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize(
    ("dataset", "options", "remedy", "said"),
    [
        (TENSORS, {"num_workers": 2}, "no workers", "num_workers=0, or Loader.from_dataloader"),
        (
            TensorDataset(torch.from_numpy(np.ones((9, 2)))),
            {"num_workers": 2},
            "num_workers=0",
            "leaves no trace; quicker without them: num_workers=0",
        ),
        (TENSORS, {}, "rows", "40 samples in memory"),
        (Computing(), {}, "take over", "Loader.from_dataloader in its place may make them ahead"),
        (Drawing(), {}, "own loader", "as the DataLoader makes them; samples draw (random.random"),
        (Drawing(), {"num_workers": 2}, "workers", "kept, as samples draw (random.random at "),
        (Drawing(), {"num_workers": 4}, "cores", "kept, as samples draw (random.random at "),
        (Computing(), {"num_workers": 2}, "workers", "samples are seen to draw nothing"),
        (
            Computing(),
            {"num_workers": 2, "collate_fn": random.choice},
            "workers",
            "kept, as samples are not seen to draw nothing and change nothing (self.",
        ),
        (
            TENSORS,
            {"num_workers": 2, "worker_init_fn": print},
            "workers",
            "its worker_init_fn may set up the data set in each",
        ),
        (Stream(), {"num_workers": 2}, "stream", "each of which reads the stream by a copy"),
        (Stream(), {"num_workers": 4}, "cheaper", "each of which reads the stream by a copy"),
        (Stream(), {}, "stream", "a stream, which may draw"),
    ],
)
def test_of_a_dataloader_that_a_run_is_given(
    dataset: Any, options: dict[str, Any], remedy: str, said: str
) -> None:
    plan = Loader.from_dataloader(DataLoader(dataset, 8, **options), ahead=False).plan
    assert plan.remedy == remedy
    assert said in plan.reason
    assert "whose draws depend" not in plan.reason


def test_what_is_advised_for_whole_tensors_with_workers_does_without_them() -> None:
    """Either way out of the plan that a run has for them."""
    for loader in (
        Loader.from_dataloader(DataLoader(TENSORS, 8), ahead=False),
        Loader.from_dataloader(DataLoader(TENSORS, 8, num_workers=2)),
    ):
        assert loader.plan.name == "gather"
    arrays = TensorDataset(torch.from_numpy(np.ones((9, 2))))
    assert Loader.from_dataloader(DataLoader(arrays, 8), ahead=False).plan.name == "gather"


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (Tried(1e-5, 1.0, 100, frozenset(), changed="", unseen=False), "cheap"),
        (Tried(0.016, 1.0, 100, frozenset({"torch"}), changed="", unseen=False), "own loader"),
        (Tried(0.016, 1.0, 100, frozenset(), changed="it changes", unseen=False), "own loader"),
        (Tried(0.016, 1.0, 100, frozenset(), changed="", unseen=False), "lasting"),
        (Tried(16.0, 1.0, 100, frozenset(), changed="", unseen=False), "cheaper"),
    ],
)
def test_of_a_dataloader_without_workers(found: Tried, remedy: str) -> None:
    options = Loader.from_dataloader(DataLoader(Drawing(100), 8))._options
    assert foresight._judged(found, options, 8).remedy == remedy


def test_samples_that_turn_out_to_draw() -> None:
    with Loader.from_dataloader(DataLoader(Drawing(), 8), plan="processes") as loader:
        for _ in loader:
            continue
        assert (loader.plan.name, loader.plan.remedy) == ("inline", "own loader")


# A class whose source cannot be read --------------------------------------------------------------

SOURCE = """
class Held(Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return self.rows[index]
"""
UNREAD = "the source of its class cannot be read: move the class to a file"


def held(rows: Any) -> Any:
    scope: dict[str, Any] = {"Dataset": Dataset}
    exec(SOURCE, scope)
    return scope["Held"](rows)


@pytest.mark.parametrize("below", ["itself", "subset", "concat", "stack", "subset of concat"])
def test_whole_tensors_of_a_class_that_cannot_be_read(below: str) -> None:
    dataset = held(torch.arange(40))
    if below == "subset":
        dataset = Subset(dataset, range(30))
    elif below == "stack":
        dataset = StackDataset(rows=dataset, labels=torch.arange(40))
    elif below != "itself":
        dataset = ConcatDataset([TensorDataset(torch.arange(9)), Subset(dataset, range(30))])
    if below == "subset of concat":
        dataset = Subset(dataset, range(20))
    loaders = [
        Loader(dataset, 8),
        Loader.from_dataloader(DataLoader(dataset, 8)),
        Loader.from_dataloader(DataLoader(dataset, 8), ahead=False),
        Loader.from_dataloader(DataLoader(dataset, 8, num_workers=2), ahead=False),
    ]
    for loader in loaders:
        assert loader.explain().count(UNREAD) == 1
        assert loader.plan.remedy == "source"
    with pytest.raises(UsageError, match="the source of its class cannot be read"):
        _ = Loader(dataset, 8, plan="gather").plan


def test_in_a_file_it_is_seen(tmp_path: Path) -> None:
    file, scope = tmp_path / "held.py", {"Dataset": Dataset}
    file.write_text(SOURCE)
    exec(compile(SOURCE, str(file), "exec", dont_inherit=True), scope)
    loader = Loader(scope["Held"](torch.arange(40)), 8)  # type: ignore[operator]
    assert loader.plan.name == "gather"
    assert UNREAD not in loader.explain()


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (held(list(range(40))), {}),
        (held(torch.arange(50)), {}),
        (held(torch.arange(40)), {"collate_fn": len}),
        (held(torch.arange(40)), {"num_workers": 2}),
        (held(torch.arange(40)), {"plan": "inline"}),
        (Drawing(), {}),
        (TENSORS, {}),
    ],
)
def test_it_is_said_in_that_case_alone(dataset: Any, options: dict[str, Any]) -> None:
    assert UNREAD not in Loader(dataset, 8, **options).explain()
