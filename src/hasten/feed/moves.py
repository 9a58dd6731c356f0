"""The next plan to try while one runs, where that one leaves the loop waiting."""

from __future__ import annotations

from dataclasses import replace

import torch

from hasten.devices import runtime
from hasten.feed.measure import Measured
from hasten.feed.plan import Plan
from hasten.feed.sizing import (
    AGAINST_PROCESSES,
    CHEAP_BATCH_S,
    MOST_WORKERS,
    TOO_CHEAP,
    Sizing,
)
from hasten.observe.remedies import Remedy

_BESIDE_S = 0.0004  # what is handed over where the step leaves cores to the workers
_MOST_AHEAD = 8  # batches a worker


class Moves:
    """What can be tried with one data set; each gives None where there is nothing to try."""

    def __init__(self, sizing: Sizing) -> None:
        self._sizing = sizing
        self._chosen = sizing.options.chosen
        self._unfit: set[str] = set()

    def larger(self, plan: Plan, wait_s: float, *, crowded: bool = False) -> Plan | None:
        """The next plan to try where the loop waits; None where this one is all there is.

        Where only room is lacking for workers, it is this one again, whose reason says so.

        Args:
            plan: the one that runs.
            wait_s: for a batch, as seen: where the loop makes it, what that takes by itself.
            crowded: other programs want the cores.
        """
        if not self._chosen or plan.name not in ("inline", "threads", "processes"):
            return None
        single = plan.name == "inline" or (plan.name == "threads" and plan.workers == 1)
        if self._sizing.maker.fetch is None and single:
            return self._handed_over(plan, wait_s, crowded)
        if plan.name == "inline":
            have, cost = runtime.cores(), self._sizing.seen
            if "threads" in self._unfit or have == 1 or (cost is not None and not cost.steady):
                return None
            return _like(self._sizing.by_threads(have, plan.reason.replace(TOO_CHEAP, "")), plan)
        if plan.niceness and crowded:  # what the step leaves, other programs take
            return replace(plan, niceness=0)
        return self._more(plan) or self._unlocked(plan, crowded)

    def _handed_over(self, plan: Plan, wait_s: float, crowded: bool) -> Plan | None:
        """What the loop's thread makes, or the one beside it, by processes."""
        cost = self._apart
        if cost is None or (runtime.cores() == 1 and not cost.waits):
            return None
        most = self._most(plan, wait_s if plan.name == "inline" else self._sizing.batch_s(cost))
        if not most:
            return None
        reason = _for_processes(plan.reason)
        new = self._sizing.by_processes(cost, reason, most=most, crowded=crowded)
        if most < MOST_WORKERS:  # on cores of their own, they give way to nobody
            new = replace(new, niceness=0)
        return _like(new, plan)

    def _more(self, plan: Plan) -> Plan | None:
        """A quarter more threads or processes."""
        cost = self._sizing.seen
        count = plan.workers + max(1, plan.workers // 4)
        most = MOST_WORKERS
        if cost is None or not cost.waits:
            most = min(most, runtime.cores())
        if plan.name == "processes" and cost is not None:
            most = min(most, self._most(plan, self._sizing.batch_s(cost)))
        if count > most or self._sizing.within_memory(count) < count:
            return None
        ahead = plan.prefetch_batches * count // plan.workers
        return replace(plan, workers=count, prefetch_batches=max(ahead, count))

    def _unlocked(self, plan: Plan, crowded: bool) -> Plan | None:
        """Processes, where as many threads as cores make samples: the interpreter's lock may have
        seemed free when they were tried, on a busy machine."""
        cost = self._apart
        if plan.name != "threads" or self._sizing.maker.fetch is not None:
            return None
        if cost is None or cost.waits or plan.workers < runtime.cores():
            return None
        reason = _for_processes(plan.reason)
        return _like(self._sizing.by_processes(cost, reason, crowded=crowded), plan)

    @property
    def _apart(self) -> Measured | None:
        """What samples cost, where processes may make them; else None."""
        cost = self._sizing.seen
        if cost is None or not cost.forks or "processes" in self._unfit:
            return None
        return cost

    @staticmethod
    def _most(plan: Plan, batch_s: float) -> int:
        """Workers that batches of so many seconds pay for."""
        if batch_s >= CHEAP_BATCH_S or (plan.copied and batch_s >= _BESIDE_S):
            return MOST_WORKERS
        # The step computes on the host: a core of its own is all that pays a worker for so little,
        # and PyTorch's threads spin on theirs until the next step.
        if plan.copied or min(batch_s, plan.step_s or 0.0) < _BESIDE_S:
            return 0
        return max(0, runtime.cores() - torch.get_num_threads())

    def deeper(self, plan: Plan) -> Plan | None:
        """The same with more batches ahead, where the loop waits for a few late ones."""
        asked = self._sizing.options.prefetch_factor is not None
        if not self._chosen or not plan.workers or asked:
            return None
        ahead = 2 * plan.prefetch_batches
        if ahead > _MOST_AHEAD * plan.workers or not self._sizing.has_room_for(plan, ahead):
            return None
        return replace(plan, prefetch_batches=ahead)

    def smaller(self, plan: Plan) -> Plan | None:
        """Half of it, where the host's memory or /dev/shm runs short; as many workers as there are
        cores, where those have become fewer; None where neither is so."""
        if not self._chosen or plan.name not in ("threads", "processes"):
            return None
        asked, cost = self._sizing.options.prefetch_factor, self._sizing.seen
        count, short = max(1, plan.workers // 2), self._sizing.shortage(plan)
        ahead = max(count, plan.prefetch_batches // 2)
        if not short and (cost is None or not cost.waits):
            count = min(plan.workers, runtime.cores())
            ahead = plan.prefetch_batches * count // plan.workers
            short = f"{count} core{'s' * (count > 1)} left" if count < plan.workers else ""
        ahead = ahead if asked is None else asked * count
        if not short or ahead == plan.prefetch_batches:
            return None
        return replace(
            plan, workers=count, prefetch_batches=ahead, reason=f"{plan.reason}; {short}"
        )

    def without(self, plan: Plan, period_s: float, step_s: float) -> Plan | None:
        """`inline`, where batches ahead of the loop gain nothing: none of them is worth a wait.

        Args:
            period_s: from one batch to the next, with this plan.
            step_s: of those, the loop's own.
        """
        cost = self._sizing.seen
        if not self._chosen or not plan.workers or cost is None or cost.cut:
            return None
        if period_s <= 1.05 * (self._sizing.batch_s(cost) + step_s):
            return None
        reason = f"{plan.reason}; batches made ahead came later than made when asked for"
        return _like(Plan(name="inline", reason=reason), plan)

    def instead(self, plan: Plan, why: str) -> Plan:
        """A plan for the rest, and for good, after this one turned out not to suit the data set or
        the machine."""
        self._unfit.add(plan.name)
        reason = f"{plan.reason}; not {plan.name}: {why}"
        cost = self._apart
        worth = cost is not None and self._sizing.batch_s(cost) >= CHEAP_BATCH_S
        if plan.name == "threads" and worth and cost is not None and self._chosen:
            return _like(self._sizing.by_processes(cost, _for_processes(reason)), plan)
        remedy: Remedy = "room" if plan.name == "processes" else "cheaper"
        return _like(Plan(name="inline", reason=reason, remedy=remedy), plan)


def _for_processes(reason: str) -> str:
    for against in AGAINST_PROCESSES:
        reason = reason.replace(against, "")
    return reason


def _like(new: Plan, old: Plan) -> Plan:
    """The new plan, with what the old one does once batches are made."""
    return replace(
        new,
        pinned=old.pinned,
        copied=old.copied,
        ahead_batches=old.ahead_batches,
        ahead_bytes=old.ahead_bytes,
        blocked=old.blocked,
        transformed=old.transformed,
        step_s=old.step_s,
        remedy="source" if old.remedy == "source" else new.remedy,
    )
