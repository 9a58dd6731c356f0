"""Samplers with a state of their own: a position takes it along, or says that it does not."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from hasten.errors import UsageError
from hasten.feed import Loader
from hasten.feed.stateful import Stateful

EPOCHS = 3


class Still(Dataset[Any]):
    """(tensor, int) by index; nothing in it changes."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 3), float(index)), index * 10


class Counting(Sampler[int]):
    """Another order each time that it is asked for one: it counts them."""

    def __init__(self, first: int = 0) -> None:
        self.asked = first

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(np.random.default_rng(self.asked).permutation(23).tolist())

    def __len__(self) -> int:
        return 23


class Kept(Counting):
    def state_dict(self) -> Any:
        return {"asked": self.asked}

    def load_state_dict(self, state: Any) -> None:
        self.asked = state["asked"]


class Consuming(Sampler[int]):
    """Draws from a generator of its own, and counts what it gave, as it gives it."""

    def __init__(self, seed: int = 7) -> None:
        self.random = random.Random(seed)
        self.consumed = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(23):
            self.consumed += 1
            yield (self.random.randrange(23) + self.consumed) % 23

    def __len__(self) -> int:
        return 23

    def state_dict(self) -> Any:
        return {"consumed": self.consumed, "random": self.random.getstate()}

    def load_state_dict(self, state: Any) -> None:
        self.consumed = state["consumed"]
        self.random.setstate(state["random"])


class Batches(BatchSampler):
    """A batch sampler with a state, around a sampler with another."""

    def __init__(self, fresh: bool) -> None:
        super().__init__(Kept(50 if fresh else 0), 4, drop_last=False)
        self.turned = 11 if fresh else 0

    def __iter__(self) -> Iterator[list[int]]:
        self.turned += 1
        for batch in super().__iter__():
            yield [(index + self.turned) % 23 for index in batch]

    def state_dict(self) -> Any:
        return {"turned": torch.tensor(self.turned)}

    def load_state_dict(self, state: Any) -> None:
        self.turned = int(state["turned"])


# What another process would make anew is not where it was: its state has to come with the position.
SAMPLERS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "counting": lambda fresh: {"batch_size": 4, "sampler": Kept(50 if fresh else 0)},
    "consuming": lambda fresh: {"batch_size": 4, "sampler": Consuming(8 if fresh else 7)},
    "batches": lambda fresh: {"batch_sampler": Batches(fresh)},
}


def _own(plan: str) -> Callable[..., Loader]:
    return lambda **options: Loader(Still(), plan=plan, **options)


def _taken(workers: int, **more: Any) -> Callable[..., Loader]:
    return lambda **options: Loader.from_dataloader(
        DataLoader(Still(), num_workers=workers, **options), **more
    )


LOADERS: dict[str, Callable[..., Loader]] = {
    "inline": _own("inline"),
    "processes": _own("processes"),
    "taken": _taken(0, plan="inline"),
    "taken, ahead": _taken(0, plan="processes"),
    "taken, workers": _taken(2),
}


def _saved(state: Any) -> Any:
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_goes_on_from_any_place_of_a_run(sampler: str, kind: str) -> None:
    seen: list[tuple[Any, Any]] = []
    with LOADERS[kind](**SAMPLERS[sampler](False)) as loader:
        for _ in range(EPOCHS):
            seen.append((_saved(loader.state_dict()), None))
            for batch in loader:
                seen.append((_saved(loader.state_dict()), batch[1].tolist()))
    given = [batch for _, batch in seen if batch is not None]
    assert given[:6] != given[6:12]
    for place in (0, 1, 5, 6, 7, 9, 13, 14, 18):
        state, before = seen[place][0], sum(batch is not None for _, batch in seen[: place + 1])
        with LOADERS[kind](**SAMPLERS[sampler](True)) as other:
            other.load_state_dict(state)
            rest = [b[1].tolist() for _ in range(EPOCHS - state["epoch"]) for b in other]
        assert rest == given[before:], place


def test_one_is_found_out_where_hasten_chooses_the_plan() -> None:
    with Loader(range(23), batch_size=2, sampler=Counting()) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        del batches
    with Loader(range(23), batch_size=2, sampler=Counting(3)) as other:
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="Counting does not give the first 2 batches again"):
            list(other)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_sampler_that_keeps_nothing_is_found_out(kind: str) -> None:
    with LOADERS[kind](batch_size=4, sampler=Counting()) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = _saved(loader.state_dict())
        del batches
    with LOADERS[kind](batch_size=4, sampler=Counting(3)) as other:
        other.load_state_dict(state)
        with pytest.raises(UsageError, match="Counting does not give the first 2 batches again"):
            list(other)
    with LOADERS[kind](batch_size=4, sampler=Counting()) as other:
        other.load_state_dict(state)
        assert len(list(other)) == 4, "here it does give them"


@pytest.mark.parametrize("kind", ["inline", "taken"])
def test_a_state_that_no_checkpoint_takes_is_told_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Kept):
        def state_dict(self) -> Any:
            return {"asked": np.int64(self.asked)}

    loader = LOADERS[kind](batch_size=4, sampler=Odd())
    with caplog.at_level(logging.WARNING, logger="hasten.feed"):
        state = _saved(loader.state_dict())
        loader.state_dict()
    assert len(caplog.messages) == 1
    assert "state_dict() of the Odd has a int64, which a checkpoint does not take" in caplog.text
    caplog.clear()
    other = LOADERS[kind](batch_size=4, sampler=Odd())
    with caplog.at_level(logging.WARNING, logger="hasten.feed"):
        other.load_state_dict(state)
        list(other)
    assert "the epoch's order may be another: state_dict() of the Odd" in caplog.text


@pytest.mark.parametrize("kind", ["inline", "taken"])
def test_positions_of_other_samplers_are_refused(kind: str) -> None:
    loader = LOADERS[kind](batch_size=4, sampler=Kept())
    next(iter(loader))
    state = loader.state_dict()
    for wrong in (Counting(), list(range(23))):
        with pytest.raises(UsageError, match=r"states of 1 samplers.*\(none\) are 0"):
            LOADERS[kind](batch_size=4, sampler=wrong).load_state_dict(state)

    class Refusing(Kept):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("order")

    other = LOADERS[kind](batch_size=4, sampler=Refusing())
    other.load_state_dict(state)
    with pytest.raises(UsageError, match="Refusing does not take back the state"):
        next(iter(other))


def test_an_epoch_that_is_named_begins_with_the_state_of_the_position() -> None:
    class Told(Kept):
        def set_epoch(self, epoch: int) -> None:
            self.asked = 100 * epoch

    for make in (LOADERS["inline"], LOADERS["taken"]):
        loader = make(batch_size=4, sampler=Told())
        next(iter(loader))
        state = loader.state_dict()
        loader.set_epoch(2)
        wanted = [batch[1].tolist() for batch in loader]
        other = make(batch_size=4, sampler=Told(9))
        other.load_state_dict(state)
        other.set_epoch(2)
        assert [batch[1].tolist() for batch in other] == wanted


def test_the_state_is_a_copy_and_a_loader_with_one_can_be_copied() -> None:
    class Listing(Kept):
        kept: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.kept = []

        def __iter__(self) -> Iterator[int]:
            self.kept.append(1)
            return super().__iter__()

        def state_dict(self) -> Any:
            return {"kept": self.kept}

        def load_state_dict(self, state: Any) -> None:
            self.kept = state["kept"]

    stateful = Stateful(sampler := Listing())
    state = stateful.taken()
    iter(sampler)
    stateful.put_back(state)
    assert sampler.kept == []
    iter(sampler)
    assert state == {"samplers": [{"state": {"kept": []}}]}

    loader = Loader(Still(), 4, sampler=Kept(), plan="inline")
    batches = iter(loader)
    next(batches)
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch[1].tolist() for batch in other] == [
            batch[1].tolist() for batch in copy.deepcopy(loader)
        ]


def test_samplers_around_samplers_in_a_circle_come_to_an_end() -> None:
    sampler: Any = Kept()
    sampler.sampler = sampler
    assert 1 <= len(Stateful(sampler).taken()["samplers"]) <= 8


def test_a_distributed_sampler_follows_from_its_epoch() -> None:
    """torchdata's keeps how much it gave of the epoch before: none of the next is left out."""

    class Yielding(DistributedSampler):  # type: ignore[type-arg]
        given = 0
        passed = 0

        def __iter__(self) -> Any:
            rest = list(super().__iter__())[self.passed :]
            self.passed = self.given = 0
            for index in rest:
                self.given += 1
                yield index

        def state_dict(self) -> Any:
            return {"given": self.given}

        def load_state_dict(self, state: Any) -> None:
            self.passed = state["given"]

    def make() -> Loader:
        sampler: Any = Yielding(Still(), num_replicas=2, rank=0)
        return Loader(Still(), 4, sampler=sampler, plan="inline")

    loader = make()
    list(loader)
    state = loader.state_dict()
    wanted = [batch[1].tolist() for batch in loader]
    other = make()
    other.load_state_dict(state)
    assert [batch[1].tolist() for batch in other] == wanted
