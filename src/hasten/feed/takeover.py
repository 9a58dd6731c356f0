"""The plans for a DataLoader that was taken over, each with the results of iterating it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from hasten.feed import randomness, telling
from hasten.feed.as_it_is import iterated, numbered, pass_over
from hasten.feed.asgiven import AsGiven
from hasten.feed.draws import Draws, Foreseen
from hasten.feed.executor import Items, placed
from hasten.feed.faithful import Faithful
from hasten.feed.foresight import UNFORESEEN, Sought, TableAhead, made_ahead
from hasten.feed.iteration import Direct, Epoch, Heeded, Known, Now, unwritten
from hasten.feed.options import Options
from hasten.feed.originals import OriginalStream, OriginalWorkers, Running, begun
from hasten.feed.parts import Parts, lasts
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan
from hasten.feed.played import Virtual
from hasten.feed.sources import Gather, OnDevice, Report
from hasten.feed.taken import TakenOrder, options_of
from hasten.feed.worth import Worth

_log = logging.getLogger("hasten.feed")

Device = torch.device | None

_NO_SOONER = "epochs took longer with batches made ahead than they would have without"
_FEW = 10  # batches: of an epoch that is left by then, processes are started later in the next one


class TakenFeeds:
    """Has the place of `Feeds` in a Loader that stands for a DataLoader."""

    def __init__(
        self, loader: Any, options: Options, order: TakenOrder, report: Report, *, ahead: bool
    ) -> None:
        """`ahead`: see `Loader.from_dataloader`."""
        self.original = loader
        self.silent = False
        self._options = options
        self._order = order
        self._report = report
        self._maker = AsGiven(
            options.dataset,
            loader.collate_fn,
            skip_errors=options.on_error == "skip",
            batched=loader.batch_sampler is not None,
        )
        self._planner = Faithful(loader, options, self._maker, order, ahead=ahead)
        self._plans: dict[Device, Plan] = {}
        self._sources: dict[Device, Any] = {}
        self._changes: list[tuple[Plan, Plan]] = []
        self._now = Now()
        self._written: Any = None  # of a table, the state that workers would have
        self._kept_apart = False  # until closed: lasting ones would see nothing of later changes
        self._parts = Parts(loader)
        self._begun = False
        self._worth = Worth()
        self._begin_here = 0  # batches, before processes are started for the rest of an epoch

    @property
    def ahead(self) -> bool:
        """See `Loader.from_dataloader`."""
        return self._planner.ahead

    def renewed(self, first: int) -> tuple[Options, TakenOrder, TakenFeeds] | None:
        """What stands for the DataLoader as it is by now, from batch `first` on; None where it is
        what it was. Iterations under way go on by what stood for it.

        Raises:
            UsageError: the plan that was asked for, or the position, is none of it now.
        """
        if not self._parts.changed(begun=self._begun):
            return None
        _log.info("feed: the DataLoader's attributes are others now; it is taken over anew")
        was = self._options
        options = options_of(
            self.original,
            plan=was.plan,
            on_error=was.on_error,
            device_transform=was.device_transform,
        )
        order = self._order.renewed(first)
        made = TakenFeeds(self.original, options, order, self._report, ahead=self.ahead)
        made.silent = self.silent
        return options, order, made

    def plan(self, device: Device) -> Plan:
        """See `Feeds.plan`."""
        if device not in self._plans:
            with _unmoved():
                self._plans[device] = self._planner.plan(device)
            telling.chosen(self._plans[device])
        return self._plans[device]

    def explain(self, device: Device) -> str:
        """See `Feeds.explain`."""
        changes = [f"  changed from {old} to {new}" for old, new in self._changes]
        return "\n".join([self.plan(device).explain(self._options.timeout), *changes])

    def close(self) -> None:
        """See `Feeds.close`."""
        for source in self._sources.values():
            source.close()
        self._kept_apart = self._begun = False
        self._sources.clear()
        self._plans.clear()

    def items(self, device: Device, ahead: Ahead | None, epoch: int, first: int) -> Items:
        """See `Feeds.items`."""
        table = self._planner.table
        self._kept_apart |= self._sources != {} and lasts(self.original)
        if table is not None and not self._kept_apart and not table.holds():
            _log.info("feed: the data set's tensors, or what it does to them, are others now")
            self.close()
            self._planner.table = None
        # Drawn from now on, not when the first batch is asked for: so does iter(loader).
        plan, order = self.plan(device), self._order
        self._begun = True
        if not self.silent:
            telling.begun(plan, self._options.dataset)
        if self._planner.left:
            with order.from_start(first) as (now, _):
                batches = iterated(self.original)
                if first:
                    order.check_unmoved(lambda: pass_over(batches, first, self.original.dataset))
            return self._as_it_is(now, batches, plan, device, ahead, epoch, first)
        if self.original.num_workers:
            now, draws, _ = order.begin(first)
            running = self._running(draws, now, plan, device, first)
            if not first:
                now.before = dict(now.after)
            return begun(self._of_workers(running, plan, device, ahead, epoch))
        if plan.name == "processes" or (plan.name == "gather" and plan.ahead_batches > 1):
            now, draws, foreseen = order.begin(first, foresee=True)
            if foreseen is not None:
                return self._made_ahead(now, draws, foreseen, plan, device, ahead, epoch, first)
            self._change(device, plan, UNFORESEEN)
            plan = self.plan(device)
        else:
            now, draws, _ = order.begin(first)
        return self._direct(now, draws, plan, device, ahead, epoch, first)

    def _as_it_is(
        self,
        now: Epoch,
        batches: Any,
        plan: Plan,
        device: Device,
        ahead: Ahead | None,
        epoch: int,
        first: int,
    ) -> Items:
        """Iterating the DataLoader itself."""
        try:
            yield from self._placed(
                numbered(self.original, batches, first), plan, ahead, device, epoch
            )
            self._order.end(now)
        finally:
            shut = getattr(batches, "_shutdown_workers", None)
            if shut is not None and not lasts(self.original):
                shut()

    def _direct(
        self,
        now: Epoch,
        draws: Draws,
        plan: Plan,
        device: Device,
        ahead: Ahead | None,
        epoch: int,
        first: int,
    ) -> Items:
        """Without workers: each batch is made when the loop asks for it."""
        if plan.name not in ("gather", "resident"):
            host = self._inline(Direct(draws, now).batches(0, first), first)
            yield from self._placed(host, plan, ahead, device, epoch)
            self._order.end(now)
            return
        assert self._planner.table is not None
        heeded = Heeded(Direct(draws, now), self._planner.table, copied=plan.name == "resident")
        host = self._of_table(plan, device, heeded).batches(0, first)
        yield from self._placed(host, plan, ahead, device, epoch)
        if heeded.left is not None:
            inline = self._change(device, plan, "the loop changes the data set between batches")
            rest = chain([heeded.left], Direct(draws, now).batches(0, 0))
            made = self._inline(rest, first + heeded.given)
            yield from self._placed(made, inline, ahead, device, epoch)
        self._order.end(now)

    def _inline(self, indices: Iterator[Any], first: int) -> Items:
        for number, wanted in enumerate(indices, first):
            made = self._maker.make(0, number, wanted)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield number, made.batch, wanted if made.kept is None else made.kept
            del made

    def _made_ahead(
        self,
        now: Epoch,
        draws: Draws,
        foreseen: Foreseen,
        plan: Plan,
        device: Device,
        ahead: Ahead | None,
        epoch: int,
        first: int,
    ) -> Items:
        """Without workers: what is made ahead is given where it is what would be made now."""
        checked = self._checked(now, draws, foreseen, plan, device, ahead, first)
        after = replace(plan, pinned=False, copied=False, ahead_batches=0)
        given, left = 0, True
        try:
            for item in self._worth.timed(self._placed(checked, after, ahead, device, epoch)):
                given += 1
                yield item
                del item
            left = False
        finally:
            self._begin_here = 2 * given if left and given <= _FEW else 0
        self._order.end(now)
        if self._worth.none and self._options.plan == "auto" and self._plans.get(device) == plan:
            self._change(device, plan, _NO_SOONER)

    def _checked(
        self,
        now: Epoch,
        draws: Draws,
        foreseen: Foreseen,
        plan: Plan,
        device: Device,
        ahead: Ahead | None,
        first: int,
    ) -> Items:
        plain = replace(plan, transformed=False)
        here = replace(plain, ahead_batches=0)
        number, wanted, trouble = first, None, ""
        expected = iter(foreseen)
        for _ in range(self._begin_here if plan.name == "processes" else 0):
            wanted, _ = next(draws, None), next(expected, None)
            if wanted is None:
                return
            now.note(wanted)
            made = self._inline(iter([wanted]), number)
            wanted = None
            yield from self._placed(made, here, ahead, device, 0)
            number += 1
        source = self._sought(plan)
        items = self._placed(source.batches(expected, number), plain, ahead, device, 0)
        try:
            for number, batch, indices in items:
                wanted = next(draws, None)
                if wanted is None:
                    break
                batch, trouble = source.checked(number, batch, wanted, device)
                if trouble and batch is None:
                    break
                now.note(wanted)
                wanted = None
                yield number, batch, indices
                del batch
                number += 1
                if trouble:
                    break
        finally:
            items.close()
            source.close()
        trouble = trouble or source.trouble
        if trouble:
            self._change(device, plan, trouble)
        rest = self._inline(Direct(draws, now, wanted).batches(0, number), number)
        yield from self._placed(rest, here, ahead, device, 0)

    def _sought(self, plan: Plan) -> Sought:
        if plan.name == "gather" and self._planner.table is not None:
            return TableAhead(self._planner.table, plan)
        return made_ahead(self._maker, self._options, plan, self._worth)

    def _change(self, device: Device, plan: Plan, trouble: str) -> Plan:
        _log.info("feed: inline from here on: %s", trouble)
        now = self._planner.without(plan, trouble)
        if self._plans.get(device) == plan:
            self._plans[device] = now
            self._changes.append((plan, now))
        return now

    def _running(self, draws: Draws, now: Epoch, plan: Plan, device: Device, first: int) -> Running:
        if plan.name not in ("gather", "resident"):
            found: Running = self._source(plan, device).run(draws, now, first)
            return found
        table = self._planner.table
        assert table is not None
        if not self._kept_apart:
            self._written = table.versions(shared=False)
            self._kept_apart = lasts(self.original)
        running = Running(draws, now, first)
        items = self._of_table(plan, device, Known(draws)).batches(0, first)
        running.items = unwritten(items, table, self._written, self.original.num_workers)
        return running

    def _of_workers(
        self, running: Running, plan: Plan, device: Device, ahead: Ahead | None, epoch: int
    ) -> Generator[Any, None, None]:
        """With workers: the draws of the loop's thread are made as each batch is given."""
        placed = self._placed(running.items, plan, ahead, device, epoch)
        try:
            yield None
            for item in placed:
                running.given(item[0])
                running.epoch.note(item[2])
                yield item
                del item
            self._order.end(running.epoch)
        finally:
            placed.close()
            running.items.close()

    def _placed(
        self, items: Items, plan: Plan, ahead: Ahead | None, device: Device, epoch: int
    ) -> Items:
        """The same where they are wanted, transformed there."""
        given = placed(plan, items, ahead, self._options, device, epoch)
        try:
            yield from given[-1]
        finally:
            for running in reversed(given):
                running.close()

    def _source(self, plan: Plan, device: Device) -> Any:
        found = self._sources.get(device)
        if found is None:
            loader, order = self.original, self._order
            if self._options.iterable:
                found = OriginalStream(loader, self._options, order, _log.warning)
            elif plan.name == "processes":
                maker = self._planner.maker
                found = OriginalWorkers(loader, self._options, maker, order, self._report)
            else:
                found = Virtual(loader, self._maker, self._report)
            self._sources[device] = found
        return found

    def _of_table(self, plan: Plan, device: Device, order: Any) -> Any:
        assert self._planner.table is not None
        if plan.name == "gather" or device is None:
            return Gather(self._planner.table, order, pin=plan.pinned)
        self._now.order = order
        found = self._sources.get(device)
        if found is None:
            found = self._sources[device] = OnDevice(self._planner.table, self._now, device)
        return found


@contextmanager
def _unmoved() -> Iterator[None]:
    """Whatever is drawn inside leaves the global generators as they were."""
    before = randomness.save()
    try:
        yield
    finally:
        randomness.restore(before, randomness.touched(before))
