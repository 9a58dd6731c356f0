"""Data sets that hold what nothing tells the state of: taken over like any other, never ahead."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from feed_datasets import same
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

import hasten
from hasten.feed import Loader
from hasten.feed.compare import identical
from hasten.feed.harmless import harmless
from hasten.feed.inside import bulky, inside, walk
from hasten.feed.openfiles import unshareable
from hasten.feed.recognise import recognise


@torch.inference_mode()
def inferred(rows: int = 100) -> torch.Tensor:
    return torch.arange(rows * 3.0).view(rows, 3)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2,), float(row)) for row in range(100)])


class Wrapping(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise NotImplementedError(str(function))


class Proxy:
    """Of nothing: it raises whatever it is asked."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


class Locked:
    def __getattribute__(self, name: str) -> Any:
        raise OSError(f"{name} is locked")


UNTOLD: dict[str, Callable[[], Any]] = {
    "inference": inferred,
    "sparse": lambda: torch.eye(100).to_sparse(),
    "compressed": lambda: torch.eye(100).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(100).to_mkldnn(),
    "nested": nested,
    "jagged": lambda: torch.nested.as_nested_tensor([torch.ones(2)] * 100, layout=torch.jagged),
    "wrapping": lambda: Wrapping(torch.ones(3)),
    "lazy": nn.UninitializedParameter,
    "entropy": random.SystemRandom,
    "proxy": Proxy,
    "locked": Locked,
}


@pytest.mark.parametrize("kind", UNTOLD)
def test_what_has_no_state_to_tell_never_raises(kind: str) -> None:
    held = UNTOLD[kind]()
    assert inside({"a": [held]}) is None
    list(walk([{"a": [held]}]))
    bulky({"a": [held]})
    assert not harmless(held)
    assert unshareable(held) == ""


def test_tensors_of_other_classes_are_seen_to_be_written_to() -> None:
    weight = nn.Parameter(torch.zeros(1000))
    before = inside(weight)
    assert before is not None
    assert before == inside(weight)
    with torch.no_grad():
        weight.add_(1)
    assert before != inside(weight)


def test_small_tensors_made_under_inference_mode_are_told_by_their_values() -> None:
    held = inferred(2)
    before = inside(held)
    assert before is not None
    assert before == inside(held)
    with torch.inference_mode():
        held.add_(1)
    assert before != inside(held)


class Holding(Dataset[Any]):
    """Takes rows of what it holds, if it has any; draws."""

    def __init__(self, held: Any) -> None:
        self.held = [{"it": held}]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        held = self.held[0]["it"]
        rows = type(held) is torch.Tensor and held.layout in (torch.strided, torch.sparse_coo)
        return (held[index] if rows else index), torch.rand(1)


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def dense(batches: Any) -> list[Any]:
    """Every sample's row without its layout, and what was drawn."""
    return [
        [(row.to_dense() if isinstance(row, torch.Tensor) else row, drawn) for row, drawn in batch]
        for batch in batches
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["inference", "sparse", "compressed", "nested", "entropy"])
@pytest.mark.filterwarnings("ignore:.*Sparse:UserWarning")
def test_a_dataloader_of_it_is_taken_over(kind: str, workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Holding(UNTOLD[kind]()), 4, collate_fn=as_it_is, num_workers=workers)

    def twice(batches: Any) -> list[Any]:
        torch.manual_seed(3)
        return [dense(batches), dense(batches)]

    expected = twice(make())
    for ahead in (True, False):
        with Loader.from_dataloader(make(), ahead=ahead) as loader:
            assert same(twice(loader), expected)
    run = hasten.Run(folder=None, device="cpu", seed=3)
    original = make()
    for _ in run.epochs(1):
        assert len(dense(run.batches(original))) == 5


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("make", [inferred, nested])
@pytest.mark.parametrize("workers", [0, 2])
def test_whole_tensors_of_it_are_taken_over(make: Any, workers: int, ahead: bool) -> None:
    dataset = TensorDataset(make())
    expected = list(DataLoader(dataset, 4))
    with Loader.from_dataloader(DataLoader(dataset, 4, num_workers=workers), ahead=ahead) as loader:
        assert same(list(loader), expected)


def test_what_is_written_under_inference_mode_comes_when_it_would() -> None:
    def run(dataset: Any, batches: Any) -> list[Any]:
        seen = []
        for (batch,) in batches:
            seen.append(batch)
            with torch.inference_mode():
                dataset.tensors[0].add_(1000)
        return seen

    here, there = TensorDataset(inferred()), TensorDataset(inferred())
    expected = run(here, DataLoader(here, 4))
    original = DataLoader(there, 4)
    with Loader.from_dataloader(original, ahead=False) as loader:
        assert same(run(there, loader), expected)
    table = recognise(there, None)
    assert table is not None
    assert table.traceless, "nothing is kept on a device for longer than an epoch"


def test_no_table_is_made_of_nested_tensors() -> None:
    assert recognise(TensorDataset(nested()), None) is None


def test_players_share_what_is_watched_alone() -> None:
    class Writing(Dataset[Any]):
        def __init__(self) -> None:
            self.held = torch.eye(100).to_sparse()

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> float:
            self.held.mul_(2)
            return float(self.held.to_dense()[0, 0])

    def make() -> DataLoader[Any]:
        return DataLoader(Writing(), 4, num_workers=2)

    with Loader.from_dataloader(make(), plan="inline") as loader:
        assert same(list(loader), list(make()))


def test_batches_that_cannot_be_compared_are_never_the_same() -> None:
    class Table:
        def __eq__(self, other: object) -> Any:
            raise ValueError("the truth of a table is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    assert not identical([Table()], [Table()])
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    assert identical(ragged, copy.copy(ragged.clone()))
    assert not identical(ragged, ragged + 1)


class Breaking(Sampler[int]):
    """Draws as RandomSampler does, and raises after nine."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()[:9]
        raise OSError("the list of samples broke off")


class AtOnce(Sampler[list[int]]):
    """Draws, and raises when it is asked for an iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        torch.rand(1)
        raise OSError("the list of samples broke off")


def until_it_raises(batches: Any) -> Any:
    torch.manual_seed(5)
    seen = []
    with pytest.raises(OSError, match="broke off"):
        for batch in batches:
            seen.append((batch, torch.rand(1)))  # the loop draws too
    return seen, torch.get_rng_state()


@pytest.mark.parametrize(
    ("plan", "ahead"),
    [(plan, ahead) for plan in ("auto", "inline", "gather") for ahead in (True, False)]
    + [("processes", True)],
)
@pytest.mark.parametrize("sampler", [Breaking, AtOnce])
def test_a_sampler_that_raises_does_so_when_it_would(sampler: Any, ahead: bool, plan: str) -> None:
    def make() -> DataLoader[Any]:
        batches = BatchSampler(Breaking(), 4, False) if sampler is Breaking else AtOnce()
        dataset = TensorDataset(torch.arange(20)) if plan == "gather" else range(20)
        return DataLoader(dataset, batch_sampler=batches)  # type: ignore[arg-type]

    expected = until_it_raises(make())
    assert len(expected[0]) == (2 if sampler is Breaking else 0)
    with Loader.from_dataloader(make(), plan=plan, ahead=ahead) as loader:
        assert same(until_it_raises(loader), expected)


def test_a_run_counts_the_samples_of_nested_batches() -> None:
    dataset = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) for _ in range(8)]
    run = hasten.Run(folder=None, device="cpu", seed=3)
    loader = DataLoader(dataset, 4, collate_fn=as_it_is)  # type: ignore[arg-type]
    for _ in run.epochs(1):
        assert len(list(run.batches(loader))) == 2
