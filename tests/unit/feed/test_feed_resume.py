"""Positions: an epoch goes on from any batch with the batches it would have had."""

from __future__ import annotations

from typing import Any

import feed_datasets as kinds
import pytest
import torch
from feed_datasets import same
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from hasten.errors import DataError, UsageError
from hasten.feed import Loader


def _loader(kind: str, **options: Any) -> Loader:
    dataset: Any = {
        "inline": kinds.Drawing,
        "processes": kinds.Drawing,
        "threads": kinds.Fetching,
        "gather": lambda: kinds.tables()["concat"],
        "stream": kinds.Stream,
    }[kind]()
    plan = "inline" if kind == "stream" else kind
    return Loader(dataset, 4, None if kind == "stream" else True, plan=plan, seed=9, **options)


@pytest.mark.parametrize("kind", ["inline", "threads", "gather", "stream"])
def test_from_every_batch_of_two_epochs(kind: str) -> None:
    with _loader(kind) as loader:
        whole = [list(loader), list(loader)]
        states = []
        loader.set_epoch(0)
        for _ in range(2):
            for _ in loader:
                states.append(loader.state_dict())
    assert len(states) == sum(map(len, whole))
    for state in states:
        with _loader(kind) as resumed:
            resumed.load_state_dict(state)
            rest = whole[state["epoch"]][state["batch"] :]
            assert same(list(resumed), rest)
            if state["epoch"] == 0:
                assert same(list(resumed), whole[1])


def test_worker_processes_go_on_too() -> None:
    with _loader("inline") as loader:
        whole = list(loader)
    with _loader("processes") as loader:
        batches = iter(loader)
        started = [next(batches), next(batches)]
        state = loader.state_dict()  # though the workers are further on
        batches.close()
    with _loader("processes") as loader:
        loader.load_state_dict(state)
        assert same(started + list(loader), whole)


def test_a_position_holds_for_another_plan() -> None:
    with _loader("inline") as loader:
        whole = list(loader)
    with Loader(kinds.Drawing(), 4, True, num_workers=1, seed=9) as loader:
        loader.load_state_dict({"epoch": 0, "batch": 3, "seed": 9})
        assert same(list(loader), whole[3:])


def test_samples_before_the_position_are_not_touched() -> None:
    dataset = kinds.Plain()
    loader = Loader(dataset, 4, plan="inline")
    loader.load_state_dict({"epoch": 5, "batch": 4, "seed": 0})
    list(loader)
    assert dataset.asked == list(range(16, 23))


def test_the_position_counts_what_the_loop_has_had() -> None:
    loader = Loader(kinds.Plain(), 4, plan="inline")
    assert loader.state_dict() == {"epoch": 0, "batch": 0, "seed": 0}
    batches = iter(loader)
    assert loader.state_dict() == {"epoch": 0, "batch": 0, "seed": 0}
    next(batches)
    assert loader.state_dict() == {
        "epoch": 0,
        "batch": 1,
        "seed": 0,
        "batch_size": 4,
        "shuffle": False,
    }
    list(batches)
    assert loader.state_dict() == {"epoch": 1, "batch": 0, "seed": 0}
    assert loader.to("cpu").state_dict() == loader.state_dict()


def test_epochs() -> None:
    loader = Loader(kinds.Plain(), 23, True)
    orders = [next(iter(loader))[1].tolist() for _ in range(2)]
    assert orders[0] == orders[1], "an epoch that was left starts anew"
    (first,), (second,) = list(loader), list(loader)
    assert first[1].tolist() == orders[0] != second[1].tolist()
    loader.set_epoch(1)
    assert same(list(loader), [second])
    loader.load_state_dict({"epoch": 0, "batch": 0, "seed": 0})
    loader.set_epoch(0)
    assert same(list(loader), [first])


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only() -> None:
    loader = Loader(kinds.Plain(), 4)
    loader.load_state_dict({"epoch": 2, "batch": 5, "seed": 0})
    loader.set_epoch(2)
    assert len(list(loader)) == 1
    loader.load_state_dict({"epoch": 2, "batch": 5, "seed": 0})
    loader.set_epoch(3)
    assert len(list(loader)) == 6


def test_a_position_at_the_end_gives_an_empty_rest() -> None:
    loader = Loader(kinds.Plain(), 4)
    for _ in loader:
        state = loader.state_dict()
    other = Loader(kinds.Plain(), 4)
    other.load_state_dict(state)
    assert list(other) == []
    assert other.state_dict()["epoch"] == 1


BEYOND: dict[str, Any] = {
    "a stream": lambda: Loader(kinds.Stream(), 4),
    "a stream of one worker": lambda: Loader(kinds.Stream(), 4, num_workers=1),
    "a stream of two": lambda: Loader(kinds.Stream(), 4, num_workers=2),
    "whole batches of a stream": lambda: Loader(kinds.Stream(), 4, drop_last=True),
    "a sampler": lambda: Loader(kinds.Plain(), 4, sampler=list(range(23))),
    "hasten's order": lambda: Loader(kinds.Plain(), 4),
    "taken, inline": lambda: taken(list("abcdefghijklmnopqrstuvw")),
    "taken, tensors": lambda: taken(kinds.tables()["whole"]),
    "taken, workers": lambda: taken(list("abcdefghijklmnopqrstuvw"), num_workers=1),
    "taken, a stream": lambda: taken(kinds.Counting()),
    "taken, a stream of workers": lambda: taken(kinds.Stream(), num_workers=1),
}


def taken(dataset: Any, **options: Any) -> Loader:
    return Loader.from_dataloader(DataLoader(dataset, 4, **options))


@pytest.mark.parametrize("kind", BEYOND)
def test_a_position_beyond_the_end_is_refused(kind: str) -> None:
    with BEYOND[kind]() as loader:
        states = [loader.state_dict() for _ in loader]
        state = states[-1]
        loader.load_state_dict(state)
        assert list(loader) == [], "the end is a position"
        loader.load_state_dict(states[0])
        next(iter(loader))
        with pytest.raises((DataError, UsageError), match=r"position is batch \d of"):
            loader.load_state_dict({**loader.state_dict(), "batch": state["batch"] + 1})
            list(loader)


def test_a_stream_whose_collate_function_draws_goes_on_exactly() -> None:
    options: Any = {"batch_size": 4, "collate_fn": kinds.drawing_collate}
    expected = list(Loader(kinds.Stream(), **options))
    for first in range(len(expected)):
        loader = Loader(kinds.Stream(), **options)
        loader.load_state_dict({"epoch": 0, "batch": first, "seed": 0})
        assert same(list(loader), expected[first:])


def test_iterations_side_by_side_do_not_disturb_each_other() -> None:
    for plan in ("inline", "processes"):
        with Loader(kinds.Plain(), 4, plan=plan) as loader:
            pairs = list(zip(loader, loader, strict=True))
        assert len(pairs) == 6
        assert all(same(a, b) for a, b in pairs)


def test_another_seed_is_refused() -> None:
    with pytest.raises(UsageError, match="give seed=3"):
        Loader(kinds.Plain(), seed=4).load_state_dict({"epoch": 0, "batch": 0, "seed": 3})


class _Lazy(Sampler[int]):
    """Draws from the global generator at each step."""

    def __iter__(self) -> Any:
        for _ in range(20):
            yield int(torch.randint(23, ()).item())

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("kind", ["weighted", "lazy", "own generator"])
def test_samplers_of_the_user(kind: str) -> None:
    def make() -> Loader:
        generator = torch.Generator().manual_seed(4) if kind == "own generator" else None
        weighted = WeightedRandomSampler([1.0] * 23, 20, generator=generator)
        return Loader(kinds.Plain(), 4, sampler=_Lazy() if kind == "lazy" else weighted)

    torch.manual_seed(0)
    loader = make()
    whole = [list(loader), list(loader)]
    assert not same(whole[0], whole[1])
    before = torch.get_rng_state()
    loader = make()
    list(loader)
    batches = iter(loader)
    started = [next(batches), next(batches)]
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    torch.rand(5)  # what the model draws is of no importance
    assert same(started + list(resumed), whole[1])
    torch.set_rng_state(before)
    assert same(list(make()), whole[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_distributed_sampler_gets_the_epoch() -> None:
    sampler: Any = torch.utils.data.DistributedSampler(
        kinds.Plain(), num_replicas=2, rank=1, shuffle=True
    )
    loader = Loader(kinds.Plain(), 4, sampler=sampler)
    first, second = list(loader), list(loader)
    assert not same(first, second)
    loader.set_epoch(0)
    assert same(list(loader), first)


def test_length() -> None:
    data = TensorDataset(torch.zeros(23))
    assert [len(Loader(data, 4)), len(Loader(data, 4, drop_last=True))] == [6, 5]
    assert [len(Loader(kinds.Stream(), 4)), len(Loader(kinds.Stream(), None))] == [6, 23]
    assert len(Loader(data, 4).to("cpu")) == 6
    assert len(Loader(data, batch_sampler=[[1], [2, 3]])) == 2


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": "weighted"}])
def test_an_order_from_a_generator_goes_on_from_any_place_of_a_run(options: dict[str, Any]) -> None:
    """Also where an epoch begins: there the generator is not where the last one began."""

    def make() -> Loader:
        generator = torch.Generator().manual_seed(5)
        given = dict(options)
        if "sampler" in given:
            given["sampler"] = WeightedRandomSampler([1.0] * 23, 20, generator=generator)
            generator = None
        return Loader(kinds.Plain(), 4, plan="inline", generator=generator, **given)

    loader, seen = make(), []
    for _ in range(3):
        seen.append((loader.state_dict(), None))
        for batch in loader:
            seen.append((loader.state_dict(), batch[1].tolist()))
    for place in (0, 1, 6, 7, 8, 13, 14):
        state, other = seen[place][0], make()
        other.load_state_dict(state)
        assert str(other.state_dict()) == str(state)  # before it is gone on with
        rest = [b[1].tolist() for _ in range(3 - state["epoch"]) for b in other]
        assert rest == [batch for _, batch in seen[place + 1 :] if batch is not None]


def test_of_an_epoch_that_is_named_a_position_has_no_generator_of_the_one_that_was_left() -> None:
    loader = Loader(
        kinds.Plain(), 4, True, plan="inline", generator=torch.Generator().manual_seed(5)
    )
    next(iter(loader))
    loader.set_epoch(4)
    state = loader.state_dict()
    wanted = list(loader)
    other = Loader(kinds.Plain(), 4, True, plan="inline", generator=torch.Generator())
    other.load_state_dict(state)
    assert same(list(other), wanted)


def test_a_position_within_an_epoch_of_other_batches_is_refused() -> None:
    loader = Loader(kinds.Plain(), 4, True)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(UsageError, match=r"batch 1 of an epoch with batch_size=4.* has 8"):
        Loader(kinds.Plain(), 8, True).load_state_dict(state)
    list(loader)
    Loader(kinds.Plain(), 8, True).load_state_dict(loader.state_dict())  # where an epoch begins


@pytest.mark.parametrize("workers", [(2, 3), (2, 0), ("auto", 2)])
def test_a_position_in_a_stream_read_by_other_workers_is_refused(workers: Any) -> None:
    before, after = workers
    with Loader(kinds.Stream(), 4, num_workers=before) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        del batches
    with pytest.raises(UsageError, match=r"go on with num_workers="):
        Loader(kinds.Stream(), 4, num_workers=after).load_state_dict(state)
