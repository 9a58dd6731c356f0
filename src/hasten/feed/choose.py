"""Which plan suits a data set and a device: recognition first, then a short measurement."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed.measure import Measured, measure_apart, workers_for
from hasten.feed.options import Options
from hasten.feed.plan import Plan, duration
from hasten.feed.reading import harmless
from hasten.feed.samples import Maker, many_of
from hasten.feed.segments import NAMELESS
from hasten.feed.tables import Table

Clock = Callable[[], float]

_START_WORKERS_S = 0.3  # what an epoch's samples must cost for worker processes to pay
# Passing a batch between processes costs about 2 ms on the way: text of 1 ms a batch took twice as
# long with two workers as without (benchmarks/results).
_CHEAP_BATCH_S = 0.003
_HANDOVER_S = 0.002  # what takes less is not worth trying to hand over
_BESIDE_S = 0.0005  # the same where the step leaves the host's cores to the workers
_RESIDENT_SHARE = 0.25  # of the device's free memory
_MEMORY_SHARE = 0.25  # of the host's free memory, for batches ahead of the loop
_SHORT_OF_MEMORY = 0.05  # share of the host's memory that is free, below which less is taken
_MOST_WORKERS = 16
_MOST_THREADS = 8
_FREE = 0.75  # share of the time that the interpreter's lock must be free, for threads to pay
_FIRST_WAITING = 4  # processes to begin with where samples wait: each takes some 50 ms to start
_HEAD_S = 0.1  # what they take to bring their first batch
_MOST_HEAD = 3
_NICENESS = 10  # a tenth of a core against a step that wants it, and all that it leaves
_MOST_AHEAD = 8  # batches a worker
_WAITS = "mostly waiting"
_UNSTEADY = (
    "and an index gives another one each time (of a generator, a counter or a clock of its own): "
    "made by others, batches would hold others"
)


class Planner:
    """Chooses a plan for one data set, and the next one to try while it runs."""

    def __init__(
        self, options: Options, maker: Maker, table: Table | None, clock: Clock = time.perf_counter
    ) -> None:
        self._options = options
        self._maker = maker
        self._table = table
        self._clock = clock
        self._cost: Measured | None = None
        self._measured = False

    @property
    def cost(self) -> Measured | None:
        """What samples cost; None where nothing needed to be, or could be, measured."""
        return self._cost

    def plan(self, device: torch.device | None) -> Plan:
        """The plan for batches on this device (None: they stay on the host).

        Raises:
            UsageError: a plan was asked for that the data set does not allow.
        """
        return self._placed(self._choose(device), device)

    def _placed(self, plan: Plan, device: torch.device | None) -> Plan:
        options = self._options
        transformed = options.device_transform is not None and device is not None
        if device is None or runtime.is_host(device):
            pin = options.pin_memory is True and runtime.accelerator() is not None
            said = "" if device is None else "the loop computes in host memory: nothing is copied"
            return replace(plan, pinned=pin, transformed=transformed, blocked=said)
        if plan.name == "resident":
            return replace(plan, transformed=transformed)
        can_pin = runtime.can_pin(device)
        pin = can_pin if options.pin_memory == "auto" else bool(options.pin_memory)
        beside = runtime.can_overlap(device)
        ahead = 2 if beside and runtime.stream(device) is not None else 0
        return replace(
            plan,
            pinned=pin,
            copied=True,
            ahead_batches=ahead,
            blocked=_why_not_beside(device, pin=pin, can_pin=can_pin, ahead=ahead),
            transformed=transformed,
        )

    def _choose(self, device: torch.device | None) -> Plan:
        options, maker = self._options, self._maker
        workers, name = options.num_workers, options.plan
        if name in ("resident", "gather"):
            return self._of_table(device, asked=True)
        if name == "threads":
            several = workers not in ("auto", 1)
            if maker.fetch is None and (options.iterable or (several and not self._several)):
                raise UsageError(
                    f'plan="threads" with several threads needs a data set with fetch(index, '
                    f"key), whose samples draw their randomness from the key alone; "
                    f"{type(options.dataset).__name__} has none: leave num_workers out, or "
                    "give 1"
                )
            single = 1 if maker.fetch is None else runtime.cores()
            return self._threads(single if workers == "auto" else workers, "asked for")
        if name == "processes":
            count = max(1, runtime.cores() - 1) if workers == "auto" else workers
            return self._processes(count, "asked for")
        if name == "inline":
            return Plan(name="inline", reason="asked for")
        if workers != "auto" and workers > 0:
            have = runtime.cores()
            note = f", more than the {have} core{'s' * (have > 1)}" if workers > have else ""
            return self._processes(workers, f"num_workers={workers} asked for{note}")
        if self._table is not None:
            return self._of_table(device, asked=False)
        if workers == 0:
            return Plan(name="inline", reason="num_workers=0 asked for")
        if options.iterable:
            return Plan(name="inline", reason="a stream, which only its author can share out")
        return self._by_cost()

    @cached_property
    def _several(self) -> bool:
        """Several threads may ask the data set for samples at once, for all that its code says."""
        return self._maker.fetch is not None or (
            many_of(self._options.dataset) is None and harmless(self._options.dataset)
        )

    def _of_table(self, device: torch.device | None, *, asked: bool) -> Plan:
        options, table = self._options, self._table
        if table is None:
            raise UsageError(
                f"plan={options.plan!r} needs a data set of whole tensors (TensorDataset, one "
                "whose __getitem__ only indexes tensors or arrays, or Subset or ConcatDataset of "
                f"them, with the default collate_fn); {type(options.dataset).__name__} is not "
                "recognised as one"
            )
        count = f"{table.rows:,} samples in memory"
        if device is None or runtime.is_host(device) or options.plan == "gather":
            each = _gathering(table, self._size, self._clock)
            return Plan(name="gather", reason=f"{count}, {duration(each)} a sample")
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
            return Plan(name="gather", reason=f"{count}, which the host computes batches of")
        if asked or fits:
            room = f" of {memory.free_bytes >> 20:,} free" if memory else ""
            return Plan(
                name="resident",
                reason=f"{table.rows:,} samples take {size >> 20:,} MiB{room} on {device}",
            )
        free = f"{memory.free_bytes >> 20:,} MiB free" if memory else "memory of unknown size"
        return Plan(
            name="gather", reason=f"{count}, {size >> 20:,} MiB: too many for {free} on {device}"
        )

    def _by_cost(self) -> Plan:
        options, maker = self._options, self._maker
        if options.worker_init_fn is not None:
            count = max(1, runtime.cores() - 1)
            return self._processes(count, "worker_init_fn is given, which is for processes")
        cost, count = self._measure(), self._count()
        if cost is None:
            return Plan(name="inline", reason="no sample could be measured")
        each = f"{duration(cost.seconds)} a sample"
        if cost.cut:
            each = f"over {each}"
        if self._batch_s(cost) < _CHEAP_BATCH_S:
            return Plan(name="inline", reason=f"{each}, too cheap to hand over")
        if not cost.steady:
            return Plan(name="inline", reason=f"{each}, {_UNSTEADY}")
        have, waits = runtime.cores(), cost.waits
        free = 1.0 if cost.free is None else cost.free  # fetch is meant for threads
        if maker.fetch is not None and (waits or cost.cut or free > _FREE or have == 1):
            if not waits:
                return self._threads(have, each)
            wanted = min(_MOST_WORKERS, workers_for(have, cost.busy))
            return self._threads(self._within_memory(wanted), f"{each}, {_WAITS}")
        if maker.fetch is None and not cost.draws and self._several:
            if waits:
                wanted = min(_MOST_THREADS, workers_for(have, cost.busy))
                return self._threads(self._within_memory(wanted), f"{each}, {_WAITS}")
            if cost.free is not None and cost.free > _FREE and have > 1:
                return self._threads(have, f"{each}, which leave the interpreter's lock free")
        if maker.fetch is None and waits and not cost.draws:
            return self._threads(1, f"{each}, {_WAITS}")
        if have == 1 and not waits:
            return Plan(name="inline", reason=f"{each}, and one core")
        if not cost.cut and cost.seconds * count < _START_WORKERS_S:
            return Plan(name="inline", reason=f"{each}, an epoch's take less than starting workers")
        return self._by_processes(cost, f"{each}, {_WAITS}" if waits else each)

    def _by_processes(self, cost: Measured, reason: str) -> Plan:
        """As many workers as there are cores, or more where they mostly wait."""
        have, size = runtime.cores(), self._size
        wanted = workers_for(have, cost.busy) if cost.waits else have
        wanted = min(
            wanted, max(_FIRST_WAITING, have), _MOST_WORKERS, max(1, -(-self._count() // size))
        )
        room, batch_bytes = _shared_memory_free(), cost.bytes * size
        fits = room // (4 * batch_bytes) if batch_bytes and room is not None else wanted
        if fits < 1:
            return Plan(name="inline", reason=f"{reason}, but /dev/shm has room for no batches")
        if fits < wanted:
            reason += f", /dev/shm has room for {fits} workers' batches"
        within = self._within_memory(min(wanted, fits))
        if within < min(wanted, fits):
            reason += f", memory for {within} workers' batches"
        # What a sample opens here would be shared with workers that are forked later.
        alone = cost.opens or cost.cut
        head = 0 if alone else min(_MOST_HEAD, math.ceil(_HEAD_S / self._batch_s(cost)))
        plan = self._processes(within, reason)
        return replace(plan, head_batches=head, niceness=_NICENESS, kept=True)

    def _measure(self) -> Measured | None:
        if not self._measured:
            size = self._size
            cheap_s = 0.75 * _CHEAP_BATCH_S / size  # the rest is for collating
            self._cost = measure_apart(
                self._maker, self._count(), size, clock=self._clock, cheap_s=cheap_s
            )
            self._measured = True
        return self._cost

    def _count(self) -> int:
        dataset = self._options.dataset
        return len(dataset) if hasattr(dataset, "__len__") else 0

    @cached_property
    def _size(self) -> int:
        """Samples a batch; a batch_sampler is not drawn from: as many as come to one of its own."""
        given = self._options.batch_sampler
        size = getattr(given, "batch_size", None) if given is not None else self._options.batch_size
        if given is not None and not isinstance(size, int) and hasattr(given, "__len__"):
            size = round(self._count() / max(1, len(given)))
        return max(1, size or 1)

    def _batch_s(self, cost: Measured) -> float:
        return cost.seconds * self._size + cost.collate_seconds

    def _within_memory(self, wanted: int) -> int:
        """Workers whose batches ahead of the loop fit into the host's memory; at least one."""
        cost, memory = self._cost, runtime.memory(torch.device("cpu"))
        if cost is None or memory is None or not cost.bytes:
            return wanted
        each = 2 * cost.bytes * self._size
        return max(1, min(wanted, int(_MEMORY_SHARE * memory.free_bytes) // each))

    def _threads(self, count: int, reason: str) -> Plan:
        ahead = max(2, count) if self._maker.fetch is not None or count > 1 else 4
        return Plan(name="threads", reason=reason, workers=count, prefetch_batches=ahead)

    def _processes(self, count: int, reason: str) -> Plan:
        each = self._options.prefetch_factor or 2
        return Plan(name="processes", reason=reason, workers=count, prefetch_batches=each * count)

    # While a plan runs -----------------------------------------------------------------------

    def larger(self, plan: Plan, wait_s: float) -> Plan | None:
        """The next plan to try where the loop waits; None where this one is all there is.

        Where only room is lacking for workers, it is this one again, whose reason says so.

        Args:
            plan: the one that runs.
            wait_s: for a batch, as seen: where the loop makes it, what that takes.
        """
        if not self._options.chosen or plan.name not in ("inline", "threads", "processes"):
            return None
        have, cost = runtime.cores(), self._cost
        waits = cost is not None and cost.busy <= 0.5
        pool = plan.name == "threads" and plan.workers > 1
        alone = self._maker.fetch is None and plan.name != "processes" and not pool
        if alone:  # the loop's thread, or one beside it
            if cost is None or cost.opens or not cost.steady or (have == 1 and not waits):
                return None
            made_s = wait_s if plan.name == "inline" else self._batch_s(cost)
            if made_s < (_BESIDE_S if plan.copied else _HANDOVER_S):
                return None
            return _like(self._by_processes(cost, plan.reason), plan)
        if plan.name == "inline":
            steady = cost is None or cost.steady
            return _like(self._threads(have, plan.reason), plan) if have > 1 and steady else None
        count = plan.workers + max(1, plan.workers // 4)
        most = _MOST_WORKERS if waits else min(_MOST_WORKERS, have)
        if count > most or self._within_memory(count) < count:
            return None
        ahead = plan.prefetch_batches * count // plan.workers
        return replace(plan, workers=count, prefetch_batches=max(ahead, count))

    def deeper(self, plan: Plan) -> Plan | None:
        """The same with more batches ahead, where the loop waits for a few late ones."""
        if not self._options.chosen or not plan.workers:
            return None
        ahead = 2 * plan.prefetch_batches
        if ahead > _MOST_AHEAD * plan.workers:
            return None
        memory, cost = runtime.memory(torch.device("cpu")), self._cost
        if memory is not None and cost is not None:
            size = ahead * cost.bytes * self._size
            room = _shared_memory_free() if plan.name == "processes" else None
            if size > _MEMORY_SHARE * memory.free_bytes or (room is not None and 2 * size > room):
                return None
        return replace(plan, prefetch_batches=ahead)

    def smaller(self, plan: Plan) -> Plan | None:
        """Half of it, where the host's memory or /dev/shm runs short; None where they do not."""
        if not self._options.chosen or plan.name not in ("threads", "processes"):
            return None
        count = max(1, plan.workers // 2)
        ahead = max(count, plan.prefetch_batches // 2)
        if ahead == plan.prefetch_batches:
            return None
        short = ""
        memory = runtime.memory(torch.device("cpu"))
        if memory is not None and memory.free_bytes < _SHORT_OF_MEMORY * memory.total_bytes:
            short = f"{memory.free_bytes >> 20:,} MiB of memory left"
        room, cost = _shared_memory_free(), self._cost
        if plan.name == "processes" and room is not None and cost is not None:
            batch_bytes = cost.bytes * self._size
            if room < 2 * plan.workers * batch_bytes:
                short = f"{room >> 20:,} MiB left in /dev/shm"
        if not short:
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
        cost = self._cost
        if not self._options.chosen or not plan.workers or cost is None or cost.cut:
            return None
        if period_s <= 1.05 * (self._batch_s(cost) + step_s):
            return None
        reason = f"{plan.reason}; batches made ahead came later than made when asked for"
        return _like(Plan(name="inline", reason=reason), plan)

    def instead(self, plan: Plan, why: str) -> Plan:
        """A plan for the rest, after this one turned out not to suit the data set."""
        reason = f"{plan.reason}; not {plan.name}: {why}"
        cost = self._cost
        apart = cost is not None and cost.steady and not cost.opens
        worth = apart and cost is not None and self._batch_s(cost) >= _CHEAP_BATCH_S
        if plan.name == "threads" and worth and cost is not None and self._options.chosen:
            return _like(self._by_processes(cost, reason), plan)
        return _like(Plan(name="inline", reason=reason), plan)


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
    )


def _gathering(table: Table, size: int, clock: Clock) -> float:
    """Seconds a sample, of the quickest of three batches."""
    rows = np.linspace(0, table.rows - 1, min(size, table.rows)).astype(np.int64)
    took = []
    for _ in range(3):
        begin = clock()
        table.batch(rows)
        took.append(clock() - begin)
    return min(took) / len(rows)


def _why_not_beside(device: torch.device, *, pin: bool, can_pin: bool, ahead: int) -> str:
    """Why copies to the device wait for, or hold up, its computation; "" where they do not."""
    if not ahead and device.type == "mps":
        return "on Apple's GPUs a non-blocking copy may read memory that has changed by then"
    if not ahead and runtime.can_overlap(device):
        return f"{device} gives no second queue for them"
    if not ahead:
        return f"{device.type} has no asynchronous copies"
    if runtime.copy_engines(device) == 0:
        return f"{device} has no copy engine of its own (a slice of a GPU?): it computes or copies"
    if pin:
        return ""
    if not can_pin:
        return f"memory cannot be page-locked for {device}, so each copy goes through a buffer"
    return "pin_memory=False: a copy from pageable memory holds up the host until it is done"


def _shared_memory_free() -> int | None:
    """Where batches of worker processes lie there; else None, as only memory bounds them."""
    if NAMELESS or not sys.platform.startswith("linux") or not Path("/dev/shm").is_dir():
        return None
    return shutil.disk_usage("/dev/shm").free
