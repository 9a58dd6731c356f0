"""Runs a plan: each of its stages turns a stream of batches into the next, over one epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.devices import runtime
from hasten.devices.holding import held
from hasten.devices.pinning import pin
from hasten.errors import DataError, UsageError
from hasten.feed.background import Background
from hasten.feed.blame import nothing_of_device_transform, of_device_transform
from hasten.feed.handlers import by_a_handler
from hasten.feed.keys import Indices, SampleRandom
from hasten.feed.options import Options
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan
from hasten.feed.relay import Relay
from hasten.feed.samples import Maker
from hasten.feed.sources import Gather, Inline, Item, OnDevice, Report, Source, Stream
from hasten.feed.tables import Table
from hasten.feed.threads import Threads
from hasten.feed.workers import Processes

Clock = Callable[[], float]
Items = Generator[Item, None, None]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What stages are made of.

    Attributes:
        relay: the order of batches; None for a stream.
        table: the whole tensors behind the data set, where there are some.
    """

    options: Options
    maker: Maker
    relay: Relay | None
    table: Table | None
    report: Report
    clock: Clock = time.perf_counter


class Executor:
    """Runs one plan's stages, for one place that batches are wanted in."""

    def __init__(self, parts: Parts, plan: Plan, device: torch.device | None) -> None:
        self.plan = plan
        self._parts = parts
        self._device = device
        self._source = self._source_of(plan)
        self._unfit = ""

    def host(self, epoch: int, first: int) -> Items:
        """Batches as they are made, on the host or by the device: the first stages."""
        items, given = self._source.batches(epoch, first), False
        try:
            for item in items:
                given = True
                yield item
                del item
        except UsageError as error:  # of a data set that cannot be sent to processes
            relay = self._parts.relay
            drawing = relay is not None and relay.current.failed
            if given or drawing or not self._parts.options.chosen:
                raise
            self._unfit = str(error)
        finally:
            items.close()

    @property
    def unfit(self) -> str:
        """Why the plan turned out not to suit the data set; "" where it does."""
        return self._unfit or str(getattr(self._source, "unfit", ""))

    def place(self, items: Items, ahead: Ahead | None, epoch: int) -> list[Items]:
        """The stages after those: what each gives, the last of them to be iterated."""
        return placed(self.plan, items, ahead, self._parts.options, self._device, epoch)

    def follow(self, before: Executor) -> None:
        """Go on with what the plan before has at work, where this one can, and close that."""
        if isinstance(self._source, Processes) and isinstance(before._source, Processes):
            self._source.adopt(before._source)
        before.close()

    def close(self) -> None:
        """End what lasts from epoch to epoch."""
        self._source.close()

    def _source_of(self, plan: Plan) -> Source:
        options, parts = self._parts.options, self._parts
        maker, relay, table, report = parts.maker, parts.relay, parts.table, parts.report
        first = plan.stages[0]
        if first.by == "process":
            return Processes(options, plan, maker, relay, report)
        if relay is None:
            return Stream(
                options.dataset,
                options.collate_fn,
                options.batch_size,
                drop_last=options.drop_last,
                seed=options.seed,
            )
        if first.name == "index":
            assert table is not None
            if first.by == "device" and self._device is not None:
                return OnDevice(table, relay, self._device)
            read = maker if table.layout is not None else None
            return Gather(table, relay, pin=plan.pinned, clock=parts.clock, maker=read)
        if first.by == "thread":
            if maker.fetch is not None or plan.workers > 1:
                return Threads(maker, plan, relay, report, options.timeout)
            return Background(maker, plan, relay, report, options.timeout)
        return Inline(maker, relay, report)


def placed(
    plan: Plan,
    items: Items,
    ahead: Ahead | None,
    options: Options,
    device: torch.device | None,
    epoch: int,
) -> list[Items]:
    """A plan's stages after batches are made: what each gives, the last of them to be iterated."""
    given = [items]
    for stage in plan.stages:
        if stage.name == "pin" and not plan.pins_beside:
            given.append(_pinned(given[-1]) if ahead is None else ahead.pin(given[-1]))
        elif stage.name == "copy":
            assert ahead is not None
            given.append(ahead.place(given[-1], plan))
        elif stage.name == "transform":
            assert device is not None
            given.append(_transformed(given[-1], options, device, epoch))
    return given


def _transformed(items: Items, options: Options, device: torch.device, epoch: int) -> Items:
    transform = options.device_transform
    assert transform is not None
    for number, batch, indices in items:
        rows = _numbers(number, batch, indices, options.batch_size or 1)
        given = SampleRandom(options.seed, epoch, rows, device)
        try:
            batch = transform(batch, given)
        except Exception as error:
            if by_a_handler(error) or runtime.is_out_of_memory(error):
                raise
            raise DataError(of_device_transform(transform, indices, number, error)) from error
        if batch is None:
            raise DataError(nothing_of_device_transform(transform, indices, number))
        yield number, batch, indices
        del batch


def _pinned(items: Items) -> Items:
    for number, batch, indices in items:
        yield number, pin(batch), indices
        del batch


def _numbers(number: int, batch: Any, indices: Any, size: int) -> Indices:
    """The samples' numbers: their indices, or their places in a stream."""
    if indices is None:
        first = next(iter(held(batch).tensors), None)
        count = len(first) if first is not None and first.ndim else 1
        return np.arange(count) + number * size
    return np.atleast_1d(np.asarray(indices, dtype=np.int64))
