"""Watching a plan while it runs, and changing it between epochs while that makes them faster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from hasten.feed.plan import Plan

Clock = Callable[[], float]

_WARM_UP_BATCHES = 10  # compilation and first allocations: no measure of the plan
_SHORT_S = 0.5  # an epoch that tells nothing
_WAITING = 0.10  # share of an epoch spent waiting from which more is tried
_GAIN = 0.97  # a change is kept if a batch takes at most this share of the time before


class Watch:
    """Climbs: more workers while the loop waits and it helps; one step back and still when not.

    What is compared is the time of whole epochs, the loop's own work included: workers that take
    the cores from it are no gain.
    """

    def __init__(self, grow: Callable[[Plan], Plan | None], clock: Clock) -> None:
        """`grow` gives the next larger plan, or None where there is none."""
        self._grow = grow
        self._clock = clock
        self._best: tuple[float, Plan] | None = None
        self._settled = False
        self._waited_s = 0.0
        self._total_s = 0.0
        self._batches = 0

    def timed(self, items: Iterator[Any]) -> Generator[Any, None, None]:
        """The same items; measures how long they were waited for, past the first few."""
        clock = self._clock
        self._waited_s = self._total_s = 0.0
        self._batches = 0
        count, begin, waited = 0, clock(), 0.0
        asked = begin
        for item in items:
            count += 1
            waited += clock() - asked
            yield item
            asked = clock()
            if count == _WARM_UP_BATCHES:
                begin, waited = asked, 0.0
        self._batches = max(0, count - _WARM_UP_BATCHES)
        self._waited_s, self._total_s = waited, clock() - begin

    def next_plan(self, plan: Plan) -> Plan:
        """The plan for the next epoch, after one with this plan was watched to its end."""
        if self._settled or not self._batches or self._total_s < _SHORT_S:
            return plan
        batch_s, waiting = self._total_s / self._batches, self._waited_s / self._total_s
        if self._best is not None and self._best[1] != plan and batch_s > _GAIN * self._best[0]:
            self._settled = True
            best_s, best = self._best
            tried = f"{_size(plan)} took {batch_s / best_s:.2f} times as long"
            return replace(best, reason=f"{best.reason}; {tried}")
        self._best = batch_s, plan
        larger = self._grow(plan) if waiting > _WAITING else None
        if larger is None:
            return plan
        return replace(larger, reason=f"{plan.reason}; the loop waited {waiting:.0%} of the time")


def _size(plan: Plan) -> str:
    return f"{plan.name} with {plan.workers}" if plan.workers else plan.name
