"""The plan, and the source that runs it, for each place that batches are wanted in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import torch

from hasten.feed import tables
from hasten.feed.adapt import Watch
from hasten.feed.choose import choose, larger
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan
from hasten.feed.samples import Maker, pinned
from hasten.feed.sources import Gather, Inline, Item, OnDevice, Report, Source, Stream
from hasten.feed.threads import Threads
from hasten.feed.workers import Processes

_log = logging.getLogger("hasten.feed")


class Feeds:
    """Chooses the plan for a device when it is first asked for, and runs its epochs."""

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
        )
        self._table: tables.Table | None = None
        self._recognised = options.iterable or not options.batched
        self._feeds: dict[torch.device | None, _Feed] = {}
        self._changes: list[tuple[Plan, Plan]] = []

    def plan(self, device: torch.device | None) -> Plan:
        """The plan for a device; None for batches that stay on the host."""
        return self._feed(device).plan

    def explain(self, device: torch.device | None) -> str:
        """The plan in a paragraph, and how it changed on the way."""
        changes = [f"  changed from {old} to {new}" for old, new in self._changes]
        return "\n".join([self.plan(device).explain(), *changes])

    def items(
        self, device: torch.device | None, ahead: Ahead | None, epoch: int, first: int
    ) -> Generator[Item, None, None]:
        """An epoch's batches, where they are wanted, from number `first` on."""
        feed = self._feed(device)
        source = feed.source.batches(epoch, first)
        watched = feed.plan.name in ("inline", "threads", "processes")
        host = feed.watch.timed(source) if watched else source
        placed = _placed(host, feed.plan, ahead)
        try:
            yield from placed
            if watched:
                self._adapt(feed, device)
        finally:
            for running in (placed, host, source):
                running.close()

    def close(self) -> None:
        """Forget the plans; end what their sources keep from epoch to epoch."""
        for feed in self._feeds.values():
            feed.source.close()
        self._feeds.clear()

    def _feed(self, device: torch.device | None) -> _Feed:
        found = self._feeds.get(device)
        if found is None:
            if not self._recognised:
                self._table = tables.recognise(self._options.dataset, self._options.collate_fn)
                self._recognised = True
            plan = choose(self._options, self._table, self._maker, device, clock=self._clock)
            watch = Watch(partial(larger, self._options), self._clock)
            found = self._feeds[device] = _Feed(plan, self._source(plan, device), watch)
            _log.info("feed: %s", plan)
        return found

    def _source(self, plan: Plan, device: torch.device | None) -> Source:
        options, order, table = self._options, self._order, self._table
        if plan.name == "processes":
            return Processes(options, plan, self._maker, order, self._report)
        if order is None:
            return Stream(
                options.dataset,
                options.collate_fn,
                options.batch_size,
                drop_last=options.drop_last,
                seed=options.seed,
            )
        if plan.name == "resident" and table is not None and device is not None:
            return OnDevice(table, order, device)
        if plan.name == "gather" and table is not None:
            return Gather(table, order, pin=plan.pinned, clock=self._clock)
        if plan.name == "threads":
            return Threads(self._maker, plan, order, self._report)
        return Inline(self._maker, order, self._report)

    def _adapt(self, feed: _Feed, device: torch.device | None) -> None:
        plan = feed.watch.next_plan(feed.plan)
        if plan == feed.plan or self._feeds.get(device) is not feed:
            return
        _log.info("feed: %s (before: %s)", plan, feed.plan)
        self._changes.append((feed.plan, plan))
        feed.source.close()
        feed.plan, feed.source = plan, self._source(plan, device)


@dataclass(slots=True)
class _Feed:
    plan: Plan
    source: Source
    watch: Watch


def _placed(
    host: Generator[Item, None, None], plan: Plan, ahead: Ahead | None
) -> Generator[Item, None, None]:
    if plan.name == "resident" or (ahead is None and not plan.pinned):
        return host
    if ahead is not None:
        return ahead.place(host, plan)
    return ((number, pinned(batch), indices) for number, batch, indices in host)
