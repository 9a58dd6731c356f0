"""Changing the plan while it helps, within an epoch and between two, on a virtual clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import feed_datasets as kinds
import pytest
import torch

from hasten.devices import runtime
from hasten.feed import Loader, Plan, feeds
from hasten.feed import choose as choose_module
from hasten.feed import sizing as sizing_module
from hasten.feed.adapt import Watch
from hasten.feed.measure import Measured
from hasten.feed.moves import Moves as PlanMoves
from hasten.feed.sizing import LOCK_FREE, TOO_CHEAP, TOO_LITTLE


class Moves:
    """Up to 4 workers and 4 batches ahead of each; what was asked for is remembered."""

    def __init__(self) -> None:
        self.short = False
        self.inline_s: float | None = None

    def larger(self, plan: Plan, wait_s: float, *, crowded: bool) -> Plan | None:
        return replace(plan, workers=plan.workers + 1) if plan.workers < 4 else None

    def deeper(self, plan: Plan) -> Plan | None:
        ahead = 2 * plan.prefetch_batches
        return replace(plan, prefetch_batches=ahead) if ahead <= 16 else None

    def smaller(self, plan: Plan) -> Plan | None:
        return replace(plan, workers=1, reason="memory is short") if self.short else None

    def without(self, plan: Plan, period_s: float, step_s: float) -> Plan | None:
        if self.inline_s is None or period_s < self.inline_s + step_s or not plan.workers:
            return None
        return Plan(name="inline", reason="no gain")


class World:
    """A loop whose step takes `step_s` and whose batches take `wait_s(plan, number)` to come."""

    def __init__(self, wait_s: Callable[[Plan, int], float], step_s: float = 0.01) -> None:
        self.wait_s = wait_s
        self.step_s = step_s
        self.moves = Moves()
        self.watch = Watch(self.moves)
        self.plans: list[Plan] = []

    def epoch(self, plan: Plan, batches: int = 1000) -> Plan:
        self.watch.begin()
        for number in range(batches):
            late = 5.0 if number == 0 else 0.0
            self.watch.saw(self.wait_s(plan, number) + late, self.step_s)
            if self.watch.full:
                plan = self.watch.decide(plan, batches - number - 1)
                self.note(plan)
        if self.watch.full:
            plan = self.watch.decide(plan)
            self.note(plan)
        return plan

    def note(self, plan: Plan) -> None:
        if not self.plans or (self.plans[-1].workers, self.plans[-1].prefetch_batches) != (
            plan.workers,
            plan.prefetch_batches,
        ):
            self.plans.append(plan)

    @property
    def workers(self) -> list[int]:
        return [plan.workers for plan in self.plans]


PLAN = Plan(name="processes", reason="3 ms a sample", workers=1, prefetch_batches=2)


def test_it_climbs_within_an_epoch_while_the_loop_waits_and_batches_come_sooner() -> None:
    world = World(lambda plan, _: 0.1 / plan.workers)
    plan = world.epoch(PLAN)
    assert world.workers == [2, 3, 4]
    assert plan.reason.count("the loop waited") == 1, "it says what was seen last"


def test_it_stops_where_the_loop_does_not_wait() -> None:
    world = World(lambda plan, _: 0.1 if plan.workers == 1 else 0.0)
    assert world.epoch(PLAN).workers == 2
    assert world.workers == [2]
    assert world.plans[-1].step_s is None or world.plans[-1].step_s == pytest.approx(0.01)


def test_it_steps_back_within_the_epoch_and_stays_when_more_is_no_faster() -> None:
    world = World(lambda plan, _: {1: 0.10, 2: 0.06, 3: 0.08}[plan.workers])
    plan = world.epoch(PLAN, batches=200)
    assert world.workers == [2, 3, 2]
    assert "processes with 3, 2 batches ahead, took 1.29 times as long" in plan.reason
    assert world.epoch(plan, batches=50).workers == 2
    assert world.workers == [2, 3, 2]


def test_what_gained_nothing_is_tried_again_more_and_more_seldom() -> None:
    world = World(lambda plan, _: {1: 0.10, 2: 0.06, 3: 0.08}[plan.workers])
    plan = world.epoch(PLAN, batches=3000)  # 210 s: tried after 1, 21, 62 and 143
    assert plan.workers == 2
    assert world.workers == [2, 3, 2, 3, 2, 3, 2, 3, 2]
    assert plan.reason.count("took") == 1, "the last time says it"


def test_workers_that_gained_nothing_on_a_busy_machine_gain_once_it_is_free() -> None:
    world = World(lambda plan, _: 0.05 if not plan.workers else 0.1 if busy else 0.02)
    world.moves.inline_s = 0.05
    more = world.moves.larger
    world.moves.larger = (  # type: ignore[method-assign]
        lambda plan, *args, **kind: more(plan, *args, **kind) if plan.workers else PLAN
    )
    busy = True
    plan = world.epoch(PLAN, batches=60)
    assert plan.name == "inline"
    busy = False
    plan = world.epoch(plan, batches=200)
    assert plan.name == "inline", "it was tried a moment ago"
    plan = world.epoch(plan, batches=400)
    assert plan.name == "processes"


def test_a_few_late_batches_ask_for_more_ahead_not_for_more_workers() -> None:
    world = World(lambda plan, number: 0.12 * (number % 8 == 0) / plan.prefetch_batches)
    plan = world.epoch(PLAN)
    assert (plan.workers, plan.prefetch_batches) == (1, 16)


def test_nothing_changes_near_the_end_but_after_it() -> None:
    world = World(lambda plan, _: 0.05 / plan.workers)
    plan = world.epoch(PLAN, batches=14)
    assert world.workers == [1, 2], "3 batches are not worth new workers, the next epoch is"
    assert plan.workers == 2


def test_short_epochs_tell_nothing() -> None:
    world = World(lambda plan, _: 0.001, step_s=0.0001)
    for _ in range(3):
        world.epoch(PLAN, batches=100)
    assert world.plans == []


def test_short_epochs_are_judged_together() -> None:
    world = World(lambda plan, _: 0.001 / plan.workers, step_s=0.0001)
    plan = PLAN
    for _ in range(8):
        plan = world.epoch(plan, batches=100)
    assert world.workers[:2] == [1, 2]


def test_the_first_batches_are_no_measure() -> None:
    """The first batch takes 5 s in this world: of 12 batches, that would be nearly all."""
    world = World(lambda plan, _: 0.0, step_s=1.0)
    world.epoch(PLAN, batches=12)
    assert world.workers == [1]


def test_memory_that_runs_short_comes_first_and_ends_the_climb() -> None:
    world = World(lambda plan, _: 0.1 / plan.workers)
    world.moves.short = True
    plan = world.epoch(replace(PLAN, workers=3, prefetch_batches=6))
    world.moves.short = False
    assert (plan.workers, plan.reason) == (1, "memory is short")
    assert world.epoch(plan).workers == 1


def test_memory_that_runs_short_is_seen_where_the_loop_does_not_wait() -> None:
    """With all the batches ahead that there may be, which take the most memory."""
    world = World(lambda plan, _: 0.0)
    world.epoch(replace(PLAN, workers=3, prefetch_batches=6), batches=200)
    asked: list[Plan] = []
    smaller = world.moves.smaller
    world.moves.smaller = lambda plan: asked.append(plan) or smaller(plan)  # type: ignore[method-assign, func-returns-value]
    plan = world.epoch(replace(PLAN, workers=3, prefetch_batches=6), batches=500)
    assert plan.workers == 3
    assert 8 <= len(asked) <= 12, "about once in half a second, not for each of the 500 batches"
    asked.clear()
    world.moves.short = True
    world.watch.begin()
    for number in range(100):
        world.watch.saw(0.0, 0.01)
        plan = world.watch.decide(plan, 10_000 - number) if world.watch.full else plan
    assert plan.workers == 1, "in the epoch, not after it"


def test_a_trial_that_goes_wrong_is_short() -> None:
    watch = Watch(Moves())
    plan = PLAN
    for _ in range(200):
        watch.saw(0.005, 0.001)
        if watch.full:
            plan = watch.decide(plan, 10_000)
            break
    assert plan.workers == 2
    batches = 0
    while plan.workers == 2:
        watch.saw(0.010, 0.001)
        batches += 1
        if watch.full:
            plan = watch.decide(plan, 10_000)
    assert plan.workers == 1
    assert batches < 30, "11 ms each: half a second would be 45"


class Noting(Moves):
    """What it was asked for more with."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def larger(self, plan: Plan, wait_s: float, *, crowded: bool) -> Plan | None:
        self.asked.append((wait_s, crowded))
        return None


@pytest.mark.parametrize(("queued_s", "asked_s"), [(0.0, 0.1), (0.5, 0.05), (9.0, 0.0)])
def test_what_others_take_of_the_cores_is_not_what_a_batch_takes(
    queued_s: float, asked_s: float
) -> None:
    """Ten batches, 1 s in all, of which the loop's thread stood in the queue for so long."""

    queue = iter([3.0, 3.0 + queued_s])
    moves = Noting()
    watch = Watch(moves, lambda: next(queue))
    for _ in range(13):
        watch.saw(0.1, 0.0)
    watch.decide(PLAN)
    assert [wait_s for wait_s, _ in moves.asked] == [pytest.approx(asked_s)]


@pytest.mark.parametrize(("queued_s", "crowded"), [(0.0, False), (0.03, False), (0.09, True)])
def test_others_are_seen_to_want_the_cores_where_the_step_waits_for_one(
    queued_s: float, crowded: bool
) -> None:
    """Ten batches, 1 s in all, of which 0.2 s is the step's."""
    queue = iter([3.0, 3.0 + queued_s])
    moves = Noting()
    watch = Watch(moves, lambda: next(queue))
    for _ in range(13):
        watch.saw(0.08, 0.02)
    watch.decide(PLAN)
    assert [crowd for _, crowd in moves.asked] == [crowded]


@pytest.mark.parametrize(
    ("first_s", "each_s", "batches"),
    [(0.03, 1.0, 2), (9.0, 1.0, 2), (9.0, 0.2, 5), (9.0, 0.04, 16)],
)
def test_a_trial_that_loses_much_in_its_first_batches_is_over_at_once(
    first_s: float, each_s: float, batches: int
) -> None:
    """Those are not counted, and may take a whole short epoch. Its first one stands apart, as
    workers take their time to begin; as many as there are workers may come late together."""
    watch = Watch(Moves())
    plan = PLAN
    while plan.workers == 1:
        watch.saw(0.02, 0.01)
        plan = watch.decide(plan, 10_000) if watch.full else plan
    waits, seen = iter([first_s, *[each_s] * 50]), 0
    while plan.workers == 2:
        watch.saw(next(waits), 0.01)
        seen += 1
        plan = watch.decide(plan, 10_000) if watch.full else plan
    assert (plan.workers, seen) == (1, batches)
    assert "times as long" in plan.reason


@pytest.mark.parametrize(("inline_wait_s", "name"), [(0.002, "inline"), (0.02, "processes")])
def test_prefetching_that_does_not_win_is_dropped(inline_wait_s: float, name: str) -> None:
    world = World(lambda plan, _: 0.006 if plan.workers else inline_wait_s, step_s=0.001)
    world.moves.inline_s = 0.002
    assert world.epoch(PLAN).name == name


class Slow(kinds.Plain):
    """Takes 1 s a batch of the test's clock while it is made inline, nothing by workers."""

    def __init__(self, count: int = 80) -> None:
        super().__init__(count)
        self.now = 0.0

    def __getitem__(self, index: int) -> Any:
        self.now += 0.25
        return super().__getitem__(index)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    cost = Measured(samples=9, seconds=0.25, cpu_seconds=0.25, collate_seconds=0.0, bytes=32)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)


def test_a_loader_changes_its_plan_in_the_epoch_and_says_so(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose_module, "_START_WORKERS_S", 1e9)
    dataset = Slow()
    expected = list(Loader(Slow(), 4, plan="inline", shuffle=True))
    with (
        caplog.at_level(logging.INFO, "hasten.feed"),
        Loader(dataset, 4, shuffle=True, clock=lambda: dataset.now) as loader,
    ):
        assert loader.plan.name == "inline"
        assert all(map(kinds.same, loader, expected)), "no batch lost, none twice, none changed"
        assert loader.plan.name == "processes"
        assert len(dataset.asked) == 4 * 12, "11 inline, and the head; the rest by processes"
        assert "the loop waited 100% of the time" in str(loader.plan)
        assert "changed from inline" in loader.explain()
        loader.set_epoch(0)
        assert all(map(kinds.same, loader, expected))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("(before: inline" in line for line in lines) == 1


@pytest.mark.parametrize("options", [{"plan": "inline"}, {"num_workers": 0}])
def test_what_was_asked_for_is_kept(options: dict[str, Any], two_cores: None) -> None:
    dataset = Slow()
    loader = Loader(dataset, 4, clock=lambda: dataset.now, **options)
    list(loader)
    assert loader.plan.name == "inline"


def moves(cost: Measured, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PlanMoves:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    loader = Loader(kinds.Plain(1000), 10, **options)
    assert loader.plan.name
    found = loader._feeds._planner
    assert found is not None
    return found.moves


COST = Measured(samples=9, seconds=0.01, cpu_seconds=0.01, bytes=1 << 20)


def test_little_memory_makes_it_smaller_and_keeps_it_from_growing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    plan = replace(PLAN, workers=4, prefetch_batches=8)
    plans = moves(COST, monkeypatch)
    host = {"free": 1 << 34, "shm": 1 << 34}
    memory = lambda device: runtime.Memory(host["free"], 1 << 34)  # noqa: E731
    monkeypatch.setattr(runtime, "memory", memory)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: host["shm"])
    assert plans.smaller(plan) is None
    assert plans.deeper(plan) is not None
    host["shm"] = 70 << 20
    less = plans.smaller(plan)
    assert less is not None and (less.workers, less.prefetch_batches) == (2, 4)
    assert "70 MiB left in /dev/shm" in less.reason
    assert plans.deeper(plan) is None
    host.update(shm=1 << 34, free=1 << 28)
    less = plans.smaller(plan)
    assert less is not None and "256 MiB of memory left" in less.reason
    assert plans.larger(plan, 0.1) is None


def test_cores_that_are_taken_away_make_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's quota, or an affinity mask, may be set anew while a run goes on."""
    cores = [4]
    monkeypatch.setattr(runtime, "cores", lambda: cores[0])
    plan = replace(PLAN, workers=4, prefetch_batches=8)
    plans, waiting = moves(COST, monkeypatch), replace(COST, cpu_seconds=0.001)
    assert plans.smaller(plan) is None
    cores[0] = 3
    less = plans.smaller(plan)
    assert less is not None and (less.workers, less.prefetch_batches) == (3, 6)
    assert less.reason.endswith("; 3 cores left")
    cores[0] = 1
    less = plans.smaller(plan)
    assert less is not None and (less.workers, less.prefetch_batches) == (1, 2)
    assert less.reason.endswith("; 1 core left")
    assert moves(waiting, monkeypatch).smaller(plan) is None, "samples that wait want more"
    assert moves(COST, monkeypatch, num_workers=4).smaller(plan) is None, "asked for"


def test_a_prefetch_factor_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    asked = Loader(kinds.Plain(1000), 10, prefetch_factor=3, plan="threads", num_workers=1).plan
    assert (asked.prefetch_batches, asked.prefetch_bytes) == (3, 0)
    plans = moves(COST, monkeypatch, prefetch_factor=3)
    waiting = replace(PLAN, workers=2, prefetch_batches=6)
    assert plans.deeper(waiting) is None
    more = plans.larger(waiting, 0.1)
    assert more is not None and (more.workers, more.prefetch_batches) == (3, 9)
    free = [1 << 20]
    monkeypatch.setattr(runtime, "memory", lambda device: runtime.Memory(free[0], 1 << 34))
    less = plans.smaller(more)
    assert less is not None and (less.workers, less.prefetch_batches) == (1, 3)
    assert plans.smaller(less) is None
    free[0] = 1 << 34
    chosen = plans.larger(Plan(name="inline", reason=""), 0.1)
    assert chosen is not None and chosen.name == "processes"
    assert (chosen.prefetch_batches, chosen.prefetch_bytes) == (3 * chosen.workers, 0)


@pytest.mark.parametrize(("persistent", "kept"), [(None, True), (True, False), (False, False)])
def test_persistent_workers_that_were_asked_for_are_what_decides(
    persistent: bool | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not whether the data set has changed: see the docs for what a DataLoader's do."""
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    plans = moves(COST, monkeypatch, persistent_workers=persistent)
    plan = plans.larger(Plan(name="inline", reason=""), 0.1)
    assert plan is not None and (plan.name, plan.kept) == ("processes", kept)


@pytest.mark.parametrize(
    ("free", "name", "says"),
    [
        (4096, "inline", "but /dev/shm has room for no batches; the loop waited 100% of the time"),
        (1 << 13, "processes", "/dev/shm has room for 1 workers' batches; the loop waited"),
    ],
)
def test_a_small_dev_shm_is_said_where_workers_would_help(
    free: int, name: str, says: str, two_cores: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(choose_module, "_START_WORKERS_S", 1e9)
    cost = Measured(samples=9, seconds=0.25, cpu_seconds=0.25, bytes=1 << 9)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    monkeypatch.setattr(sizing_module, "shared_memory_free", lambda: free)
    dataset = Slow()
    with (
        caplog.at_level(logging.INFO, "hasten.feed"),
        Loader(dataset, 4, clock=lambda: dataset.now) as loader,
    ):
        list(loader)
        assert (loader.plan.name, loader.plan.workers) == (name, int(name == "processes"))
        assert says in loader.explain()
        list(loader)
    assert len([m for m in caplog.messages if says in m and "(before: inline" in m]) == 1


def test_what_the_loop_makes_in_no_time_is_not_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The samples tried took longer than those of the loop do: its own are what counts."""
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    inline = Plan(name="inline", reason="")
    plans = moves(COST, monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert plans.larger(inline, 0.0029) is None
    assert plans.larger(inline, 0.0031) is not None
    beside = replace(inline, copied=True)
    assert plans.larger(beside, 0.001) is not None, "the step is a device's, the cores are free"
    assert plans.larger(beside, 0.0001) is None


@pytest.mark.parametrize(
    ("threads", "made_s", "step_s", "workers"),
    [
        (4, 0.001, 0.001, None),  # PyTorch's threads spin on all of the cores
        (3, 0.001, 0.001, 1),
        (1, 0.001, 0.001, 3),
        (1, 0.001, 0.0001, None),  # a step so short hides nothing
        (1, 0.0001, 0.001, None),
        (1, 0.001, None, None),
        (4, 0.01, None, 4),
    ],
)
def test_cheap_batches_are_handed_over_where_pytorch_leaves_a_core(
    threads: int,
    made_s: float,
    step_s: float | None,
    workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inline = Plan(name="inline", reason="", step_s=step_s)
    cheap = replace(COST, seconds=made_s / 10)
    plan = moves(cheap, monkeypatch).larger(inline, made_s)
    assert (plan and plan.workers) == workers
    assert plan is None or (plan.niceness == 0) == (made_s < 0.003), "cores of their own"
    if plan is not None:
        assert moves(cheap, monkeypatch).larger(plan, made_s) is None, "the others are taken"


def test_threads_that_wait_for_one_lock_after_all_give_way_to_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    threads = Plan(name="threads", reason="seemed free", workers=2, prefetch_batches=2)
    plan = moves(COST, monkeypatch).larger(threads, 0.1)
    assert plan is not None and (plan.name, plan.workers) == ("processes", 2)
    assert moves(replace(COST, steady=False), monkeypatch).larger(threads, 0.1) is None
    waiting = moves(replace(COST, cpu_seconds=0.001), monkeypatch).larger(threads, 0.1)
    assert waiting is not None and (waiting.name, waiting.workers) == ("threads", 3)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            Plan(name="inline", reason=f"1 ms a sample, 90 ms an epoch{TOO_LITTLE}; more"),
            "1 ms a sample, 90 ms an epoch; more",
        ),
        (Plan(name="inline", reason=f"1 ms a sample{TOO_CHEAP}"), "1 ms a sample"),
        (
            Plan(
                name="threads",
                reason=f"1 ms a sample{LOCK_FREE}",
                workers=2,
                prefetch_batches=2,
            ),
            "1 ms a sample",
        ),
    ],
)
def test_a_plan_of_processes_does_not_say_why_there_should_be_none(
    plan: Plan, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    plans = moves(COST, monkeypatch)
    new = plans.larger(plan, 0.1)
    assert new is not None and (new.name, new.reason) == ("processes", reason)
    if plan.name == "threads":
        instead = moves(COST, monkeypatch).instead(plan, "it deadlocks")
        assert instead.reason == f"{reason}; not threads: it deadlocks"


def test_files_that_samples_keep_open_are_not_shared_with_forked_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    inline = Plan(name="inline", reason="")
    assert moves(COST, monkeypatch).larger(inline, 0.1) is not None
    assert moves(replace(COST, opens=True), monkeypatch).larger(inline, 0.1) is None


def test_samples_whose_trial_was_cut_short_are_not_taken_for_ones_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known of their processor time: more workers than cores are for those that wait."""
    monkeypatch.setattr(runtime, "cores", lambda: 4)
    cut = Measured(samples=1, seconds=0.9, cpu_seconds=0.0, cut=True)
    waiting = replace(cut, cut=False)
    four = replace(PLAN, workers=4, prefetch_batches=8)
    assert moves(cut, monkeypatch).larger(four, 0.9) is None
    more = moves(waiting, monkeypatch).larger(four, 0.9)
    assert more is not None and more.workers == 5
    monkeypatch.setattr(runtime, "cores", lambda: 1)
    inline = Plan(name="inline", reason="")
    assert moves(cut, monkeypatch).larger(inline, 0.9) is None, "one core has nothing to share"
    assert moves(waiting, monkeypatch).larger(inline, 0.9) is not None


def test_the_step_is_seen_and_said() -> None:
    now = [0.0]
    loader = Loader(torch.utils.data.TensorDataset(torch.arange(100)), 2, clock=lambda: now[0])
    assert loader.plan.step_s is None
    for _ in loader:
        now[0] += 0.0081
    assert str(loader.plan).endswith("; step 8.1 ms")


def test_plans_that_read_the_same_are_told_apart() -> None:
    old = Plan(name="processes", reason="2 ms", workers=2, prefetch_batches=4, niceness=10)
    same = "processes, 2 processes - 2 ms"
    ahead = feeds.told_apart(old, replace(old, prefetch_batches=8))
    assert ahead == (f"{same}, 4 batches ahead", f"{same}, 8 batches ahead")
    nice = feeds.told_apart(old, replace(old, niceness=0))
    assert nice == (f"{same}, at niceness +10", f"{same}, at niceness +0")
    other = feeds.told_apart(old, replace(old, workers=3))
    assert other == (same, "processes, 3 processes - 2 ms")
