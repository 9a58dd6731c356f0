"""All plans give the same batches, and those that DataLoader gives."""

from __future__ import annotations

import random
import threading
from dataclasses import FrozenInstanceError, replace
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from feed_datasets import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    TensorDataset,
)

from hasten.errors import UsageError
from hasten.feed import Loader, Plan, randomness
from hasten.feed.plan import Stage

IN_PROCESS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
COMMON: dict[str, Any] = {
    "batch_size": st.integers(1, 30),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "seed": st.integers(0, 2**63),
    "epoch": st.integers(0, 5),
}
DATASETS = {
    "plain": kinds.Plain,
    "drawing": kinds.Drawing,
    "nested": kinds.Nested,
    "together": kinds.Together,
    "fetching": kinds.Fetching,
    "subset of fetching": lambda: Subset(kinds.Fetching(), [5, 3, 5, 1, 22]),
    "concat of fetching": lambda: ConcatDataset([kinds.Fetching(4), kinds.Fetching(5)]),
    "subset of drawing": lambda: Subset(kinds.Drawing(), [5, 3, 5, 1, 22]),
}


def batches(dataset: Any, *args: Any, epoch: int = 0, device: str = "", **options: Any) -> Any:
    with Loader(dataset, *args, **options) as loader:
        loader.set_epoch(epoch)
        return list(loader.to(device) if device else loader)


@pytest.mark.parametrize("name", kinds.tables())
@IN_PROCESS
@given(**COMMON)
def test_gather_is_the_way_of_single_samples(name: str, **options: Any) -> None:
    dataset = kinds.tables()[name]
    expected = batches(dataset, plan="inline", **options)
    gathered = batches(dataset, plan="gather", **options)
    assert same(gathered, expected)
    assert same(batches(dataset, device="cpu", **options), expected)


@pytest.mark.parametrize("name", ["fetching", "subset of fetching", "concat of fetching"])
@settings(IN_PROCESS, max_examples=10)
@given(**COMMON)
def test_threads_make_what_inline_makes(name: str, **options: Any) -> None:
    dataset = DATASETS[name]()
    assert same(
        batches(dataset, plan="threads", num_workers=3, **options),
        batches(dataset, plan="inline", **options),
    )


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("collate", [None, kinds.drawing_collate], ids=["default", "drawing"])
def test_processes_make_what_inline_makes(name: str, collate: Any) -> None:
    dataset = DATASETS[name]()
    options: Any = {"batch_size": 4, "shuffle": True, "seed": 3, "collate_fn": collate}
    for epoch in (0, 1):
        expected = batches(dataset, plan="inline", epoch=epoch, **options)
        assert same(batches(dataset, num_workers=2, epoch=epoch, **options), expected)


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
def test_processes_of_another_start_method(kind: str) -> None:
    options: Any = {"batch_size": 8, "shuffle": True, "collate_fn": kinds.drawing_collate}
    expected = batches(kinds.Drawing(), plan="inline", **options)
    found = batches(kinds.Drawing(), num_workers=1, multiprocessing_context=kind, **options)
    assert same(found, expected)


@pytest.mark.parametrize("collate", [None, kinds.drawing_collate], ids=["default", "drawing"])
def test_threads_with_a_collate_function(collate: Any) -> None:
    options: Any = {"batch_size": 4, "shuffle": True, "collate_fn": collate}
    expected = batches(kinds.Fetching(), plan="inline", **options)
    assert same(batches(kinds.Fetching(), plan="threads", **options), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_gives_the_same_inline_and_in_one_process(workers: int) -> None:
    options: Any = {"batch_size": 4, "collate_fn": kinds.drawing_collate}
    expected = batches(kinds.Stream(), plan="inline", epoch=3, **options)
    assert same(batches(kinds.Stream(), num_workers=workers, epoch=3, **options), expected)
    assert not same(batches(kinds.Stream(), plan="inline", epoch=4, **options), expected)


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_change_nothing(persistent: bool) -> None:
    for dataset in (kinds.Drawing(), kinds.Stream()):
        options: Any = {"num_workers": 2, "batch_size": 5}
        expected = [batches(dataset, epoch=epoch, **options) for epoch in (0, 1, 4)]
        with Loader(dataset, persistent_workers=persistent, **options) as loader:
            found = [list(loader), list(loader)]
            loader.set_epoch(4)
            found.append(list(loader))
        assert same(found, expected)


@pytest.mark.parametrize("plan", ["inline", "gather", "processes"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_unshuffled_batches_are_those_of_dataloader(plan: str, drop_last: bool) -> None:
    for dataset in (kinds.tables()["whole"], kinds.tables()["concat"]):
        expected = list(DataLoader(dataset, 5, drop_last=drop_last))
        assert same(batches(dataset, 5, drop_last=drop_last, plan=plan), expected)


@pytest.mark.parametrize(
    "dataset", [kinds.Plain(), kinds.Together(), [1, 2, 3], ["a", "b"], [{"x": 1.5}, {"x": 2.5}]]
)
@pytest.mark.parametrize("size", [None, 2])
def test_other_data_sets_give_what_dataloader_gives(dataset: Any, size: int | None) -> None:
    assert same(batches(dataset, size), list(DataLoader(dataset, size)))
    assert same(batches(dataset, size, num_workers=1), list(DataLoader(dataset, size)))
    assert len(Loader(dataset, size)) == len(DataLoader(dataset, size))


def test_samplers_are_honoured() -> None:
    table, plain = kinds.tables()["whole"], kinds.Plain()
    order = [3, 3, 22, 0, 7]
    for dataset in (table, plain):
        expected = list(DataLoader(dataset, 2, sampler=order))
        assert same(batches(dataset, 2, sampler=order), expected)
        assert same(batches(dataset, 2, sampler=order, num_workers=1), expected)
        groups = [[1, 2, 3], [-1], [4, 4]]
        expected = list(DataLoader(dataset, batch_sampler=groups))
        assert same(batches(dataset, batch_sampler=groups), expected)
        assert same(batches(dataset, batch_sampler=groups, num_workers=1), expected)


def test_a_generator_gives_the_order_that_dataloader_takes_from_it() -> None:
    for dataset in (kinds.tables()["whole"], kinds.Plain()):
        order = [torch.Generator().manual_seed(5) for _ in range(2)]
        ours = Loader(dataset, 4, True, generator=order[0])
        theirs = DataLoader(dataset, 4, True, generator=order[1])
        for _ in range(3):  # epochs
            assert same(list(ours), list(theirs))
            assert torch.equal(order[0].get_state(), order[1].get_state())
        assert not same(list(ours), list(ours))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "no batches", "of its own", "chunks"])
def test_a_generator_gives_that_order_by_any_sampler(kind: str, workers: int) -> None:
    def made(of: Any) -> Any:
        generator, other = (torch.Generator().manual_seed(seed) for seed in (5, 6))
        whose = other if kind == "of its own" else generator
        sampler: Any = RandomSampler(data, generator=whose)
        if kind == "chunks":
            sampler = RandomSampler(data, replacement=True, num_samples=70, generator=whose)
        options: dict[str, Any] = {"sampler": sampler, "batch_size": 3}
        if kind == "batch_sampler":
            options = {"batch_sampler": BatchSampler(sampler, 3, drop_last=True)}
        elif kind == "no batches":
            options["batch_size"] = None
        return of(data, generator=generator, num_workers=workers, **options)

    data = kinds.Plain()
    ours, theirs = made(Loader), made(DataLoader)
    for _ in range(2):
        assert same(list(ours), list(theirs))


@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "auto"])
def test_the_global_generators_are_left_as_they_were(plan: str) -> None:
    dataset = kinds.Fetching() if plan == "threads" else kinds.Drawing()
    options: Any = {"batch_size": 4, "shuffle": True, "collate_fn": kinds.drawing_collate}
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.randn(3).tolist()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    loader = Loader(dataset, plan=plan, **options)
    with loader:
        list(loader)
    found = torch.rand(2), random.random(), np.random.randn(3).tolist()
    assert same(found, expected)


def test_the_second_of_a_pair_of_normals_is_kept() -> None:
    """numpy hands out legacy normals in pairs; the second is not in the generator's memory."""
    np.random.seed(3)
    expected = [np.random.randn() for _ in range(4)]
    np.random.seed(3)
    found = [np.random.randn()]
    list(Loader(_Normal(), 4, plan="inline"))
    found += [np.random.randn()]
    list(Loader(_Normal(), 4, plan="inline"))
    found += [np.random.randn() for _ in range(2)]
    assert found == expected


def test_the_second_of_a_pair_of_normals_can_be_put_back() -> None:
    np.random.seed(3)
    np.random.randn()
    one_left = randomness.save()
    second = np.random.randn()
    none_left = randomness.save()  # the generator's memory is the same in both
    randomness.restore(one_left)
    assert randomness.touched(none_left) == {randomness.NUMPY}
    assert randomness.save()["numpy"]["has_gauss"] == 1
    assert np.random.randn() == second


class _Normal(kinds.Plain):
    def __getitem__(self, index: int) -> float:
        return float(np.random.randn())


def test_each_sample_has_its_own_draw_and_each_epoch_another() -> None:
    with Loader(_Normal(), 23, plan="inline") as loader:
        first, second = next(iter(loader)), None
        loader.set_epoch(1)
        second = next(iter(loader))
    values = torch.cat([first, second]).tolist()
    assert len(set(values)) == 46


def test_the_model_s_draws_between_batches_change_nothing() -> None:
    expected = batches(kinds.Drawing(), 4, plan="inline")
    found = []
    for batch in Loader(kinds.Drawing(), 4, plan="inline"):
        found.append(batch)
        torch.rand(3), random.random(), np.random.rand()
    assert same(found, expected)


def test_a_device_transform_gets_the_same_draws_on_every_plan() -> None:
    def add(batch: Any, rng: Any) -> Any:
        assert len(rng) == len(batch[0])
        return batch[0] + rng.uniform(1)[:, :, None] + rng.uniform(2).sum(1)[:, None, None]

    options: Any = {"batch_size": 4, "shuffle": True, "device_transform": add}
    table = kinds.tables()["whole"]
    expected = batches(table, plan="inline", device="cpu", **options)
    assert same(batches(table, plan="gather", device="cpu", **options), expected)
    assert same(batches(table, plan="processes", device="cpu", **options), expected)
    one_by_one = batches(table, device="cpu", **{**options, "batch_size": 1})
    assert torch.equal(torch.cat(one_by_one), torch.cat(expected))


def test_batches_that_are_kept_are_not_overwritten() -> None:
    for dataset, plan in ((kinds.tables()["whole"], "gather"), (kinds.Fetching(), "threads")):
        with Loader(dataset, 3, plan=plan) as loader:
            kept = list(loader)
            views = [batch[0][1:] for batch in loader]
            list(loader)
        assert same(kept, batches(dataset, 3, plan=plan))
        assert same(views, [batch[0][1:] for batch in batches(dataset, 3, epoch=1, plan=plan)])


def test_changing_a_batch_in_place_leaves_the_data_set_alone() -> None:
    dataset = TensorDataset(torch.zeros(8))
    for (batch,) in Loader(dataset, 4, plan="gather"):
        batch += 1
    assert not dataset.tensors[0].any()


def test_plans_say_themselves() -> None:
    now = iter(range(1000))
    plan = Loader(kinds.tables()["whole"], 4, clock=lambda: next(now) * 1e-6).plan
    assert str(plan) == "gather, 1 thread - 23 samples in memory, 0.25 µs a sample"
    plan = Loader(kinds.Plain(), num_workers=2).plan
    assert str(plan) == "processes, 2 processes - num_workers=2 asked for"
    assert plan.workers == 2
    assert "worker processes make batches" in Loader(kinds.Plain(), num_workers=1).explain()
    with pytest.raises(UsageError, match="needs at least one"):
        Plan(name="threads", reason="")
    with pytest.raises(UsageError, match="it has none"):
        Plan(name="gather", reason="", workers=1)
    with pytest.raises(UsageError, match="there are resident, gather"):
        Plan(name="magic", reason="")  # type: ignore[arg-type]


LOOKED_AT: dict[str, tuple[Any, dict[str, Any]]] = {
    "gather": (kinds.tables()["whole"], {}),
    "threads": (kinds.Fetching(), {"num_workers": 2}),
    "processes": (kinds.Plain(), {"num_workers": 2, "persistent_workers": True}),
    "inline": (kinds.Plain(), {}),
}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_plan_is_data_that_is_looked_at_without_starting_it(name: str) -> None:
    dataset, options = LOOKED_AT[name]
    loader = Loader(dataset, 4, plan=name, **options)
    before = threading.active_count(), torch.multiprocessing.active_children()
    plan = loader.plan
    assert plan.name == name
    assert str(plan) in loader.explain()
    assert (threading.active_count(), torch.multiprocessing.active_children()) == before
    assert getattr(dataset, "asked", []) == []
    for part in (plan, *plan.stages):
        with pytest.raises(FrozenInstanceError):
            part.name = "magic"  # type: ignore[misc, assignment]
        assert hash(part) == hash(replace(part)), "and may be a key"
        assert eval(repr(part), {"Plan": Plan, "Stage": Stage}) == part
        assert str(part)
    assert plan.stages[0].by in ("device", "loop", "thread", "process")
    assert replace(plan, reason="another") != plan
