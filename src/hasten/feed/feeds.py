"""The plan, and what runs it, for each place that batches are wanted in; changed while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from hasten.feed import randomness, telling
from hasten.feed.adapt import Watch
from hasten.feed.blame import named
from hasten.feed.choose import Planner
from hasten.feed.executor import Executor, Items, Parts
from hasten.feed.harmless import DRAW, doubt
from hasten.feed.lateness import queued_s
from hasten.feed.moves import Moves
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan
from hasten.feed.recognise import recognise
from hasten.feed.relay import Relay
from hasten.feed.samples import Maker
from hasten.feed.sources import Item, Report
from hasten.feed.tables import Table

_log = logging.getLogger("hasten.feed")

_STEPS_SEEN = 20  # of a plan that has nothing to change


class Feeds:
    """Chooses the plan for a device when it is first asked for, and runs its epochs.

    Attributes:
        silent: see `telling.silence`.
    """

    def __init__(
        self, options: Options, order: Order | None, report: Report, clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._order = order
        self._report = report
        self._clock = clock
        self._maker = Maker(
            options.dataset,
            options.collate_fn,
            seed=options.seed,
            skip_errors=options.on_error == "skip",
            batched=options.batched,
            own_order=options.own_order,
        )
        self._table: Table | None = None
        self._planner: Planner | None = None
        self._feeds: dict[torch.device | None, _Feed] = {}
        self.silent = False

    def plan(self, device: torch.device | None) -> Plan:
        """The plan for a device; None for batches that stay on the host."""
        return self._feed(device).executor.plan

    def explain(self, device: torch.device | None) -> str:
        """The plan in a paragraph, and how it changed on the way."""
        feed = self._feed(device)
        lines = [feed.executor.plan.explain(self._options.timeout)]
        transform = self._options.device_transform
        if transform is not None and device is None:
            lines.append(
                f"  device_transform {named(transform)} is for batches on a device: it runs on "
                'those of loader.to(device), also of loader.to("cpu"), and not on these'
            )
        if self._draws_beside_the_loop:
            lines.append(
                "  samples draw from Python's or NumPy's generator, in a thread till that is seen: "
                "what the loop draws from it meanwhile may differ from that beside another plan"
            )
        for old, new in feed.changes:
            before, after = told_apart(old, new)
            lines.append(f"  changed from {before} to {after}")
        return "\n".join(lines)

    @property
    def _draws_beside_the_loop(self) -> bool:
        """Threads that somebody named draw from what is the loop's too, as far as known."""
        maker = self._maker
        if self._options.plan != "threads" or maker.fetch is not None:
            return False
        found = doubt(maker.dataset, maker.collate_fn)
        read = found.startswith(DRAW) and not found.startswith(f"{DRAW} (torch.")
        return read or bool(maker.uses & {randomness.PYTHON, randomness.NUMPY})

    def items(
        self, device: torch.device | None, ahead: Ahead | None, epoch: int, first: int
    ) -> Generator[Item, None, None]:
        """An epoch's batches, where they are wanted, from number `first` on."""
        if self._table is not None and not self._table.holds():
            _log.info("feed: the data set's tensors, or what it does to them, are others now")
            self.close()
            self._planner = self._table = None
        feed = self._feed(device)
        if not self.silent:
            telling.begun(feed.executor.plan, self._options.dataset)
        host = self._host(feed, epoch, first)
        given = feed.executor.place(host, ahead, epoch)
        try:
            yield from self._watched(feed, given[-1])
        finally:
            for running in reversed(given):
                running.close()

    def close(self) -> None:
        """Forget the plans; end what their sources keep from epoch to epoch."""
        for feed in self._feeds.values():
            feed.executor.close()
        self._feeds.clear()

    def _feed(self, device: torch.device | None) -> _Feed:
        found = self._feeds.get(device)
        if found is None:
            planner = self._planner = self._planner or self._new_planner()
            plan = planner.plan(device)
            relay = None if self._order is None else Relay(self._order)
            parts = Parts(
                options=self._options,
                maker=self._maker,
                relay=relay,
                table=self._table,
                report=self._report,
                clock=self._clock,
            )
            executor = Executor(parts, plan, device)
            watch = Watch(planner.moves, queued_s)
            found = _Feed(device, executor, parts, planner.moves, watch)
            self._feeds[device] = found
            telling.chosen(plan)
        return found

    def _new_planner(self) -> Planner:
        options = self._options
        if not options.iterable and options.batched:
            self._table = recognise(options.dataset, options.collate_fn)
        return Planner(options, self._maker, self._table, self._clock)

    def _host(self, feed: _Feed, epoch: int, first: int) -> Items:
        """The batches, made by one plan after another where it changes on the way."""
        relay = feed.parts.relay
        if relay is None:
            yield from feed.executor.host(epoch, first)
            return
        run = relay.begin(epoch, first)
        while True:
            executor, relay.current, stopped = feed.executor, run, False
            items = executor.host(epoch, run.next_number)
            try:
                for item in items:
                    yield item
                    del item
                    if feed.wanted is not None:
                        run.stop()  # what is under way is given yet
                        stopped = True
            finally:
                items.close()
            if executor.unfit and feed.wanted is None:
                feed.wanted = feed.moves.instead(executor.plan, executor.unfit)
            if feed.wanted is not None and feed.executor is executor:
                self._change(feed)
            if run.over or not (stopped or executor.unfit):
                return

    def _watched(self, feed: _Feed, items: Items) -> Items:
        """The same batches; how long they were waited for decides what is changed."""
        clock, watch, relay = self._clock, feed.watch, feed.parts.relay
        changing = feed.executor.plan.name not in ("gather", "resident")
        watch.begin()
        asked = clock()
        for item in items if changing else islice(items, _STEPS_SEEN):
            got, number = clock(), item[0]
            yield item
            del item
            now = clock()
            watch.saw(got - asked, now - got)
            asked = now
            if changing and watch.full:
                self._decide(feed, _left(relay, number))
        if changing:
            if watch.full:
                self._decide(feed, None)
            if feed.wanted is not None:
                self._change(feed)
            return
        step_s = watch.step_s
        if step_s is not None and feed.executor.plan.step_s is None:
            feed.executor.plan = replace(feed.executor.plan, step_s=step_s)
            telling.chosen(feed.executor.plan)
        yield from items

    def _decide(self, feed: _Feed, left: int | None) -> None:
        old = feed.executor.plan
        new = feed.watch.decide(old, left)
        if new != replace(old, step_s=new.step_s):
            feed.wanted = new
            return
        feed.executor.plan = new
        if old.step_s is None:
            telling.chosen(new)

    def _change(self, feed: _Feed) -> None:
        old, new = feed.executor.plan, feed.wanted
        feed.wanted = None
        if new is None or self._feeds.get(feed.device) is not feed:
            return
        was, now = told_apart(old, new)
        _log.info("feed: %s (before: %s)", now, was)
        feed.changes.append((old, new))
        before, feed.executor = feed.executor, Executor(feed.parts, new, feed.device)
        feed.executor.follow(before)


@dataclass(slots=True)
class _Feed:
    """What runs for one device; `wanted` is the plan to change to at the next batch."""

    device: torch.device | None
    executor: Executor
    parts: Parts
    moves: Moves
    watch: Watch
    changes: list[tuple[Plan, Plan]] = field(default_factory=list)
    wanted: Plan | None = None


def told_apart(old: Plan, new: Plan) -> tuple[str, str]:
    """Both in a line each, with what only `explain` says where they are else the same."""
    if (old.name, old.workers) != (new.name, new.workers):
        return str(old), str(new)
    plans = old, new
    notes = ["", ""]
    if old.prefetch_batches != new.prefetch_batches:
        notes = [f", {plan.prefetch_batches} batches ahead" for plan in plans]
    if old.niceness != new.niceness:
        notes = [f"{note}, at niceness +{p.niceness}" for note, p in zip(notes, plans, strict=True)]
    before, after = (f"{plan}{note}" for plan, note in zip(plans, notes, strict=True))
    return before, after


def _left(relay: Relay | None, number: int) -> int:
    """Batches of the epoch after this one; many where nobody knows."""
    try:
        return 0 if relay is None else len(relay) - number - 1
    except TypeError:  # a sampler without a length
        return 1 << 30
