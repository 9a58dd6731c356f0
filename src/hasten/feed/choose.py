"""Which plan suits a data set and a device: recognition first, then a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed.forking import no_workers_here
from hasten.feed.harmless import harmless
from hasten.feed.measure import workers_for
from hasten.feed.moves import Moves
from hasten.feed.openfiles import SHARED
from hasten.feed.options import Options
from hasten.feed.placing import to_place
from hasten.feed.plan import Plan, duration
from hasten.feed.recognise import unread
from hasten.feed.samples import Maker
from hasten.feed.sizing import (
    CHEAP_BATCH_S,
    LOCK_FREE,
    MOST_WORKERS,
    TOO_CHEAP,
    TOO_LITTLE,
    Sizing,
)
from hasten.feed.tables import Table
from hasten.observe.remedies import Remedy

Clock = Callable[[], float]

_START_WORKERS_S = 0.3  # what an epoch's samples must cost for worker processes to pay
_RESIDENT_SHARE = 0.25  # of the device's free memory
_FREE = 0.75  # share of the time that the interpreter's lock must be free, for threads to pay
_FREE_ENOUGH = 0.25  # where processes cannot pay: threads may make a third more in the same time
_WAITS = "mostly waiting"
_UNSTEADY = (
    "and an index gives another one each time (of a generator, a counter or a clock of its own): "
    "made by others, batches would hold others"
)


class Planner:
    """Chooses a plan for one data set.

    Attributes:
        moves: the next plans to try while one runs.
    """

    def __init__(
        self, options: Options, maker: Maker, table: Table | None, clock: Clock = time.perf_counter
    ) -> None:
        self._options = options
        self._maker = maker
        self._table = table
        self._clock = clock
        self._sizing = Sizing(options, maker, clock)
        self.moves = Moves(self._sizing)

    def plan(self, device: torch.device | None) -> Plan:
        """The plan for batches on this device (None: they stay on the host).

        Raises:
            UsageError: a plan was asked for that the data set does not allow.
        """
        plan = self._choose(device)
        if self._table is None and self._options.chosen and unread(self._options):
            plan = replace(plan, remedy="source")
        return to_place(plan, self._options, device)

    def _choose(self, device: torch.device | None) -> Plan:
        options, maker = self._options, self._maker
        workers, name = options.num_workers, options.plan
        if name in ("resident", "gather"):
            return self._of_table(device, asked=True)
        if name == "threads":
            several = workers not in ("auto", 1)
            if options.iterable:
                raise UsageError(
                    f'plan="threads" is not for the stream {type(options.dataset).__name__}, whose '
                    "samples come one after the other: leave plan out, or give num_workers=1"
                )
            if maker.fetch is None and several and not self._several:
                raise UsageError(
                    f'plan="threads" with several threads needs a data set with fetch(index, '
                    f"key), whose samples draw their randomness from the key alone; "
                    f"{type(options.dataset).__name__} has none: leave num_workers out, or "
                    "give 1"
                )
            single = 1 if maker.fetch is None else runtime.cores()
            count = single if workers == "auto" else workers
            return replace(self._sizing.threads(count, "asked for"), remedy="auto")
        if name == "processes":
            count = max(1, runtime.cores() - 1) if workers == "auto" else workers
            return replace(self._sizing.processes(count, "asked for"), remedy="auto")
        if name == "inline":
            return Plan(name="inline", reason="asked for", remedy="auto")
        if workers != "auto" and workers > 0:
            have = runtime.cores()
            note = f", more than the {have} core{'s' * (have > 1)}" if workers > have else ""
            asked = self._sizing.processes(workers, f"num_workers={workers} asked for{note}")
            return replace(asked, remedy=self._instead(workers))
        if self._table is not None:
            return self._of_table(device, asked=False)
        if workers == 0:
            remedy = self._instead(workers)
            return Plan(name="inline", reason="num_workers=0 asked for", remedy=remedy)
        if options.iterable:
            why = "a stream, which only its author can share out"
            return Plan(name="inline", reason=why, remedy="stream")
        return self._by_cost()

    def _instead(self, workers: int) -> Remedy:
        """What would be quicker than the workers that somebody asked for."""
        if self._table is not None:
            return "whole"
        if not self._options.iterable:
            return "auto"
        return "stream" if workers < runtime.cores() else "cheaper"

    @cached_property
    def _several(self) -> bool:
        """Several threads may ask the data set for samples at once, for all that its code says."""
        return self._maker.fetch is not None or harmless(self._options.dataset)

    def _of_table(self, device: torch.device | None, *, asked: bool) -> Plan:
        options, table = self._options, self._table
        if table is None:
            raise UsageError(
                f"plan={options.plan!r} needs a data set of whole tensors (TensorDataset, one "
                "whose __getitem__ only indexes tensors or arrays, or Subset or ConcatDataset of "
                f"them, with the default collate_fn); {type(options.dataset).__name__} is not "
                "recognised as one"
                + (", as the source of its class cannot be read" if unread(options) else "")
            )
        count = f"{table.rows:,} samples in memory"
        if device is None or runtime.is_host(device) or options.plan == "gather":
            each = _gathering(table, self._sizing.size, self._clock)
            why = f"{count}, {duration(each)} a sample"
            if options.plan == "resident":
                why += "; resident is for batches on another device than the host"
            return Plan(name="gather", reason=why, remedy="rows")
        size = table.rows * table.row_bytes
        memory = runtime.memory(device)
        fits = memory is not None and size < _RESIDENT_SHARE * memory.free_bytes
        if not table.exact and asked:
            raise UsageError(
                f"plan={options.plan!r} on {device} would compute there what "
                f"{type(options.dataset).__name__} computes of its tensors on the host, and might "
                "round differently: give it as device_transform instead"
            )
        if not table.exact:
            why = f"{count}, which the host computes batches of"
            return Plan(name="gather", reason=why, remedy="device_transform")
        if asked or fits:
            room = f" of {memory.free_bytes >> 20:,} free" if memory else ""
            return Plan(
                name="resident",
                reason=f"{table.rows:,} samples take {size >> 20:,} MiB{room} on {device}",
                remedy="rows",
            )
        free = f"{memory.free_bytes >> 20:,} MiB free" if memory else "memory of unknown size"
        why = f"{count}, {size >> 20:,} MiB: too many for {free} on {device}"
        return Plan(name="gather", reason=why, remedy="rows")

    def _by_cost(self) -> Plan:
        options, maker, sizing = self._options, self._maker, self._sizing
        if options.worker_init_fn is not None:
            why = "worker_init_fn is given, which is for processes"
            count = max(1, runtime.cores() - 1)
            alone = no_workers_here()
            if alone:
                return Plan(name="inline", reason=f"{why}, but {alone}", remedy="room")
            return sizing.processes(count, why)
        if sizing.held and (maker.fetch is not None or not self._several):
            why = SHARED.format(sizing.held)
            if maker.fetch is not None:
                return sizing.by_threads(runtime.cores(), why)
            return Plan(name="inline", reason=why, remedy="unshared")
        cost, count = sizing.cost, sizing.count
        if cost is None:
            return Plan(name="inline", reason="no sample could be measured")
        each = f"{duration(cost.seconds)} a sample"
        if cost.cut:
            each = f"over {each}"
        if sizing.batch_s(cost) < CHEAP_BATCH_S:
            return Plan(name="inline", reason=f"{each}{TOO_CHEAP}", remedy="cheap")
        if not cost.steady:
            return Plan(name="inline", reason=f"{each}, {_UNSTEADY}", remedy="steady")
        # Only in processes is that done beside each other: threads leave it to the loop's.
        collating_s = 0.0 if maker.default_collate else cost.collate_seconds
        collates = collating_s > cost.seconds * sizing.size
        if collates:
            each += f", {duration(collating_s)} to collate a batch"
        have, waits = runtime.cores(), cost.waits and not collates
        free = 1.0 if cost.free is None else cost.free  # fetch is meant for threads
        # Where others want the cores, the lock seems less free than it is.
        enough = _FREE_ENOUGH if cost.crowded else _FREE
        if (maker.fetch is not None and not collates) and (
            waits or cost.cut or cost.shares or free > enough or have == 1
        ):
            if not waits:
                return sizing.by_threads(have, each)
            wanted = min(MOST_WORKERS, workers_for(have, cost.busy))
            return sizing.by_threads(wanted, f"{each}, {_WAITS}")
        if maker.fetch is None and not cost.draws and self._several and not collates:
            if waits:
                wanted = min(MOST_WORKERS, workers_for(have, cost.busy))
                return sizing.by_threads(wanted, f"{each}, {_WAITS}")
            if cost.free is not None and free > enough and have > 1:
                return sizing.by_threads(have, f"{each}{LOCK_FREE}")
        epoch_s = sizing.batch_s(cost) * count / sizing.size
        lasting = cost.cut or epoch_s >= _START_WORKERS_S
        # What samples open in a thread here, no worker that is forked later may have.
        if maker.fetch is None and waits and not cost.draws and not (cost.opens and lasting):
            return sizing.by_threads(1, f"{each}, {_WAITS}")
        if have == 1 and not waits:
            return Plan(name="inline", reason=f"{each}, and one core")
        if not lasting:
            short = f"{each}, {duration(epoch_s)} an epoch{TOO_LITTLE}"
            here = bool(cost.draws) or cost.free is None or not self._several
            if collates or (maker.fetch is None and here):
                return Plan(name="inline", reason=short, remedy="lasting")
            # Threads need no starting.
            if free > _FREE_ENOUGH and have > 1:
                return sizing.by_threads(have, short)
            locked = f"{short}, and they hold the interpreter's lock"
            return Plan(name="inline", reason=locked, remedy="lasting")
        return sizing.by_processes(cost, f"{each}, {_WAITS}" if waits else each)


def _gathering(table: Table, size: int, clock: Clock) -> float:
    """Seconds a sample, of the quickest of three batches."""
    rows = np.linspace(0, table.rows - 1, min(size, table.rows)).astype(np.int64)
    took = []
    for _ in range(3):
        begin = clock()
        table.batch(rows)
        took.append(clock() - begin)
    return min(took) / len(rows)
