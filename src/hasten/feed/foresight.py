"""Batches of a DataLoader without workers, made ahead: given only where it would make the same now.

Its samples are made in the loop's thread, between the loop's own draws. So they can be made ahead
only where they draw nothing and depend on nothing that the loop changes: that is tried before,
watched in the workers for each batch, and compared with what is made here now and then.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch

from hasten.devices import move, runtime
from hasten.errors import UsageError
from hasten.feed import randomness
from hasten.feed.asgiven import AsGiven, AsGivenWork, Trial, Tried
from hasten.feed.compare import identical
from hasten.feed.draws import LateOrder
from hasten.feed.forking import fork_is_there, no_workers_here, refuse_workers_here
from hasten.feed.inside import Mark, alive
from hasten.feed.jobs import Bound, Jobs
from hasten.feed.measure import workers_for
from hasten.feed.openfiles import SHARED, unshareable
from hasten.feed.options import Options
from hasten.feed.plan import Plan, duration
from hasten.feed.pool import DiedError, LateError, Pool
from hasten.feed.sources import Gather, Item, as_rows
from hasten.feed.tables import Table
from hasten.feed.taken import TakenOrder
from hasten.feed.worth import Worth
from hasten.observe.remedies import Remedy

_TRIAL_BATCHES = 3
_PATIENCE_S = 0.9  # a trial that has not ended by then is ended
# To compare what the data set holds, in the loop's thread: of what a batch takes, or seconds.
_WATCHED, _WATCHED_S = 0.05, 0.0005
_WATCHINGS = 3  # of which the quickest counts: others may have had the core
_CHEAP_BATCH_S = 0.001  # passing a batch between processes costs a good part of that
# What an epoch's samples must cost for worker processes to pay. To start them and to compare the
# first batches takes some 0.2 s of each: on two cores, 0.8 s of samples gained beside one step of
# three, and lost beside the others.
_START_WORKERS_S = 1.0
_MOST_WORKERS = 8
_FEWEST = 6  # batches an epoch: two of them are made in the loop's thread too, to be compared
_A_WORKER_S = 1.0  # what an epoch's samples must cost for each: they are started in every epoch
_STARTED_S = 0.06  # what that takes of it for each; where samples wait, others go on meanwhile
UNFORESEEN = "its sampler is not asked before its time, as that might leave something behind"
"""What to say where its code is not seen to draw only from what is put back."""

_CACHES = (
    "its samples are kept for when they are asked for again (a cache), which processes that begin "
    "anew in each epoch would not have"
)
_ALIVE = "the data set holds a generator or iterator under way, which cannot be watched"
_COMPARED = frozenset({0, 1, 10, 100, 1_000, 10_000, 100_000})


class Sought(Protocol):
    """Makes an epoch's batches ahead.

    Attributes:
        trouble: why it stopped before the end; '' where it came to it.
    """

    trouble: str

    def batches(self, foreseen: Iterable[Any], first: int) -> Generator[Item, None, None]:
        """The batches of the indices foreseen, numbered from `first` on."""

    def checked(
        self, number: int, batch: Any, wanted: Any, device: torch.device | None
    ) -> tuple[Any, str]:
        """What to give when batch `number` is wanted, of the indices `wanted`.

        Returns:
            The batch, or None where it has to be made now; and why nothing more that was made
            ahead can be given, or ''.
        """

    def close(self) -> None:
        """End its processes."""


class MadeAhead:
    """Made by worker processes."""

    def __init__(self, maker: AsGiven, options: Options, plan: Plan, worth: Worth) -> None:
        self._maker = maker
        self._worth = worth
        self._each = max(1, plan.prefetch_batches // plan.workers)
        self._bound = Bound(plan.prefetch_bytes, plan.batch_bytes)
        self._mark = Mark(maker.dataset, maker.collate_fn)
        self._foreseen: dict[int, Any] = {}
        self._first = 0
        self._pool = _pool(maker, plan.workers, self._each)
        self.trouble = ""

    def batches(self, foreseen: Iterable[Any], first: int) -> Generator[Item, None, None]:
        """See `Sought`."""
        self._first = first
        jobs = Jobs(self._pool, self._each, 0, bound=self._bound)
        numbered = enumerate(foreseen, first)
        jobs.fill(numbered, lambda number, indices: (number, indices, None))
        while len(jobs):
            indices, watched = jobs.next()
            jobs.fill(numbered, lambda number, indices: (number, indices, None))
            made = watched.made
            self.trouble = _unfit(watched.moved, watched.changed)
            if made.failure is not None:
                self.trouble = self.trouble or made.failure.of_sending
            if self.trouble or made.failure is not None or made.skipped:
                return  # made in the loop's thread, it says itself what is wrong
            self._foreseen[made.number] = indices
            yield made.number, made.batch, indices
            del made, watched

    def checked(
        self, number: int, batch: Any, wanted: Any, device: torch.device | None
    ) -> tuple[Any, str]:
        """See `Sought`."""
        if not identical(self._foreseen.pop(number), wanted):
            return None, "its sampler draws between the loop's own draws"
        if self._mark.changed():
            return None, "the loop changes the data set between batches"
        if number not in _COMPARED and number > self._first + 1:
            return batch, ""
        before, begun = randomness.save(), time.perf_counter()
        here = self._maker.make(0, number, wanted).batch
        self._worth.made(time.perf_counter() - begun)
        moved = randomness.touched(before)
        if device is not None:
            here = move(here, device, non_blocking=False)
        if moved:
            return here, _unfit(moved, "")
        if not identical(here, batch):
            return here, "its samples are others when another process makes them"
        return here, ""

    def close(self) -> None:
        """See `Sought`."""
        self._pool.close()


class NoneAhead:
    """Where processes cannot be started: all is made when it is wanted."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    def batches(self, foreseen: Iterable[Any], first: int) -> Generator[Item, None, None]:
        """See `Sought`."""
        yield from ()

    def checked(
        self, number: int, batch: Any, wanted: Any, device: torch.device | None
    ) -> tuple[Any, str]:
        """See `Sought`."""
        return None, self.trouble

    def close(self) -> None:
        """See `Sought`."""


class TableAhead:
    """Gathered from a table, so that copies to the device run ahead of the loop."""

    def __init__(self, table: Table, plan: Plan) -> None:
        self._table = table
        self._pin = plan.pinned
        self._mark = table.versions()
        self._foreseen: dict[int, Any] = {}
        self.trouble = ""

    def batches(self, foreseen: Iterable[Any], first: int) -> Generator[Item, None, None]:
        """See `Sought`."""
        return Gather(self._table, _Noted(foreseen, self._foreseen), pin=self._pin).batches(
            0, first
        )

    def checked(
        self, number: int, batch: Any, wanted: Any, device: torch.device | None
    ) -> tuple[Any, str]:
        """See `Sought`."""
        if not identical(self._foreseen.pop(number), wanted):
            return None, "its sampler draws between the loop's own draws"
        if not self._table.holds_for(as_rows(wanted, self._table.rows)):
            return None, "the loop changes the data set between batches"
        if self._table.versions() != self._mark:
            return None, "the loop writes to the data set between batches"
        return batch, ""

    def close(self) -> None:
        """See `Sought`."""


class _Noted(LateOrder):
    """An order that is foreseen, with a note of what was."""

    def __init__(self, foreseen: Iterable[Any], notes: dict[int, Any]) -> None:
        self._foreseen = foreseen
        self._notes = notes

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        for number, indices in enumerate(self._foreseen, first):
            self._notes[number] = indices
            yield indices


def made_ahead(maker: AsGiven, options: Options, plan: Plan, worth: Worth) -> Sought:
    """Its processes, or none where a plan that nobody asked for finds no room for them.

    Raises:
        UsageError: there is none, and they were asked for.
    """
    if alive(maker.dataset, maker.collate_fn):  # asked for by name, without a trial
        return NoneAhead(_ALIVE)
    try:
        return MadeAhead(maker, options, plan, worth)
    except UsageError as error:
        if options.plan != "auto":
            raise
        return NoneAhead(str(error))


def tried(maker: AsGiven, options: Options, order: TakenOrder) -> Plan:
    """The plan for a DataLoader without workers, after a trial of its samples in a process.

    In another process, as a data set that draws or changes must not be asked here for samples
    that iterating it would not ask for.
    """
    alone = no_workers_here()
    if alone:
        return _inline(alone, "room")
    if not fork_is_there():
        return _inline("samples are made here, as processes begin by running the script again")
    mark = Mark(maker.dataset, maker.collate_fn)
    if not mark.told:
        return _inline("what the data set holds cannot be watched for changes, or is too much")
    watched_s = min(_took_s(mark.changed) for _ in range(_WATCHINGS))
    del mark
    connected = unshareable(maker.dataset, maker.collate_fn)
    if connected:
        return _inline(SHARED.format(connected), "unshared")
    foreseen = order.foreseen()
    if foreseen is None:
        return _inline(UNFORESEEN)
    batches = list(islice(foreseen, _TRIAL_BATCHES))
    try:
        pool = _pool(maker, 1, 1)
    except UsageError as error:
        return _inline(str(error), "room")
    try:
        pool.send(0, Trial(batches))
        found: Tried = pool.receive(0, _PATIENCE_S)
    except LateError:
        for pid in pool.pids:  # it would be waited for, to end by itself
            os.kill(pid, signal.SIGKILL)
        found = Tried(_PATIENCE_S, 1.0, 0, frozenset(), changed="", unseen=False, cut=True)
    except DiedError as died:
        return _inline(f"a trial of its samples ended: {died}")
    finally:
        pool.close()
    size = len(batches[0]) if batches and maker.batched else 1
    return _judged(found, options, size, watched_s)


def ahead_of(batch_s: float, epoch_s: float) -> Remedy | None:
    """What is quicker than processes that make ahead batches that take so long, each and those of
    an epoch together; None where such processes may pay."""
    if batch_s < _CHEAP_BATCH_S:
        return "cheap"
    return "lasting" if epoch_s < _START_WORKERS_S else None


def _judged(found: Tried, options: Options, size: int, watched_s: float = 0.0) -> Plan:
    if found.batch_s is None:
        return _inline("no sample could be tried")
    trouble = _unfit(found.moved, found.changed)
    if trouble:
        return _inline(trouble)
    if found.unseen:
        return _inline(_ALIVE)
    if found.caches:
        return _inline(_CACHES)
    each = f"{duration(found.batch_s / size)} a sample"
    if found.cut:
        each = f"over {duration(found.batch_s)} for a sample and to collate it"
    if ahead_of(found.batch_s, math.inf) == "cheap":
        return _inline(f"{each}, too cheap to hand over", "cheap")
    if watched_s > max(_WATCHED_S, _WATCHED * found.batch_s):
        long = f"and it takes {duration(watched_s)} to see before each batch that it holds the same"
        return _inline(f"{each}, {long}")
    cores = runtime.cores()
    if cores == 1 and found.busy > 0.5:
        return _inline(f"{each}, and one core", "cheaper")
    count = len(options.dataset) if hasattr(options.dataset, "__len__") else 0
    if 0 < count < _FEWEST * size:
        few = f"{-(-count // size)} batches an epoch, of which the first are made here in any case"
        return _inline(f"{each}, {few}")
    epoch_s = found.batch_s / size * count if count else math.inf
    if not found.cut and ahead_of(found.batch_s, epoch_s) == "lasting":
        short = f"{duration(epoch_s)} an epoch: too little to start processes for in each"
        return _inline(f"{each}, {short}", "lasting")
    # One core is left to the training step; samples that mostly wait need more than one a core.
    busy = found.busy > 0.5
    wanted = max(1, cores - 1) if busy else workers_for(cores, found.busy)
    most = epoch_s / _A_WORKER_S if busy else math.sqrt(epoch_s / _STARTED_S)
    wanted = int(min(wanted, _MOST_WORKERS, max(1, most)))
    seen = "" if found.cut else ", drawing nothing"
    reason = f"{each}{seen}" + ("" if busy else ", mostly waiting")
    return Plan(
        name="processes",
        reason=reason,
        workers=wanted,
        prefetch_batches=2 * wanted,
        batch_bytes=found.batch_bytes,
    )


def _unfit(moved: frozenset[str], changed: str) -> str:
    if not moved:
        return changed
    names = " and ".join(sorted(moved))
    return f"its samples draw from the generator of {names}, between the loop's own draws"


def _took_s(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _inline(reason: str, remedy: Remedy = "own loader") -> Plan:
    return Plan(name="inline", reason=reason, remedy=remedy)


def _pool(maker: AsGiven, workers: int, each: int) -> Pool:
    refuse_workers_here(workers)
    return Pool(workers, AsGivenWork(maker, None), context="fork", jobs_each=each)
