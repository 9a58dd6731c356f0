"""Data sets that lure a plan into giving other batches: each gives the same under every plan."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from hasten.errors import DataError, UsageError
from hasten.feed import Loader
from hasten.feed import choose as choose_module
from hasten.feed import moves as moves_module
from hasten.feed import sizing as sizing_module
from hasten.feed.compare import identical
from hasten.feed.measure import measure
from hasten.feed.recognise import recognise
from hasten.feed.samples import Maker

COUNT = 30


class Rows(Dataset[Any]):
    """Rows of float32 numbers and labels, and a transform of each."""

    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self.rows = torch.randn(COUNT, 3, 4, generator=torch.Generator().manual_seed(1))
        self.labels = list(range(COUNT))
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if self.transform is not None:
            row = self.transform(row)
        return row, self.labels[index]


class ByIndex(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * (index % 3), self.labels[index]


class OneIsOdd(Rows):
    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return (row.flip(0) if index == 17 else row), self.labels[index]


class Neighbour(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + self.rows[index - 1], self.labels[index]


class Together(Rows):
    """Its batches are not its samples side by side."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        mean = self.rows[indices].mean(0)
        return [(self.rows[index] - mean, self.labels[index]) for index in indices]


class Arrays(Rows):
    """Two numbers for each: NumPy rounds them by rules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.array = self.rows.numpy().astype(np.float64)
        self.single = np.arange(COUNT, dtype=np.float32) / 7
        self.bytes = np.arange(COUNT, dtype=np.uint8) + 200

    def __getitem__(self, index: int) -> Any:
        return self.array[index] / 3, self.single[index] * 0.1, self.bytes[index] / 255


class Wrapping(Arrays):
    def __getitem__(self, index: int) -> Any:
        return {"sum": self.bytes[index] + 100, "row": self.array[index].astype(np.float16)}


class Mapped(Rows):
    """An array in a file, as numpy.memmap gives it."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        np.save(path, self.rows.numpy())
        self.rows = np.load(path, mmap_mode="r")

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].copy(), self.labels[index]


class Pictures(Rows):
    """As torchvision's: arrays, a list of targets, and transforms of both."""

    def __init__(self, transform: Any = None, target_transform: Any = None) -> None:
        super().__init__(transform)
        self.data = np.arange(COUNT * 48, dtype=np.uint8).reshape(COUNT, 4, 4, 3)
        self.targets = [number % 5 for number in range(COUNT)]
        self.target_transform = target_transform

    def __getitem__(self, index: int) -> Any:
        image, target = self.data[index], self.targets[index]
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class Records(Dataset[Any]):
    """As Hugging Face's: columns, dicts, slices, and several at once."""

    def __init__(self) -> None:
        self.columns = {"label": list(range(COUNT)), "text": [f"line {n}" for n in range(COUNT)]}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: Any) -> Any:
        return {name: column[key] for name, column in self.columns.items()}

    def __getitems__(self, keys: list[int]) -> list[Any]:
        found = {name: [column[k] for k in keys] for name, column in self.columns.items()}
        return [{name: found[name][place] for name in found} for place in range(len(keys))]


def drawn(row: torch.Tensor) -> torch.Tensor:
    return row + torch.rand(1) * random.random() + float(np.random.rand())


def by_its_shape(row: torch.Tensor) -> torch.Tensor:
    return row.sum(0) if row.ndim == 2 else row


def whitened(row: torch.Tensor) -> torch.Tensor:
    return (row - row.mean()) / row.std()


TENSORS = TensorDataset(torch.arange(COUNT * 2.0).view(COUNT, 2), torch.arange(COUNT))
LURES: dict[str, Callable[[], Any]] = {
    "draws": lambda: Rows(drawn),
    "index": ByIndex,
    "one is odd": OneIsOdd,
    "neighbour": Neighbour,
    "shape": lambda: Rows(by_its_shape),
    "first axis": lambda: Rows(lambda row: row[0]),
    "its own mean": lambda: Rows(whitened),
    "least of all": lambda: Rows(lambda row: row - row.min()),
    "softmax": lambda: Rows(lambda row: torch.softmax(row, 0)),
    "exp": lambda: Rows(torch.exp),
    "matrix": lambda: Rows(lambda row: row @ row.T),
    "double": lambda: Rows(lambda row: row.double() / 3 * 0.1),
    "half": lambda: Rows(lambda row: row.half() / 3 + 1e-3),
    "bfloat16": lambda: Rows(lambda row: row.to(torch.bfloat16) * 1.1 - 0.3),
    "int": lambda: Rows(lambda row: row.int() / 3),
    "sorted": lambda: Rows(lambda row: row.sort(0).values),
    "arrays": Arrays,
    "wrapping": Wrapping,
    "pictures": Pictures,
    "pictures, scaled": lambda: Pictures(lambda image: image.astype(np.float32) / 255),
    "pictures, targets": lambda: Pictures(None, lambda target: target + 1),
    "pictures, axes": lambda: Pictures(lambda image: np.transpose(image, (2, 0, 1)).copy()),
    "records": Records,
    "subset of records": lambda: Subset(Records(), [5, 1, -1, 5, *range(9)]),
    "together": Together,
    "subset of together": lambda: Subset(Together(), [5, 1, -1, 5, *range(9)]),
    "subset": lambda: Subset(Subset(Rows(), np.arange(COUNT)[::-1]), [3, -2, 0, 0, 7, 9, 8]),
    "concat": lambda: ConcatDataset([Rows(drawn), Subset(ByIndex(), [2, 5]), Rows()]),
    "stacked": lambda: StackDataset(TENSORS, Rows(), torch.arange(COUNT)),
    "stacked, by name": lambda: StackDataset(x=TENSORS, y=Subset(Rows(), range(COUNT))),
    "stacked, drawing": lambda: StackDataset(Rows(drawn), TENSORS),
    "stacked, in one order": lambda: StackDataset(
        Subset(TENSORS, [4, 2, 2]), Subset(Rows(), [4, 2, 2])
    ),
    "stacked, in two orders": lambda: StackDataset(
        Subset(TENSORS, [4, 2, 2]), Subset(Rows(), [4, 2, 3])
    ),
    "nothing but labels": lambda: TensorDataset(torch.arange(COUNT)),
    "a tensor thrice": lambda: TensorDataset(*[torch.arange(COUNT)] * 3),
    "zero wide": lambda: TensorDataset(torch.zeros(COUNT, 0), torch.arange(COUNT)),
    "complex": lambda: TensorDataset(torch.arange(COUNT * 2).view(COUNT, 2) * 1j),
    "expanded": lambda: TensorDataset(torch.arange(3.0).expand(COUNT, 3)),
    "a view": lambda: TensorDataset(torch.arange(COUNT * 4.0).view(COUNT, 4)[:, ::2]),
    "rows apart": lambda: TensorDataset(torch.arange(COUNT * 8.0).view(2 * COUNT, 4)[::2]),
    "NaN": lambda: TensorDataset(torch.full((COUNT, 2), math.nan)),
}
PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "one thread": {"plan": "threads", "num_workers": 1},
    "one process": {"num_workers": 1},
    "two processes": {"num_workers": 2},
}


@pytest.mark.parametrize("lure", LURES)
def test_every_plan_gives_the_same_bits(lure: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 11}
    dataset = LURES[lure]()
    with Loader(dataset, plan="inline", **options) as loader:
        expected = [list(loader) for _ in range(2)]
    for name, asked in PLANS.items():
        with Loader(LURES[lure](), **options, **asked) as loader:
            for epoch in range(2):
                given = list(loader)
                assert len(given) == len(expected[epoch])
                assert all(map(identical, given, expected[epoch])), (name, epoch)


SEVERAL = ("index", "one is odd", "neighbour", "arrays", "pictures", "subset")
NOT_SEVERAL = ("draws", "concat", "stacked, drawing", "together", "subset of together", "records",
               "subset of records")  # fmt: skip


@pytest.mark.parametrize("lure", LURES)
def test_two_threads_give_the_same_or_are_refused(lure: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 11}
    expected = list(Loader(LURES[lure](), plan="inline", **options))
    loader = Loader(LURES[lure](), plan="threads", num_workers=2, **options)
    try:
        assert loader.plan.workers == 2
    except UsageError:
        assert lure not in SEVERAL
        return
    assert lure not in NOT_SEVERAL
    with loader:
        assert all(map(identical, loader, expected))


@pytest.mark.parametrize(
    "lure", [name for name in LURES if "draw" not in name and name != "concat"]
)
def test_they_are_those_of_a_dataloader(lure: str) -> None:
    expected = list(DataLoader(LURES[lure](), 4))
    for asked in PLANS.values():
        with Loader(LURES[lure](), 4, **asked) as loader:
            assert all(map(identical, loader, expected))


@pytest.mark.parametrize(
    "name",
    ["stacked", "stacked, by name", "stacked, in one order", "pictures", "pictures, scaled",
     "subset", "a tensor thrice", "complex", "expanded", "rows apart", "a view"],
)  # fmt: skip
def test_seen_to_be_tensors(name: str) -> None:
    assert recognise(LURES[name](), None) is not None


@pytest.mark.parametrize(
    "name", ["stacked, drawing", "stacked, in two orders", "together", "subset of together"]
)
def test_left_alone(name: str) -> None:
    assert recognise(LURES[name](), None) is None


def test_a_stack_that_changes_is_looked_at_again() -> None:
    rows = Rows()
    dataset = StackDataset(rows, TENSORS)
    with Loader(dataset, 4) as loader:
        assert loader.plan.name == "gather"
        list(loader)
        rows.rows = rows.rows.flip(0)
        assert all(map(identical, loader, Loader(dataset, 4, plan="inline")))
        dataset.datasets = (TENSORS, rows)
        assert all(map(identical, loader, Loader(dataset, 4, plan="inline")))


def test_a_memory_map_is_gathered_from_its_file(tmp_path: Any) -> None:
    dataset = Mapped(tmp_path / "rows.npy")
    expected = list(DataLoader(dataset, 4))
    with Loader(dataset, 4) as loader:
        assert loader.plan.name == "gather"
        assert all(map(identical, loader, expected))


# Samples that follow from who asks, and how often ---------------------------------------------


class Calls(Rows):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.rows[index] + self.calls


class InPlace(Rows):
    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        row += 1
        return row


class OwnGenerator(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + self.rng.random()


class OfTheTime(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.rows[index], time.perf_counter_ns()


class Cached(Rows):
    """What it remembers does not change what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.rows[index] * 2
        return self.cache[index]


STEADY = {"draws": lambda: Rows(drawn), "cached": Cached, "plain": Rows, "together": Together}
UNSTEADY = {"calls": Calls, "in place": InPlace, "own generator": OwnGenerator, "time": OfTheTime}


def _cost(dataset: Any) -> Any:
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    return measure(maker, len(dataset), 4)


@pytest.mark.parametrize("name", STEADY | UNSTEADY)
def test_it_is_seen_whether_an_index_gives_the_same_again(name: str) -> None:
    cost = _cost((STEADY | UNSTEADY)[name]())
    assert cost is not None and cost.steady == (name in STEADY)


@pytest.mark.parametrize("name", UNSTEADY)
def test_what_does_not_is_made_by_the_loop_however_long_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (choose_module, moves_module, sizing_module):
        monkeypatch.setattr(module, "CHEAP_BATCH_S", 0.0)
    monkeypatch.setattr(choose_module, "_START_WORKERS_S", 0.0)
    loader = Loader(UNSTEADY[name](), 4)
    assert loader.plan.name == "inline"
    assert "an index gives another one each time" in loader.explain()
    planner = loader._feeds._planner
    assert planner is not None and planner.moves.larger(loader.plan, 0.1) is None
    assert planner.moves.instead(loader.plan, "so").name == "inline"


@pytest.mark.parametrize("asked", PLANS.values(), ids=PLANS)
def test_a_data_set_that_changes_between_epochs(asked: dict[str, Any]) -> None:
    dataset = Rows(drawn)
    with Loader(dataset, 4, True, **asked) as loader:
        for change in (None, drawn, by_its_shape):
            dataset.transform = change
            plain = Loader(dataset, 4, True, plan="inline")
            plain.set_epoch(loader.state_dict()["epoch"])
            assert all(map(identical, loader, plain))


# A len that is not the number of samples --------------------------------------------------------


class Saying(Rows):
    def __init__(self, said: int) -> None:
        super().__init__()
        self.said = said

    def __len__(self) -> int:
        return self.said


@pytest.mark.parametrize("asked", PLANS.values(), ids=PLANS)
def test_a_len_that_is_too_short_gives_so_many(asked: dict[str, Any]) -> None:
    with Loader(Saying(10), 4, **asked) as loader:
        assert len(loader) == 3
        assert sum(len(batch[1]) for batch in loader) == 10


@pytest.mark.parametrize("asked", PLANS.values(), ids=PLANS)
def test_a_len_that_is_too_long_names_the_sample_that_is_not_there(asked: dict[str, Any]) -> None:
    given = []
    said = r"sample 30 of Saying raised IndexError.*its len says 34, so it should have a sample 30"
    with Loader(Saying(34), 4, **asked) as loader, pytest.raises(DataError, match=said):
        given.extend(loader)
    assert len(given) == 7, "those before it were given"
