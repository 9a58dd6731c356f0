"""A DataLoader taken over keeps its results: batches and random generators, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from feed_datasets import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from hasten.feed import Loader


class Transforms(kinds.Plain):
    """Draws from torch, numpy and random, as image transforms do."""

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) + float(np.random.rand())
        return noise + random.random(), index, torch.initial_seed() if index == 0 else 0


class Own(kinds.Plain):
    """Draws from a generator of its own, which goes on from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(7)

    def __getitem__(self, index: int) -> Any:
        return float(self.rng.random()), index


class Sometimes(kinds.Plain):
    """Draws for two samples only."""

    def __getitem__(self, index: int) -> Any:
        return (torch.rand(1) if index in (9, 17) else torch.zeros(1)), index


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Named(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return Point(torch.tensor([index, index + 1.0]), f"p{index}")


class Dicts(kinds.Plain):
    """As rows of Hugging Face data sets are."""

    def __getitem__(self, index: int) -> Any:
        return {"text": f"t{index}", "ids": torch.arange(3) + index, "n": index / 3}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Who(kinds.Plain):
    """Tells which worker made a sample, and with which seed."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return (index, -1, 0) if info is None else (index, info.id, info.seed)


class Parts(IterableDataset):
    """A stream that workers share out unevenly; draws."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, 17 + 6 * first, step):
            yield index + random.random(), torch.rand(1), float(np.random.rand())


class Lazy(Sampler[int]):
    """Draws from the global generators at each step."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield int(
                torch.randint(23, ()).item() if random.random() < 0.5 else np.random.randint(5)
            )

    def __len__(self) -> int:
        return 20


class AtOnce(Sampler[int]):
    """Draws when it is asked for an iterator, before the first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(23).tolist())

    def __len__(self) -> int:
        return 23


def jitter(samples: list[Any]) -> Any:
    return torch.tensor([float(s[1]) for s in samples]) * torch.rand(1), np.random.randn()


def pad(samples: list[Any]) -> Any:
    return {"n": len(samples), "x": [s[1] for s in samples]}


def reseed(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(worker)


DATASETS: dict[str, Callable[[], Dataset]] = {
    "plain": kinds.Plain,
    "transforms": Transforms,
    "own generator": Own,
    "sometimes": Sometimes,
    "named": Named,
    "dicts": Dicts,
    "who": Who,
    "table": lambda: kinds.tables()["whole"],
}

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "own generator": lambda: {"shuffle": True, "generator": _generator()},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 11 + [3.0], 30)},
    "weighted, own": lambda: {
        "sampler": WeightedRandomSampler([1.0] * 23, 20, generator=_generator())
    },
    "subset": lambda: {"sampler": SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6, 22])},
    "replacement": lambda: {
        "sampler": RandomSampler(
            range(23), replacement=True, num_samples=70, generator=_generator()
        )
    },
    "batches": lambda: {
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(20)), 3, drop_last=True)
    },
    "lists": lambda: {"batch_sampler": [[1, 2], [5], [0, 22, 7]]},
    "lazy": lambda: {"sampler": Lazy()},
    "at once": lambda: {"sampler": AtOnce()},
}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _seed(seed: int = 5) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _states(loader: DataLoader) -> Any:
    numpy: Any = np.random.get_state(legacy=False)
    owners = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    own = [getattr(owner, "generator", None) for owner in owners]
    return (
        torch.get_rng_state(),
        random.getstate(),
        numpy["state"]["key"].tolist(),
        [numpy[key] for key in ("has_gauss", "gauss")] + [numpy["state"]["pos"]],
        [g.get_state() for g in own if g is not None],
    )


def _epochs(
    batches: Any, loader: DataLoader, *, dropout: bool, leave_at: int | None, epochs: int = 2
) -> Any:
    """What a training script sees: batches, and the states after each and after each epoch."""
    seen = []

    def loop(batch: Any) -> None:
        seen.append((batch, _states(loader)))
        if dropout:
            torch.rand(3), random.random(), np.random.randn()

    for epoch in range(epochs):
        iterator = iter(batches)
        loop("begun")
        for number, batch in enumerate(iterator):
            loop(batch)
            if number == leave_at and epoch == 0:
                break
        del iterator
        loop("ended")
    return seen


def _make(dataset: str, sampler: str, **options: Any) -> DataLoader:
    return DataLoader(DATASETS[dataset](), **{"batch_size": 4, **SAMPLERS[sampler](), **options})


def check(
    make: Callable[[], DataLoader],
    *,
    dropout: bool = True,
    leave_at: int | None = None,
    plan: str = "auto",
) -> Loader:
    original = make()
    _seed()
    expected = _epochs(original, original, dropout=dropout, leave_at=leave_at)
    del original
    taken = make()
    _seed()
    with Loader.from_dataloader(taken, plan=plan) as loader:
        found = _epochs(loader, taken, dropout=dropout, leave_at=leave_at)
    assert len(found) == len(expected)
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert same(ours, theirs), f"at {place}"
    return loader


PLANS = ["auto", "inline", "processes"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", ["plain", "transforms"])
def test_samplers_without_workers(dataset: str, sampler: str, plan: str) -> None:
    options = {"batch_size": 1} if sampler in ("batches", "lists") else {}
    check(lambda: _make(dataset, sampler, **options), plan=plan)


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_with_workers(sampler: str, plan: str) -> None:
    options = {"batch_size": 1} if sampler in ("batches", "lists") else {}
    check(lambda: _make("transforms", sampler, num_workers=2, **options), plan=plan)


@pytest.mark.parametrize("plan", ["auto", "gather", "inline", "processes"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_tables(sampler: str, workers: int, plan: str) -> None:
    options = {"batch_size": 1} if sampler in ("batches", "lists") else {}
    loader = check(lambda: _make("table", sampler, num_workers=workers, **options), plan=plan)
    assert plan != "auto" or loader.plan.name == "gather"


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("dataset", DATASETS)
def test_data_sets(dataset: str, workers: int, plan: str) -> None:
    check(lambda: _make(dataset, "shuffled", num_workers=workers), plan=plan)


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("workers", [0, 2, "2, persistent"])
@pytest.mark.parametrize("dataset", ["transforms", "own generator", "sometimes"])
def test_left_in_the_middle(dataset: str, workers: Any, plan: str) -> None:
    options: Any = {"num_workers": workers}
    if isinstance(workers, str):
        options = {"num_workers": 2, "persistent_workers": True}
    check(lambda: _make(dataset, "shuffled", **options), plan=plan, leave_at=2)


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("collate", "size"), [(jitter, 3), (pad, 3), (None, None)])
def test_collate_functions_and_single_samples(
    collate: Any, size: int | None, workers: int, plan: str
) -> None:
    options: Any = {"num_workers": workers, "collate_fn": collate, "batch_size": size}
    check(lambda: _make("transforms", "shuffled", **options), plan=plan)


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_functions(persistent: bool, plan: str) -> None:
    check(
        lambda: _make(
            "transforms",
            "shuffled",
            num_workers=2,
            worker_init_fn=reseed,
            persistent_workers=persistent,
            prefetch_factor=1,
            drop_last=True,
        ),
        plan=plan,
    )


@pytest.mark.parametrize("leave_at", [None, 3])
@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("workers", [0, 1, 2, "2, persistent"])
def test_streams(workers: Any, size: int | None, leave_at: int | None) -> None:
    options: Any = {"num_workers": workers}
    if isinstance(workers, str):
        options = {"num_workers": 2, "persistent_workers": True}
    check(lambda: DataLoader(Parts(), batch_size=size, **options), leave_at=leave_at)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    dataset=st.sampled_from(sorted(DATASETS)),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    workers=st.integers(0, 2),
    batch_size=st.integers(1, 9),
    prefetch=st.integers(1, 3),
    persistent=st.booleans(),
    collate=st.sampled_from([None, jitter]),
    leave_at=st.none() | st.integers(0, 4),
    plan=st.sampled_from(PLANS),
    dropout=st.booleans(),
)
def test_whatever_it_is(
    dataset: str,
    sampler: str,
    workers: int,
    batch_size: int,
    prefetch: int,
    persistent: bool,
    collate: Any,
    leave_at: int | None,
    plan: str,
    dropout: bool,
) -> None:
    options: Any = {"num_workers": workers}
    if collate is not None and dataset not in ("named", "dicts"):
        options["collate_fn"] = collate
    if workers:
        options |= {"prefetch_factor": prefetch, "persistent_workers": persistent}
    options["batch_size"] = 1 if sampler in ("batches", "lists") else batch_size
    check(lambda: _make(dataset, sampler, **options), dropout=dropout, leave_at=leave_at, plan=plan)
