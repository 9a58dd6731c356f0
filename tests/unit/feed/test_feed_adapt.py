"""Climbing to more workers while it helps, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import feed_datasets as kinds
import pytest

from hasten.feed import Loader, Plan
from hasten.feed.adapt import Watch


class World:
    """A loop whose step takes `step_s` and whose batches take `batch_s(workers)` to come."""

    def __init__(self, batch_s: Callable[[int], float], step_s: float = 0.01) -> None:
        self.now = 0.0
        self.batch_s = batch_s
        self.step_s = step_s

    def epoch(self, watch: Watch, plan: Plan, batches: int = 100) -> Plan:
        def items() -> Iterator[int]:
            for number in range(batches):
                self.now += self.batch_s(plan.workers) + (5.0 if number == 0 else 0.0)
                yield number

        for _ in watch.timed(items()):
            self.now += self.step_s
        return watch.next_plan(plan)

    def epochs(self, count: int, plan: Plan, grow: Any) -> list[int]:
        watch = Watch(grow, lambda: self.now)
        workers = [plan.workers]
        for _ in range(count):
            plan = self.epoch(watch, plan)
            workers.append(plan.workers)
        self.plan = plan
        return workers


PLAN = Plan(name="processes", reason="3 ms a sample", workers=1, prefetch_batches=2)


def _grow(plan: Plan) -> Plan | None:
    return replace(plan, workers=plan.workers + 1) if plan.workers < 4 else None


def test_it_climbs_while_the_loop_waits_and_epochs_get_faster() -> None:
    world = World(lambda workers: 0.1 / workers)
    assert world.epochs(5, PLAN, _grow) == [1, 2, 3, 4, 4, 4]
    assert "the loop waited" in world.plan.reason


def test_it_stops_where_the_loop_does_not_wait() -> None:
    world = World(lambda workers: 0.1 if workers == 1 else 0.0)
    assert world.epochs(4, PLAN, _grow) == [1, 2, 2, 2, 2]


def test_it_steps_back_and_stays_when_more_is_no_faster() -> None:
    world = World(lambda workers: {1: 0.10, 2: 0.06, 3: 0.08}[workers])
    assert world.epochs(6, PLAN, _grow) == [1, 2, 3, 2, 2, 2, 2]
    assert "processes with 3 took 1.29 times as long" in world.plan.reason


def test_short_epochs_tell_nothing() -> None:
    world = World(lambda workers: 0.001, step_s=0.0001)
    assert world.epochs(3, PLAN, _grow) == [1, 1, 1, 1]


def test_the_first_batches_are_no_measure() -> None:
    """The first batch takes 5 s in this world: of 12 batches, that would be nearly all."""
    world = World(lambda workers: 0.0, step_s=1.0)
    watch = Watch(_grow, lambda: world.now)
    assert world.epoch(watch, PLAN, batches=12) == PLAN


class Slow(kinds.Fetching):
    """Takes 1 s a batch of the test's clock while it is made inline, nothing by workers."""

    def __init__(self) -> None:
        super().__init__(80)
        self.now = 0.0

    def __getitem__(self, index: int) -> Any:
        self.now += 0.25
        return super().__getitem__(index)

    fetch = None  # type: ignore[assignment]


def test_a_loader_changes_its_plan_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.feed.choose.runtime.cores", lambda: 2)
    monkeypatch.setattr("hasten.feed.choose._START_WORKERS_S", 1e9)
    dataset = Slow()
    with Loader(dataset, 4, clock=lambda: dataset.now) as loader:
        assert loader.plan.name == "inline"
        first = list(loader)
        assert loader.plan.name == "processes"
        assert "the loop waited 100% of the time" in str(loader.plan)
        assert "changed from inline" in loader.explain()
        list(loader)
        loader.set_epoch(0)
        assert all(map(kinds.same, loader, first))


@pytest.mark.parametrize("options", [{"plan": "inline"}, {"num_workers": 0}])
def test_what_was_asked_for_is_kept(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.feed.choose.runtime.cores", lambda: 2)
    dataset = Slow()
    loader = Loader(dataset, 4, clock=lambda: dataset.now, **options)
    list(loader)
    assert loader.plan.name == "inline"
