"""A DataLoader taken over keeps its results: batches and random generators, bit for bit."""

from __future__ import annotations

import functools
import io
import itertools
import multiprocessing
import os
import pickle
import random
import time
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

from hasten.errors import DataError, UsageError
from hasten.feed import Loader, faithful, foresight, randomness, takeover
from hasten.feed.asgiven import AsGiven, Tried


class Still(Dataset):
    """Draws nothing, and is not changed by being asked."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 3), float(index)), index * 10


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


class BatchesAtOnce(Sampler[list[int]]):
    """Draws when it is asked for an iterator, which a DataLoader with workers does twice."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(23)[:20].reshape(5, 4).tolist())

    def __len__(self) -> int:
        return 5


def jitter(samples: list[Any]) -> Any:
    return torch.tensor([float(s[1]) for s in samples]) * torch.rand(1), np.random.randn()


def pad(samples: list[Any]) -> Any:
    return {"n": len(samples), "x": [s[1] for s in samples]}


def reseed(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(worker)


DATASETS: dict[str, Callable[[], Dataset]] = {
    "plain": kinds.Plain,
    "still": Still,
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
    "batches at once": lambda: {"batch_sampler": BatchesAtOnce()},
}


BATCHES = ("batches", "lists", "batches at once")


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
    ahead: bool = True,
) -> Loader:
    original = make()
    _seed()
    expected = _epochs(original, original, dropout=dropout, leave_at=leave_at)
    del original
    taken = make()
    _seed()
    with Loader.from_dataloader(taken, plan=plan, ahead=ahead) as loader:
        found = _epochs(loader, taken, dropout=dropout, leave_at=leave_at)
    assert len(found) == len(expected)
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert same(ours, theirs), f"at {place}"
    return loader


PLANS = ["auto", "inline", "processes"]


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", ["still", "transforms"])
def test_samplers_without_workers(dataset: str, sampler: str, plan: str) -> None:
    options = {"batch_size": 1} if sampler in BATCHES else {}
    check(lambda: _make(dataset, sampler, **options), plan=plan)


@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_with_workers(sampler: str, plan: str) -> None:
    options = {"batch_size": 1} if sampler in BATCHES else {}
    check(lambda: _make("transforms", sampler, num_workers=2, **options), plan=plan)


@pytest.mark.parametrize("plan", ["auto", "gather"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_tables(sampler: str, workers: int, plan: str) -> None:
    options = {"batch_size": 1} if sampler in BATCHES else {}
    loader = check(lambda: _make("table", sampler, num_workers=workers, **options), plan=plan)
    assert plan != "auto" or loader.plan.name == "gather"


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("plan", ["inline", "processes"])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("dataset", DATASETS)
def test_data_sets(dataset: str, workers: int, plan: str) -> None:
    check(lambda: _make(dataset, "shuffled", num_workers=workers), plan=plan)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("workers", [0, 2, "2, persistent"])
def test_nothing_ahead(dataset: str, workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_trial(*given: Any) -> None:
        raise AssertionError("a trial whose result is not used")

    monkeypatch.setattr(faithful, "tried", no_trial)
    options: Any = {"num_workers": workers}
    if isinstance(workers, str):
        options = {"num_workers": 2, "persistent_workers": True}
    for leave_at in (None, 2):
        make = lambda: _make(dataset, "shuffled", **options)  # noqa: E731
        loader = check(make, ahead=False, leave_at=leave_at)
        name = "processes" if workers else "gather" if dataset == "table" else "inline"
        assert loader.plan.name == name
        assert pickle.loads(pickle.dumps(loader)).plan.name == name


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_nothing_ahead_by_any_sampler(sampler: str) -> None:
    options = {"batch_size": 1} if sampler in BATCHES else {}
    for dataset in ("transforms", "table"):
        check(lambda: _make(dataset, sampler, **options), ahead=False)  # noqa: B023


def test_nothing_ahead_says_what_is_to_be_had_by_asking() -> None:
    for dataset, workers, said in (
        ("still", 0, "Loader.from_dataloader in its place may make them ahead of the loop"),
        (
            "table",
            2,
            "kept, as its workers would not see what the loop writes to the data set's whole "
            "tensors; quicker without them: num_workers=0, or Loader.from_dataloader in its place",
        ),
    ):
        original = _make(dataset, "shuffled", num_workers=workers)
        assert said in str(Loader.from_dataloader(original, ahead=False).plan)
    for plan in ("processes", "resident"):
        with pytest.raises(UsageError, match="leave one of the two out"):
            Loader.from_dataloader(_make("table", "shuffled"), plan=plan, ahead=False)


class Odd(Sampler[Any]):
    """Indices that tensors take and a table does not."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[0, 1], [True, True], [np.int64(3), torch.tensor(2)], [-1, 4]])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("ahead", [True, False])
def test_indices_that_are_no_row_numbers(ahead: bool) -> None:
    check(lambda: DataLoader(DATASETS["table"](), batch_sampler=Odd()), ahead=ahead)


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
    options["batch_size"] = 1 if sampler in BATCHES else batch_size
    check(lambda: _make(dataset, sampler, **options), dropout=dropout, leave_at=leave_at, plan=plan)


# Batches made ahead ------------------------------------------------------------------------------


class Waiting(Still):
    """Slow, as from a network; draws nothing."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


def test_slow_samples_that_draw_nothing_are_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "_START_WORKERS_S", 0.1)  # so that the test need not take longer
    loader = check(lambda: DataLoader(Waiting(), 4, shuffle=True))
    assert str(loader.plan).startswith("processes")
    assert "drawing nothing, mostly waiting" in loader.plan.reason


@pytest.mark.parametrize(
    ("batch_s", "busy", "samples", "cores", "plan"),
    [
        (0.0005, 1.0, 10**6, 4, "inline - 62 µs a sample, too cheap to hand over"),
        (0.016, 1.0, 10**6, 1, "inline - 2 ms a sample, and one core"),
        (0.016, 1.0, 100, 4, "inline - 2 ms a sample, 200 ms an epoch: too little to start "
         "processes for in each"),
        (0.0216, 1.0, 300, 4, "inline - 2.7 ms a sample, 810 ms an epoch: too little to start "
         "processes for in each"),
        (4.0, 1.0, 39, 4, "inline - 500 ms a sample, 5 batches an epoch, of which the first are "
         "made here in any case"),
        (4.0, 1.0, 48, 4, "processes, 3 processes - 500 ms a sample, drawing nothing"),
        (0.016, 1.0, 10**6, 4, "processes, 3 processes - 2 ms a sample, drawing nothing"),
        (0.016, 0.1, 10**6, 1, "processes, 8 processes - 2 ms a sample, drawing nothing, mostly "
         "waiting"),
        (0.016, 0.1, 1000, 2, "processes, 5 processes - 2 ms a sample, drawing nothing, mostly "
         "waiting"),
    ],
)  # fmt: skip
def test_what_is_made_ahead_by_how_many(
    batch_s: float,
    busy: float,
    samples: int,
    cores: int,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foresight.runtime, "cores", lambda: cores)
    options = Loader.from_dataloader(DataLoader(range(samples), 8))._options  # type: ignore[arg-type]
    found = Tried(batch_s, busy, 100, frozenset(), changed="", unseen=False)
    assert str(foresight._judged(found, options, 8)) == plan
    quick = foresight._judged(found, options, 8, watched_s=0.04 * batch_s)
    assert str(quick) == plan, "to see before each batch that nothing changed takes little"
    slow = foresight._judged(found, options, 8, watched_s=0.06 * batch_s + 0.001)
    assert slow.name == "inline"
    if not plan.startswith("inline"):
        assert "to see before each batch that it holds the same" in slow.reason


class Importing(Still):
    """Its first sample takes long."""

    def __init__(self) -> None:
        self.waited = False

    def __getitem__(self, index: int) -> Any:
        if not self.waited:
            time.sleep(0.6)
            self.waited = True
        return super().__getitem__(index)


def test_a_first_sample_that_takes_long_is_not_taken_for_all() -> None:
    plan = Loader.from_dataloader(DataLoader(Importing(), 4)).plan
    assert plan.name == "inline"
    assert "changes when it is asked" in plan.reason
    plan = Loader.from_dataloader(DataLoader(Still(), 4, collate_fn=Slowly())).plan
    assert "too cheap to hand over" in plan.reason


class Slowly:
    """A collate function that imports what it needs when it is first called."""

    def __call__(self, samples: list[Any]) -> Any:
        imported()
        return len(samples)


@functools.cache
def imported() -> None:
    time.sleep(0.6)


def test_slow_samples_that_draw_are_not() -> None:
    class Noisy(Waiting):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.004)
            return torch.rand(1)

    loader = check(lambda: DataLoader(Noisy(), 4, shuffle=True))
    assert loader.plan.name == "inline"
    assert "its samples draw from the generator of torch" in loader.plan.reason


def test_a_trial_asks_nothing_of_the_data_set_here() -> None:
    dataset = kinds.Plain()
    loader = Loader.from_dataloader(DataLoader(dataset, 4))
    assert loader.plan.name == "inline"
    assert dataset.asked == []


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in ("lazy", "lists")])
def test_what_is_foreseen_stays_as_it_is_planned(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_size": 1} if sampler in BATCHES else {}
    here: list[int] = []
    make = AsGiven.make

    def noted(self: AsGiven, epoch: int, number: int, indices: Any) -> Any:
        here.append(number)
        return make(self, epoch, number, indices)

    with Loader.from_dataloader(_make("still", sampler, **options), plan="processes") as loader:
        monkeypatch.setattr(AsGiven, "make", noted)
        list(loader)
        assert loader.plan.name == "processes"
    assert set(here) <= {0, 1, 10}, "these alone are made here too, to be compared"


def test_epochs_that_are_left_early_start_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`next(iter(loader))`, again and again, took ten times as long as with a DataLoader."""
    started = []
    make = takeover.made_ahead

    def noted(*arguments: Any) -> Any:
        started.append(len(started))
        return make(*arguments)

    monkeypatch.setattr(takeover, "made_ahead", noted)

    def play(batches: Any) -> list[Any]:
        seen = [next(iter(batches)) for _ in range(5)]
        seen += [batch for _ in range(4) for batch in itertools.islice(batches, 4)]
        seen += [torch.rand(1), *batches, torch.rand(1)]
        seen += [*itertools.islice(batches, 2), *batches, *batches]
        return seen

    _seed()
    expected = play(_make("still", "shuffled"))
    _seed()
    with Loader.from_dataloader(_make("still", "shuffled"), plan="processes") as loader:
        assert same(play(loader), expected)
        assert loader.plan.name == "processes"
    # The first time of each kind, the whole epoch, and one that is left after whole ones.
    assert len(started) == 5


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ("sometimes", "its samples draw from the generator of torch"),
        ("own generator", "inline - its data set changes when it is asked for samples"),
        ("transforms", "draw from the generator of numpy and random and torch"),
    ],
)
def test_what_was_made_ahead_of_a_draw_is_thrown_away(dataset: str, reason: str) -> None:
    original = _make(dataset, "shuffled")
    _seed()
    expected = _epochs(original, original, dropout=True, leave_at=None)
    taken = _make(dataset, "shuffled")
    _seed()
    with Loader.from_dataloader(taken, plan="processes") as loader:
        assert same(_epochs(loader, taken, dropout=True, leave_at=None), expected)
        assert loader.plan.name == "inline"
        assert reason in loader.explain()


class Curriculum(Still):
    level = 0

    def __getitem__(self, index: int) -> Any:
        return index * 100 + self.level


@pytest.mark.parametrize("plan", ["inline", "processes"])
def test_a_loop_that_changes_the_data_set_is_heeded(plan: str) -> None:
    def run(batches: Any, dataset: Any) -> Any:
        seen = []
        for number, batch in enumerate(batches):
            seen.append(batch)
            if number == 2:
                dataset.level = 7
        return seen

    here, there = Curriculum(), Curriculum()
    expected = run(DataLoader(here, 4), here)
    with Loader.from_dataloader(DataLoader(there, 4), plan=plan) as loader:
        assert same(run(loader, there), expected)


@pytest.mark.parametrize("plan", ["gather", "inline"])
def test_a_loop_that_writes_to_a_table_is_heeded(plan: str) -> None:
    def run(batches: Any, dataset: Any) -> Any:
        seen = []
        for (batch,) in batches:
            seen.append(batch)
            dataset.tensors[0].mul_(2)
        return seen

    here, there = (torch.utils.data.TensorDataset(torch.arange(23.0)) for _ in range(2))
    expected = run(DataLoader(here, 4), here)
    with Loader.from_dataloader(DataLoader(there, 4), plan=plan) as loader:
        assert same(run(loader, there), expected)


class ByProcess(Still):
    """Gives others where another process asks."""

    def __init__(self) -> None:
        self.main = os.getpid()

    def __getitem__(self, index: int) -> Any:
        return float(index) if os.getpid() == self.main else index + 1e-9


def test_samples_that_depend_on_the_process_are_noticed() -> None:
    check(lambda: DataLoader(ByProcess(), 4), plan="processes")
    with Loader.from_dataloader(DataLoader(ByProcess(), 4), plan="processes") as taken:
        list(taken)
        assert "others when another process makes them" in taken.plan.reason


# Positions ---------------------------------------------------------------------------------------


def _whole(make: Callable[[], DataLoader], plan: str) -> Any:
    """Two epochs; before each batch, the position and the states of the generators."""
    _seed()
    taken = make()
    seen: list[Any] = []
    with Loader.from_dataloader(taken, plan=plan) as loader:
        for _ in range(2):
            position, states = loader.state_dict(), randomness.save()
            for batch in loader:
                seen.append((position, states, batch))
                torch.rand(3), random.random(), np.random.randn()
                position, states = loader.state_dict(), randomness.save()
    return seen


RESUMED: dict[str, Callable[[], DataLoader]] = {
    "plain": lambda: _make("still", "shuffled"),
    "transforms": lambda: _make("transforms", "shuffled"),
    "own order": lambda: _make("still", "own generator"),
    "replacement": lambda: _make("still", "replacement"),
    "weighted": lambda: _make("transforms", "weighted, own"),
    "table": lambda: _make("table", "shuffled"),
    "workers": lambda: _make("transforms", "shuffled", num_workers=2),
    "workers, own order": lambda: _make("transforms", "own generator", num_workers=2),
    "persistent": lambda: _make(
        "transforms", "shuffled", num_workers=2, persistent_workers=True, batch_size=7
    ),
    "table and workers": lambda: _make("table", "subset", num_workers=2),
    "stream": lambda: DataLoader(Parts(), 6, num_workers=2),
}


@pytest.mark.parametrize("kind", RESUMED)
@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_goes_on_from_any_batch(kind: str, plan: str) -> None:
    if kind == "stream" and plan == "inline":
        pytest.skip("a stream is shared out by processes alone")
    make = RESUMED[kind]
    whole = _whole(make, plan)
    for place in range(0, len(whole), 3):
        position, states, _ = whole[place]
        buffer = io.BytesIO()
        torch.save(position, buffer)  # as a checkpoint does
        buffer.seek(0)
        torch.manual_seed(99)
        with Loader.from_dataloader(make(), plan=plan) as loader:
            loader.load_state_dict(torch.load(buffer, weights_only=True))
            randomness.restore(states)
            seen = []
            for batch in loader:
                seen.append(batch)
                torch.rand(3), random.random(), np.random.randn()
        rest = [entry for entry in whole[place:] if entry[0]["epoch"] == position["epoch"]]
        assert same(seen, [batch for _, _, batch in rest]), f"from {place}"


def test_samples_before_a_position_are_not_made() -> None:
    dataset = kinds.Plain()
    loader = Loader.from_dataloader(DataLoader(kinds.Plain(), 4, shuffle=True), plan="inline")
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    rest = [batch[1].tolist() for batch in batches]
    resumed = Loader.from_dataloader(DataLoader(dataset, 4, shuffle=True), plan="inline")
    resumed.load_state_dict(state)
    assert [batch[1].tolist() for batch in resumed] == rest
    assert len(dataset.asked) == 23 - 16


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: _make("own generator", "shuffled", num_workers=2),
            "in a worker its data set changes when",
        ),
        (lambda: DataLoader(Parts(), 4), "draw from the generators that the loop draws from too"),
        (lambda: _make("plain", "lazy"), "does not give the first 2 batches again"),
    ],
)
def test_positions_that_cannot_be_gone_to_are_refused(
    make: Callable[[], DataLoader], why: str
) -> None:
    with Loader.from_dataloader(make()) as loader:
        batches = iter(loader)
        next(batches)
        torch.rand(1)
        next(batches)
        state = loader.state_dict()
        batches.close()
    with Loader.from_dataloader(make()) as loader, pytest.raises(UsageError, match=why):
        loader.load_state_dict(state)
        list(loader)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("began_at", ["an epoch before", "the first"])
def test_an_epoch_that_has_begun_without_a_batch_begins_so_again(
    began_at: str, persistent: bool
) -> None:
    """Whether or not its data set (which counts what it is asked) changes in its workers."""

    def make() -> DataLoader:
        return DataLoader(
            kinds.Plain(), 4, shuffle=True, num_workers=2, persistent_workers=persistent
        )

    def begin(loader: Any) -> Any:
        torch.manual_seed(3)
        if began_at == "an epoch before":
            list(loader)
        return iter(loader)

    expected = list(begin(make()))
    with Loader.from_dataloader(make()) as loader:
        batches = begin(loader)
        state, states = loader.state_dict(), randomness.save()
        batches.close()
    torch.manual_seed(99)
    with Loader.from_dataloader(make()) as loader:
        loader.load_state_dict(state)
        randomness.restore(states)
        assert same(list(loader), expected)


def test_positions_of_other_loaders_are_refused() -> None:
    with pytest.raises(UsageError, match="not one of a DataLoader that was taken over"):
        Loader.from_dataloader(DataLoader(kinds.Plain(), 4)).load_state_dict(
            Loader(kinds.Plain(), 4).state_dict()
        )


def test_set_epoch_goes_to_the_sampler() -> None:
    def make() -> DataLoader:
        sampler: Any = torch.utils.data.DistributedSampler(
            kinds.Plain(), num_replicas=2, rank=1, shuffle=True
        )
        return DataLoader(kinds.Plain(), 4, sampler=sampler)

    original: Any = make()
    original.sampler.set_epoch(3)
    loader = Loader.from_dataloader(make())
    loader.set_epoch(3)
    assert same(list(loader), list(original))


# Other ways -----------------------------------------------------------------------------------


class Reversed(DataLoader):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def test_a_dataloader_with_a_way_of_its_own_is_left_as_it_is() -> None:
    def make() -> DataLoader:
        return Reversed(Transforms(), 4, shuffle=True)

    loader = check(make)
    assert "Reversed iterates in a way of its own" in loader.plan.reason
    with pytest.raises(UsageError, match="cannot keep its results: Reversed iterates"):
        list(Loader.from_dataloader(make(), plan="processes"))


class Passing:
    """Passes for a DataLoader, and has one (as Accelerate's do)."""

    def __init__(self, base: DataLoader) -> None:
        self.base = base

    @property
    def __class__(self) -> Any:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.base:
            yield [part * 2 for part in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_passes_for_a_dataloader_is_left_as_it_is(workers: int) -> None:
    def make() -> Any:
        return Passing(_make("plain", "shuffled", num_workers=workers))

    loader = check(make, leave_at=2)
    assert "Passing iterates in a way of its own" in loader.plan.reason


def test_a_stream_that_every_worker_repeats_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    check(lambda: DataLoader(Repeated(), 4, num_workers=2))
    assert any("give each its part by the id" in message for message in caplog.messages)
    caplog.clear()
    with Loader.from_dataloader(DataLoader(Repeated(), 4, num_workers=2)) as loader:
        for _ in range(3):
            list(loader)
    told = [message for message in caplog.messages if "give each its part" in message]
    assert len(told) == 1, "once, not in each epoch"


class Repeated(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([1, 2], {}, "takes a torch.utils.data.DataLoader, not a list"),
        (DataLoader([1]), {"plan": "threads"}, "cannot keep the results"),
        (DataLoader([1]), {"plan": "magic"}, "no plan 'magic'"),
        (DataLoader([1]), {"plan": "gather"}, "not recognised as one"),
        (
            DataLoader(kinds.tables()["whole"], num_workers=1, worker_init_fn=reseed),
            {"plan": "gather"},
            "worker_init_fn may set up",
        ),
        (DataLoader(Parts(), num_workers=1), {"plan": "inline"}, "is not for a stream"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(loader: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(Loader.from_dataloader(loader, **options))


def test_length_and_the_like() -> None:
    original: DataLoader = _make("table", "shuffled", drop_last=True)
    loader = Loader.from_dataloader(original)
    assert (len(loader), loader.batch_size, loader.drop_last) == (5, 4, True)
    assert loader.dataset is original.dataset
    assert len(loader.to("cpu")) == 5
    assert Loader.from_dataloader(_make("plain", "batches", batch_size=1)).batch_size is None


def test_a_device_transform_runs_after_all_of_it() -> None:
    def add(batch: Any, rng: Any) -> Any:
        return batch[1] + 1000

    for plan in PLANS:
        loader = Loader.from_dataloader(_make("plain", "in order"), plan=plan, device_transform=add)
        with loader:
            assert next(iter(loader.to("cpu"))).tolist() == [1000, 1010, 1020, 1030]


def test_a_worker_that_dies_is_replaced_by_one_that_goes_on_drawing() -> None:
    def kill(seen: Any) -> Any:
        for number, batch in enumerate(seen):
            yield batch
            if number in (1, 4):
                child = multiprocessing.active_children()[number % 2]
                child.kill()
                child.join()

    original = _make("transforms", "shuffled", num_workers=2)
    _seed()
    expected = list(original)
    _seed()
    with Loader.from_dataloader(_make("transforms", "shuffled", num_workers=2)) as loader:
        assert same(list(kill(loader)), expected)


def test_a_worker_whose_data_set_had_changed_cannot_be_replaced() -> None:
    with Loader.from_dataloader(_make("own generator", "shuffled", num_workers=1)) as loader:
        batches = iter(loader)
        next(batches)
        (child,) = multiprocessing.active_children()
        child.kill()
        child.join()
        with pytest.raises(
            DataError,
            match=r"in a worker its data set changes .*\(Own.rng\)",
        ):
            list(batches)


def test_a_look_that_others_delayed_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one look of several took long, and nothing was made ahead."""
    monkeypatch.setattr(foresight, "_START_WORKERS_S", 0.1)
    looks: list[int] = []
    changed = foresight.Mark.changed

    def delayed(self: Any) -> bool:
        looks.append(0)
        if len(looks) == 1:
            time.sleep(0.1)
        return changed(self)

    monkeypatch.setattr(foresight.Mark, "changed", delayed)
    plan = Loader.from_dataloader(DataLoader(Waiting(), 4)).plan
    assert "to see before each batch" not in plan.reason
    assert len(looks) > 1
