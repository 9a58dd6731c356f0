"""Watching a plan while it runs, and changing it while that makes batches come sooner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from hasten.feed.measure import CROWDED
from hasten.feed.plan import Plan

Clock = Callable[[], float]

_FIRST_BATCHES = 3  # of an epoch or a plan: start-up, compilation, first allocations
_STARTING_S = 0.1  # of a plan: what its workers take to begin
_WINDOW_S = 0.5
_WINDOW_BATCHES = 8
_SURE_BATCHES = 16  # after which a trial may be over sooner
_WORSE = 1.3
_LOST_S = 0.5  # from which a trial is over at once, and a batch for each worker, that end together
_WAITING = 0.10  # share of the time spent waiting from which more is tried
_LATE = 0.5  # if fewer batches than that had to be waited for, some are late, not all
_GAIN = 0.97  # a change is kept if a batch takes at most this share of the time before
_WORTH_S = 0.2  # what is left to gain in an epoch, for a change in the middle of it
_AGAIN_S = 20.0  # after which it is tried anew what gained nothing; twice as long each time


class Moves(Protocol):
    """What can be tried; each gives None where there is nothing to try (see `moves`)."""

    def larger(self, plan: Plan, wait_s: float, *, crowded: bool) -> Plan | None:
        """More workers, where a batch is waited for so long (not counted what its maker waited for
        a core), or ones that give way to nobody where other programs want the cores; the same
        plan, with the reason, where there is no room for them."""

    def deeper(self, plan: Plan) -> Plan | None:
        """More batches ahead."""

    def smaller(self, plan: Plan) -> Plan | None:
        """Less, where memory or cores are short."""

    def without(self, plan: Plan, period_s: float, step_s: float) -> Plan | None:
        """Nothing ahead, where that is as fast."""


class Watch:
    """Climbs: deeper prefetch or more workers while the loop waits; one step back when no gain.

    The wait is the consumer's: from asking for a batch to having it, wherever it went through.
    What is compared is the time from one batch to the next over a window, the loop's own work
    included: workers that take the cores from it are no gain. The first batches of an epoch,
    and of a plan, stand apart. What gained nothing while other programs took the cores may gain
    once they have ended, so it is tried anew, more and more seldom.
    """

    def __init__(self, moves: Moves, queued: Clock = lambda: 0.0) -> None:
        """`queued`: seconds that the loop's thread has waited for a core, so far."""
        self._moves = moves
        self._queued = queued
        self._queued_s = 0.0
        self._before: tuple[float, Plan] | None = None
        self._settled = False
        self._settled_s = 0.0
        self._again_s = _AGAIN_S
        self._waits = ""  # what the plan's reason says of that
        self._reason = self._bare = ""  # of the plan gone back to, with and without what was tried
        self._skip = _FIRST_BATCHES
        self._skip_s = 0.0
        self._given = 0  # batches that were not counted yet, of a plan that is tried
        self._lost_s = 0.0  # that they took more than such batches did before
        self._most_lost_s = _LOST_S
        self._clear()

    def _clear(self) -> None:
        self._batches = self._late = 0
        self._waited_s = self._worked_s = 0.0
        self._look_s = 0.0  # when to look next whether memory or cores run short

    def begin(self) -> None:
        """An epoch starts. Short ones are judged together."""
        self._skip = max(self._skip, _FIRST_BATCHES)

    def saw(self, wait_s: float, work_s: float) -> None:
        """A batch was waited for, and worked on by the loop, for so long."""
        if self._skip > 0 or self._skip_s > 0:
            self._skip -= 1
            self._skip_s -= wait_s + work_s
            if not self._goes_wrong(wait_s + work_s):
                return
            self._skip, self._skip_s = 0, 0.0
        if not self._batches:
            self._queued_s = self._queued()
        self._batches += 1
        self._waited_s += wait_s
        self._worked_s += work_s
        self._late += wait_s > _WAITING * (wait_s + work_s)

    @property
    def full(self) -> bool:
        """Enough was seen for a decision."""
        total_s = self._waited_s + self._worked_s
        before_s = self._before[0] if self._before is not None else math.inf
        if self._batches and self._lost_s > self._most_lost_s:
            return True
        if self._batches >= _SURE_BATCHES and total_s > _WORSE * self._batches * before_s:
            return True  # a trial that goes wrong is not gone on with
        return self._batches >= _WINDOW_BATCHES and total_s >= _WINDOW_S

    def _goes_wrong(self, period_s: float) -> bool:
        """Whether a plan that is tried has lost too much already, in batches not to be counted."""
        if self._before is None:
            return False
        self._given += 1
        if self._given > 1:  # the first waits for the workers to begin
            self._lost_s = max(0.0, self._lost_s + period_s - _WORSE * self._before[0])
        return self._lost_s > self._most_lost_s

    @property
    def step_s(self) -> float | None:
        """The loop's own work on a batch, as far as seen."""
        return self._worked_s / self._batches if self._batches else None

    def decide(self, plan: Plan, left: int | None = None) -> Plan:
        """The plan to go on with: the same one, or what is worth a trial, or a step back.

        Args:
            left: batches that are left in this epoch; None if it is over.
        """
        total_s = self._waited_s + self._worked_s
        period_s, step_s = total_s / self._batches, self._worked_s / self._batches
        waiting, late = self._waited_s / total_s, self._late / self._batches
        plan = replace(plan, step_s=step_s)
        less = None
        if left is None or total_s >= self._look_s:
            self._look_s, less = total_s + _WINDOW_S, self._moves.smaller(plan)
        to_gain_s = 0.0 if left is None else left * self._waited_s / self._batches
        nothing_to_gain = left is not None and self._before is None and to_gain_s < _WORTH_S
        if less is None and nothing_to_gain:
            return plan  # more is seen until the epoch is over, and decided then
        queued_s = max(0.0, self._queued() - self._queued_s)
        computing = 1 - min(1.0, queued_s / total_s)
        # While it waits for a batch it wants no core.
        crowded = queued_s > CROWDED * self._worked_s
        self._clear()
        if less is not None:
            self._before, self._settled, self._again_s = None, True, math.inf
            return self._to(less)
        if self._before is not None:
            before_s, before = self._before
            self._before = None
            if period_s > _GAIN * before_s:
                self._settled = True
                tried = f"{_size(plan)} took {period_s / before_s:.2f} times as long"
                bare = self._bare if before.reason == self._reason else before.reason
                self._bare, self._reason = bare, f"{bare}; {tried}"
                return self._to(replace(before, reason=self._reason, step_s=step_s))
            self._settled = before.workers > 0 and not plan.workers  # the other was tried
        if self._settled:
            self._settled_s += total_s
            if self._settled_s < self._again_s:
                return plan
            self._settled, self._settled_s = False, 0.0
            self._again_s *= 2
        tried_plan = self._moves.without(plan, period_s, step_s)
        if tried_plan is None and waiting > _WAITING:
            more = self._moves.deeper(plan) if late < _LATE else None
            # What others take of the cores makes no batch worth handing over: they take it of all.
            wait_s = computing * (period_s - step_s)
            more = more or self._moves.larger(plan, wait_s, crowded=crowded)
            if more is not None:
                bare = more.reason.replace(self._waits, "")
                self._waits = f"; the loop waited {waiting:.0%} of the time"
                tried_plan = replace(more, reason=bare + self._waits)
        if tried_plan is None:
            return plan
        same = replace(tried_plan, reason=plan.reason, remedy=plan.remedy)
        if same == plan:  # it only says why there is no other
            self._settled, self._again_s = True, math.inf
            return tried_plan
        self._before = period_s, plan
        return self._to(tried_plan)

    def _to(self, plan: Plan) -> Plan:
        self._skip, self._skip_s = _FIRST_BATCHES + plan.prefetch_batches, _STARTING_S
        self._given, self._lost_s = 0, 0.0
        before_s = self._before[0] if self._before is not None else 0.0
        self._most_lost_s = _LOST_S + plan.workers * before_s
        return plan


def _size(plan: Plan) -> str:
    if not plan.workers:
        return plan.name
    nice = f" at niceness +{plan.niceness}" if plan.niceness else ""
    return f"{plan.name} with {plan.workers}{nice}, {plan.prefetch_batches} batches ahead,"
