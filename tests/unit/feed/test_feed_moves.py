"""What a host has memory for, and plans that are dropped because they gain nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import feed_datasets as kinds
import pytest

from hasten.feed import Loader
from hasten.feed import moves as moves_module
from hasten.feed import sizing as sizing_module
from hasten.feed.measure import Measured
from hasten.feed.plan import Plan

SIZE, BYTES = 4, 1 << 20


class Fetching(kinds.Plain):
    def fetch(self, index: int, key: int) -> Any:
        return self[index]


def planner(dataset: Any, cost: Measured, free_bytes: int, monkeypatch: Any) -> Any:
    """Of a host with so much free memory and 8 cores, where samples cost that."""
    memory = SimpleNamespace(free_bytes=free_bytes, total_bytes=free_bytes)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: None)
    for module in (sizing_module, moves_module):
        monkeypatch.setattr(module.runtime, "memory", lambda device: memory)
        monkeypatch.setattr(module.runtime, "cores", lambda: 8)
    return Loader(dataset, SIZE)._feeds._new_planner()


BUSY = Measured(samples=9, seconds=0.05, cpu_seconds=0.05, free=0.0, bytes=BYTES)
DECODING = Measured(samples=9, seconds=0.05, cpu_seconds=0.05, free=1.0, bytes=BYTES)
EACH = 2 * BYTES * SIZE  # of a worker: the batch it makes, and one that waits


@pytest.mark.parametrize(
    ("kind", "cost", "name"),
    [(kinds.Plain, BUSY, "processes"), (Fetching, DECODING, "threads")],
)
@pytest.mark.parametrize(("room", "workers"), [(100, 8), (8, 8), (3, 3), (1, 1)])
def test_workers_are_as_many_as_there_is_memory_for(
    kind: Any, cost: Measured, name: str, room: int, workers: int, monkeypatch: Any
) -> None:
    """A quarter of what is free may hold batches."""
    found = planner(kind(400), cost, 4 * EACH * room, monkeypatch).plan(None)
    assert (found.name, found.workers) == (name, workers)
    assert ("memory for" in found.reason) == (name == "processes" and room < 8)


def test_no_more_workers_are_tried_than_there_is_memory_for(monkeypatch: Any) -> None:
    plan = Plan(name="threads", reason="", workers=4, prefetch_batches=4)
    roomy = planner(Fetching(400), DECODING, 4 * EACH * 5, monkeypatch)
    assert roomy.plan(None).workers == 5
    assert roomy.moves.larger(plan, 0.1).workers == 5
    short = planner(Fetching(400), DECODING, 4 * EACH * 4, monkeypatch)
    assert short.plan(None).workers == 4
    assert short.moves.larger(plan, 0.1) is None


@pytest.mark.parametrize("crowded", [False, True])
def test_workers_give_way_to_nobody_where_other_programs_want_the_cores(
    crowded: bool, monkeypatch: Any
) -> None:
    """What the training step leaves, those would take: epochs took up to seven times as long."""
    moves = planner(kinds.Plain(400), BUSY, 1 << 40, monkeypatch)
    chosen = moves.plan(None)
    assert (chosen.name, chosen.niceness) == ("processes", 10)
    more = moves.moves.larger(chosen, 0.1, crowded=crowded)
    assert more == (replace(chosen, niceness=0) if crowded else None), "all cores have a worker"
    inline = Plan(name="inline", reason="")
    begun = moves.moves.larger(inline, 0.2, crowded=crowded)
    assert (begun.name, begun.niceness) == ("processes", 0 if crowded else 10)
    queued = planner(kinds.Plain(400), replace(BUSY, queued=0.5), 1 << 40, monkeypatch)
    assert queued.plan(None).niceness == 0


@pytest.mark.parametrize(("queued", "name"), [(0.0, "processes"), (0.5, "threads")])
def test_the_lock_seems_less_free_where_other_programs_want_the_cores(
    queued: float, name: str, monkeypatch: Any
) -> None:
    cost = replace(DECODING, free=0.5, queued=queued)
    found = planner(Fetching(400), cost, 1 << 40, monkeypatch).plan(None)
    assert found.name == name


@pytest.mark.parametrize(
    ("plan", "period_s", "dropped"),
    [
        ("processes", 0.39, True),  # 0.2 s for a batch and 0.1 s for the step: 0.3 s one by one
        ("processes", 0.32, True),
        ("processes", 0.31, False),  # within a twentieth
        ("processes", 0.11, False),
        ("threads", 0.39, True),
        ("inline", 0.39, False),
    ],
)
def test_batches_made_ahead_are_dropped_only_where_they_come_late(
    plan: str, period_s: float, dropped: bool, monkeypatch: Any
) -> None:
    moves = planner(kinds.Plain(400), BUSY, 1 << 40, monkeypatch)
    moves.plan(None)
    workers = 0 if plan == "inline" else 1
    running = Plan(name=plan, reason="so", workers=workers, prefetch_batches=workers)
    found = moves.moves.without(running, period_s, 0.1)
    assert (found is not None) is dropped
    if found is not None:
        assert found.name == "inline"
        assert found.reason == "so; batches made ahead came later than made when asked for"


def test_a_plan_that_was_asked_for_or_not_measured_is_not_dropped(monkeypatch: Any) -> None:
    running = Plan(name="processes", reason="", workers=1, prefetch_batches=1)
    cut = Measured(samples=1, seconds=0.05, cpu_seconds=0.0, cut=True)
    moves = planner(kinds.Plain(400), cut, 1 << 40, monkeypatch)
    moves.plan(None)
    assert moves.moves.without(running, 9.0, 0.1) is None
    with Loader(kinds.Plain(400), SIZE, plan="processes") as loader:
        asked = loader._feeds._new_planner()
        asked._sizing._cost = BUSY
        assert asked.moves.without(running, 9.0, 0.1) is None
