"""A DataLoader taken over: several iterations at a time, and runs that go on over epochs."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from feed_datasets import same
from test_feed_taken import Curriculum, Parts, _generator, _make, _seed, _states
from torch.utils.data import DataLoader, Dataset

from hasten.errors import UsageError
from hasten.feed import Loader, randomness

PLANS = ["auto", "inline", "processes"]


def in_step(batches: Any, look: Callable[[Any], None]) -> None:
    """Two iterators of the same loader, a batch of each in turn."""
    one, other = iter(batches), iter(batches)
    for pair in itertools.zip_longest(one, other):
        look(pair)


def nested(batches: Any, look: Callable[[Any], None]) -> None:
    for number, outer in enumerate(batches):
        look(outer)
        if number % 2:
            for inner in batches:
                look(inner)


def dropped(batches: Any, look: Callable[[Any], None]) -> None:
    """Some iterators are never asked, one is left for another."""
    one = iter(batches)
    look(next(one))
    other = iter(batches)
    del one
    look(list(other))
    never = iter(batches)
    look("begun")
    del never
    look(list(batches))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", [in_step, nested, dropped])
@pytest.mark.parametrize("kind", ["transforms", "own generator", "table"])
def test_iterations_at_the_same_time(kind: str, way: Any, workers: int, plan: str) -> None:
    if kind == "table" and plan != "auto":
        plan = "gather"

    def run(batches: Any, loader: DataLoader) -> list[Any]:
        seen: list[Any] = []

        def look(batch: Any) -> None:
            seen.append((batch, _states(loader)))
            torch.rand(2), random.random()

        _seed()
        way(batches, look)
        return [*seen, _states(loader)]

    original, taken = (_make(kind, "shuffled", num_workers=workers) for _ in range(2))
    expected = run(original, original)
    with Loader.from_dataloader(taken, plan=plan) as loader:
        assert same(run(loader, taken), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_workers_have_the_data_set_as_it_is_when_an_iteration_begins(plan: str) -> None:
    def run(batches: Any, dataset: Any) -> Any:
        begun = iter(batches)
        dataset.level = 7
        return list(begun)

    here, there = Curriculum(), Curriculum()
    expected = run(DataLoader(here, 4, num_workers=2), here)
    with Loader.from_dataloader(DataLoader(there, 4, num_workers=2), plan=plan) as loader:
        assert same(run(loader, there), expected)


def test_an_iterator_that_is_never_asked_leaves_no_process() -> None:
    loader = Loader.from_dataloader(_make("transforms", "shuffled", num_workers=2))
    begun = iter(loader)
    assert len(multiprocessing.active_children()) == 2
    del begun
    assert not multiprocessing.active_children()


RUNS: dict[str, Callable[[], DataLoader]] = {
    "persistent": lambda: _make(
        "transforms", "shuffled", num_workers=3, persistent_workers=True, generator=_generator()
    ),
    "workers": lambda: _make("transforms", "shuffled", num_workers=2),
    "none": lambda: _make("transforms", "own generator"),
}


def _run(loader: Loader, epochs: int, seen: Any) -> None:
    """Epochs of a loop that draws."""
    for _ in range(epochs):
        seen(loader, None)
        for batch in loader:
            torch.rand(3), random.random(), np.random.randn()
            seen(loader, batch)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_goes_on_to_its_end_from_any_place(kind: str, plan: str) -> None:
    whole: list[Any] = []
    _seed()
    taken = RUNS[kind]()
    with Loader.from_dataloader(taken, plan=plan) as loader:
        for number, batch in enumerate(loader):  # left in the middle
            assert batch is not None
            if number == 1:
                break
        _run(loader, 3, lambda it, x: whole.append((x, it.state_dict(), randomness.save())))
    for place in (3, 5, 7, 12, 14):
        _, position, states = whole[place]
        torch.manual_seed(99)
        rest: list[Any] = []
        with Loader.from_dataloader(RUNS[kind](), plan=plan) as loader:
            loader.load_state_dict(position)
            randomness.restore(states)
            _run(loader, 3 - position["epoch"], lambda _, x, rest=rest: rest.append(x))
        rest = [batch for batch in rest if batch is not None]
        expected = [batch for batch, _, _ in whole[place + 1 :] if batch is not None]
        assert same(rest, expected), f"from {place}"


def test_a_position_of_other_workers_is_refused() -> None:
    with Loader.from_dataloader(RUNS["workers"]()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for workers in (0, 1):
        other = Loader.from_dataloader(_make("transforms", "shuffled", num_workers=workers))
        with pytest.raises(UsageError, match=r"saved with num_workers=2 .* this one has"):
            other.load_state_dict(state)


def test_a_position_that_was_loaded_is_the_position() -> None:
    loader = Loader.from_dataloader(RUNS["none"]())
    next(iter(loader))
    state = loader.state_dict()
    other = Loader.from_dataloader(RUNS["none"]())
    other.load_state_dict(state)
    assert same(other.state_dict(), state)


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (lambda: _make("own generator", "shuffled"), "when samples were made (Own.rng)"),
        (
            lambda: _make(
                "own generator", "shuffled", num_workers=1, persistent_workers=True, batch_size=9
            ),
            "in a worker its data set changes when it is asked for samples (Own.rng)",
        ),
        (
            lambda: DataLoader(Parts(), 4, num_workers=1, persistent_workers=True),
            "persistent workers give follows from the epochs before",
        ),
        (lambda: _make("transforms", "shuffled"), ""),
        (lambda: _make("table", "shuffled"), ""),
    ],
)
def test_what_a_position_does_not_bring_back_is_told(
    make: Any, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    _seed()
    with Loader.from_dataloader(make()) as loader:
        list(loader)
        state = loader.state_dict()
    with Loader.from_dataloader(make()) as loader:
        loader.load_state_dict(state)
    assert [lost in message for message in caplog.messages] == ([True] if lost else [])


class Leveled(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __init__(self) -> None:
        self.level = 0

    def __getitem__(self, index: int) -> Any:
        return index + 100 * self.level


@pytest.mark.parametrize(
    ("left", "when"),
    [
        (False, "between epochs, as the loop set it otherwise (Leveled.level): unless"),
        (True, "since its first epoch (Leveled.level): unless"),
    ],
)
def test_a_curriculum_is_told_from_samples_that_change_what_they_are_of(
    left: bool, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Leveled()
    with Loader.from_dataloader(DataLoader(dataset, 4)) as loader:
        for level in range(2):
            dataset.level = level
            for _ in loader:
                if left:
                    break
        state = loader.state_dict()
    with Loader.from_dataloader(DataLoader(Leveled(), 4)) as loader:
        loader.load_state_dict(state)
    (message,) = caplog.messages
    assert f"the data set had changed {when}" in message
