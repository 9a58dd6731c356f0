"""How many workers a data set's batches want, and the host has room for: as plans."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from hasten.devices import runtime
from hasten.feed.apart import measure_apart
from hasten.feed.forking import no_workers_here
from hasten.feed.measure import Measured, workers_for
from hasten.feed.openfiles import READ_ON, unshareable
from hasten.feed.options import Options
from hasten.feed.plan import Plan
from hasten.feed.samples import Maker
from hasten.feed.segments import NAMELESS
from hasten.observe.remedies import Remedy

Clock = Callable[[], float]

# Passing a batch between processes costs about 2 ms on the way: text of 1 ms a batch took twice as
# long with two workers as without (benchmarks/results).
CHEAP_BATCH_S = 0.003
"""A batch that takes less to make is handed over where cores are left to the workers alone."""
MOST_WORKERS = 16
TOO_CHEAP = ", too cheap to hand over"
TOO_LITTLE = ": too little to start processes for"
LOCK_FREE = ", which leave the interpreter's lock free"
AGAINST_PROCESSES = (TOO_CHEAP, TOO_LITTLE, LOCK_FREE)
"""What is no reason any more once processes are tried."""
_NO_MEMORY = "memory has room for no batches ahead"
_MEMORY_SHARE = 0.25  # of the host's free memory, for batches ahead of the loop
_SHORT_OF_MEMORY = 0.05  # share of the host's memory that is free, below which less is taken
_FIRST_WAITING = 4  # processes to begin with where samples wait: each takes some 50 ms to start
_HEAD_S = 0.1  # what they take to bring their first batch
_MOST_HEAD = 3
_NICENESS = 10  # a tenth of a core against a step that wants it, and all that it leaves


class Sizing:
    """What batches of one data set cost, tried when it is first asked for, and plans to fit.

    Attributes:
        options: of the Loader.
        maker: of its samples.
    """

    def __init__(self, options: Options, maker: Maker, clock: Clock = time.perf_counter) -> None:
        self.options = options
        self.maker = maker
        self._clock = clock
        self._cost: Measured | None = None

    @property
    def seen(self) -> Measured | None:
        """What samples cost; None where nothing needed to be, or could be, measured."""
        return self._cost

    @cached_property
    def cost(self) -> Measured | None:
        """The same, measured if it was not yet; None where no sample comes."""
        cheap_s = 0.75 * CHEAP_BATCH_S / self.size  # the rest is for collating
        self._cost = measure_apart(
            self.maker, self.count, self.size, clock=self._clock, cheap_s=cheap_s
        )
        return self._cost

    @cached_property
    def held(self) -> str:
        """What the data set holds that no fork may use: neither a trial nor workers; "" if none."""
        return unshareable(self.options.dataset, self.options.collate_fn)

    @property
    def count(self) -> int:
        """Samples of the data set; 0 where it does not say."""
        dataset = self.options.dataset
        return len(dataset) if hasattr(dataset, "__len__") else 0

    @cached_property
    def size(self) -> int:
        """Samples a batch; a batch_sampler is not drawn from: as many as come to one of its own."""
        given = self.options.batch_sampler
        size = getattr(given, "batch_size", None) if given is not None else self.options.batch_size
        if given is not None and not isinstance(size, int) and hasattr(given, "__len__"):
            size = round(self.count / max(1, len(given)))
        return max(1, size or 1)

    def batch_s(self, cost: Measured) -> float:
        """Seconds to make a batch, by one."""
        return cost.seconds * self.size + cost.collate_seconds

    # Plans -----------------------------------------------------------------------------------

    def threads(self, count: int, reason: str) -> Plan:
        """So many threads; a prefetch_factor is kept."""
        ahead = max(2, count) if self.maker.fetch is not None or count > 1 else 4
        size = 0 if self._cost is None else self._cost.bytes * self.size
        plan = Plan(
            name="threads",
            reason=reason,
            workers=count,
            prefetch_batches=ahead,
            batch_bytes=size,
        )
        return self._as_asked(plan)

    def by_threads(self, wanted: int, reason: str) -> Plan:
        """So many threads, or as many as there is memory for."""
        count = self.within_memory(wanted)
        if count < 1:
            return _inline(reason, _NO_MEMORY)
        return self.threads(count, reason)

    def processes(self, count: int, reason: str) -> Plan:
        """So many worker processes, as somebody asked for them; a prefetch_factor is kept too."""
        return self._as_asked(
            Plan(name="processes", reason=reason, workers=count, prefetch_batches=2 * count)
        )

    def _as_asked(self, plan: Plan) -> Plan:
        asked = self.options.prefetch_factor
        if asked is None:
            return plan
        return replace(plan, prefetch_batches=asked * plan.workers, prefetch_bytes=0)

    def by_processes(
        self, cost: Measured, reason: str, *, most: int = MOST_WORKERS, crowded: bool = False
    ) -> Plan:
        """As many workers as there are cores, or more where they mostly wait; `most` at most.

        Where other programs want the cores (`crowded`), they give way to nobody: what the training
        step leaves, those would take.
        """
        alone = no_workers_here() or (READ_ON if cost.shares else "")
        if alone:
            return _inline(reason, alone)
        have, size = runtime.cores(), self.size
        wanted = workers_for(have, cost.busy) if cost.waits else have
        wanted = min(wanted, max(_FIRST_WAITING, have), most, max(1, -(-self.count // size)))
        room, batch_bytes = shared_memory_free(), cost.bytes * size
        fits = room // (4 * batch_bytes) if batch_bytes and room is not None else wanted
        if fits < 1:
            return _inline(reason, "/dev/shm has room for no batches")
        if fits < wanted:
            reason += f", /dev/shm has room for {fits} workers' batches"
        within = self.within_memory(min(wanted, fits))
        if within < 1:
            return _inline(reason, _NO_MEMORY)
        if within < min(wanted, fits):
            reason += f", memory for {within} workers' batches"
        # What a sample opens here would be shared with workers that are forked later.
        apart = cost.opens or cost.cut
        head = 0 if apart else min(_MOST_HEAD, math.ceil(_HEAD_S / self.batch_s(cost)))
        plan = self.processes(within, reason)
        return replace(
            plan,
            remedy="room" if within < wanted else "cheaper",
            head_batches=head,
            niceness=0 if crowded or cost.crowded else _NICENESS,
            kept=self.options.persistent_workers is None,  # else what was asked for
            batch_bytes=batch_bytes,
        )

    # Room ------------------------------------------------------------------------------------

    def within_memory(self, wanted: int) -> int:
        """Workers whose batches ahead of the loop fit into the host's memory; perhaps none."""
        cost, memory = self._cost, runtime.memory(torch.device("cpu"))
        if cost is None or memory is None or not cost.bytes:
            return wanted
        each = 2 * cost.bytes * self.size
        return min(wanted, int(_MEMORY_SHARE * memory.free_bytes) // each)

    def has_room_for(self, plan: Plan, ahead: int) -> bool:
        """Whether so many batches ahead of the loop fit, as far as is known."""
        memory, cost = runtime.memory(torch.device("cpu")), self._cost
        if memory is None or cost is None:
            return True
        size = ahead * cost.bytes * self.size
        room = shared_memory_free() if plan.name == "processes" else None
        fits = size <= _MEMORY_SHARE * memory.free_bytes
        return fits and (room is None or 2 * size <= room)

    def shortage(self, plan: Plan) -> str:
        """What there is too little of for this plan; "" where there is enough."""
        short = ""
        memory = runtime.memory(torch.device("cpu"))
        if memory is not None and memory.free_bytes < _SHORT_OF_MEMORY * memory.total_bytes:
            short = f"{memory.free_bytes >> 20:,} MiB of memory left"
        room, cost = shared_memory_free(), self._cost
        if plan.name == "processes" and room is not None and cost is not None:
            batch_bytes = cost.bytes * self.size
            if room < 2 * plan.workers * batch_bytes:
                short = f"{room >> 20:,} MiB left in /dev/shm"
        return short


def _inline(reason: str, lacking: str) -> Plan:
    """In place of processes. A reason that says already what is lacking needs it no second time."""
    said = reason if lacking in reason else f"{reason}, but {lacking}"
    remedy: Remedy = "unshared" if lacking == READ_ON else "room"
    return Plan(name="inline", reason=said, remedy=remedy)


def shared_memory_free() -> int | None:
    """Where batches of worker processes lie there; else None, as only memory bounds them."""
    if NAMELESS or not sys.platform.startswith("linux") or not Path("/dev/shm").is_dir():
        return None
    return shutil.disk_usage("/dev/shm").free
