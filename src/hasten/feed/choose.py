"""Which plan suits a data set and a device: recognition first, then a short measurement."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed import randomness
from hasten.feed.options import Options
from hasten.feed.plan import Plan
from hasten.feed.samples import Maker
from hasten.feed.tables import Table

Clock = Callable[[], float]

_TRIAL_S = 0.5  # a plan is chosen in at most a second; the last sample may take long
_TRIAL_SAMPLES = 64
_START_WORKERS_S = 0.3  # what an epoch's samples must cost for worker processes to pay
_CHEAP_BATCH_S = 0.001  # passing a batch between processes costs a good part of that
_RESIDENT_SHARE = 0.25  # of the device's free memory
_MOST_WORKERS = 16
_WAITS = "mostly waiting"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a few samples cost.

    Attributes:
        samples: that were tried and came.
        seconds: of one, by the clock; of its processor time where `cpu_seconds`.
        bytes: of the tensors and arrays in one.
    """

    samples: int
    seconds: float
    cpu_seconds: float
    bytes: int


def measure(
    maker: Maker,
    count: int,
    *,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = time.thread_time,
) -> Measured | None:
    """Time some samples, spread over the data set; None where none came.

    One that fails is passed over: iterating tells of it. The global generators stay as they were.
    """
    if count == 0:
        return None
    tries = min(count, _TRIAL_SAMPLES)
    outside = randomness.save()
    seconds = cpu = 0.0
    done = size = 0
    begin = clock()
    try:
        for number in range(tries):
            started, cpu_started = clock(), cpu_clock()
            try:
                sample = maker.sample(0, number * count // tries)
            except Exception:  # noqa: BLE001, S112 - told with its index when it is iterated
                continue
            ended, cpu_ended = clock(), cpu_clock()
            if done or number == tries - 1:  # the first one warms up what all of them need
                seconds, cpu = seconds + ended - started, cpu + cpu_ended - cpu_started
                size += _bytes(sample)
            done += 1
            if ended - begin > _TRIAL_S:
                if done == 1:
                    seconds, cpu, size = ended - started, cpu_ended - cpu_started, _bytes(sample)
                break
    finally:
        randomness.restore(outside)
    if not done:
        return None
    timed = max(1, done - 1)
    return Measured(
        samples=done, seconds=seconds / timed, cpu_seconds=cpu / timed, bytes=size // timed
    )


def choose(
    options: Options,
    table: Table | None,
    maker: Maker,
    device: torch.device | None,
    *,
    clock: Clock = time.perf_counter,
) -> Plan:
    """The plan for these options on this device (None: batches stay on the host).

    Raises:
        UsageError: a plan was asked for that the data set does not allow.
    """
    plan = _choose(options, table, maker, device, clock)
    if device is None or runtime.is_host(device):
        pin = options.pin_memory is True and runtime.accelerator() is not None
        return replace(plan, pinned=pin)
    if plan.name == "resident":
        return plan
    pin = runtime.can_pin(device) if options.pin_memory == "auto" else bool(options.pin_memory)
    ahead = 2 if runtime.can_overlap(device) else 0
    return replace(plan, pinned=pin, ahead_batches=ahead)


def _choose(
    options: Options, table: Table | None, maker: Maker, device: torch.device | None, clock: Clock
) -> Plan:
    workers, name = options.num_workers, options.plan
    if name in ("resident", "gather"):
        return _of_table(options, table, device, asked=True)
    if name == "threads":
        if maker.fetch is None:
            raise UsageError(
                f'plan="threads" needs a data set with fetch(index, key), whose samples draw '
                f"their randomness from the key alone; {type(options.dataset).__name__} has none"
            )
        count = runtime.cores() if workers == "auto" else workers
        return _threads(count, "asked for")
    if name == "processes":
        count = max(1, runtime.cores() - 1) if workers == "auto" else workers
        return _processes(options, count, "asked for")
    if name == "inline":
        return Plan(name="inline", reason="asked for")
    if workers != "auto" and workers > 0:
        cores = runtime.cores()
        note = f", more than the {cores} cores" if workers > cores else ""
        return _processes(options, workers, f"num_workers={workers} asked for{note}")
    if table is not None:
        return _of_table(options, table, device, asked=False)
    if workers == 0:
        return Plan(name="inline", reason="num_workers=0 asked for")
    if options.iterable:
        return Plan(name="inline", reason="a stream, which only its author can share out")
    return _measured(options, maker, clock)


def _of_table(
    options: Options, table: Table | None, device: torch.device | None, *, asked: bool
) -> Plan:
    if table is None:
        raise UsageError(
            f"plan={options.plan!r} needs a data set of whole tensors (TensorDataset, or Subset or "
            "ConcatDataset of them, with the default collate_fn); "
            f"{type(options.dataset).__name__} is not recognised as one"
        )
    count = f"{table.rows:,} samples in memory"
    if device is None or runtime.is_host(device) or options.plan == "gather":
        return Plan(name="gather", reason=count)
    size = table.rows * table.row_bytes
    memory = runtime.memory(device)
    fits = memory is not None and size < _RESIDENT_SHARE * memory.free_bytes
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


def _measured(options: Options, maker: Maker, clock: Clock) -> Plan:
    if options.worker_init_fn is not None:
        count = max(1, runtime.cores() - 1)
        return _processes(options, count, "worker_init_fn is given, which is for processes")
    count = len(options.dataset) if hasattr(options.dataset, "__len__") else 0
    cost = measure(maker, count, clock=clock)
    if cost is None:
        return Plan(name="inline", reason="no sample could be measured")
    batch_s = cost.seconds * (options.batch_size or 1)
    each = f"{duration(cost.seconds)} a sample"
    if batch_s < _CHEAP_BATCH_S:
        return Plan(name="inline", reason=f"{each}, too cheap to hand over")
    busy = min(1.0, cost.cpu_seconds / cost.seconds) if cost.seconds else 1.0
    cores = runtime.cores()
    if maker.fetch is not None:
        if busy > 0.5:
            return _threads(cores, each)
        return _threads(min(_MOST_WORKERS, math.ceil(cores / max(busy, 0.05))), f"{each}, {_WAITS}")
    if cores == 1 and busy > 0.5:
        return Plan(name="inline", reason=f"{each}, and one core")
    if cost.seconds * count < _START_WORKERS_S:
        return Plan(name="inline", reason=f"{each}, an epoch's take less than starting workers")
    # One core is left to the training step; samples that mostly wait need more than one a core.
    wanted = max(1, cores - 1) if busy > 0.5 else math.ceil(cores / max(busy, 0.05))
    wanted = min(wanted, _MOST_WORKERS, max(1, -(-count // (options.batch_size or 1))))
    room = _shared_memory_free()
    batch_bytes = cost.bytes * (options.batch_size or 1)
    fits = room // (4 * batch_bytes) if batch_bytes and room is not None else wanted
    if fits < 1:
        return Plan(name="inline", reason=f"{each}, but /dev/shm has room for no batches")
    reason = each if busy > 0.5 else f"{each}, {_WAITS}"
    if fits < wanted:
        reason += f", /dev/shm has room for {fits} workers' batches"
    return _processes(options, min(wanted, fits), reason)


def _threads(count: int, reason: str) -> Plan:
    return Plan(name="threads", reason=reason, workers=count, prefetch_batches=max(2, count))


def _processes(options: Options, count: int, reason: str) -> Plan:
    each = options.prefetch_factor or 2
    return Plan(name="processes", reason=reason, workers=count, prefetch_batches=each * count)


def larger(options: Options, plan: Plan) -> Plan | None:
    """The next plan to try where the loop waits; None where this one is all there is.

    Only plans that were chosen here grow, not those that were asked for.
    """
    chosen = options.plan == "auto" and options.num_workers == "auto"
    if not chosen or options.iterable or plan.name not in ("inline", "threads", "processes"):
        return None
    cores = runtime.cores()
    if plan.name == "inline":
        if cores == 1:
            return None
        grown = _processes(options, 1, plan.reason)
    else:
        count = plan.workers + max(1, plan.workers // 4)
        if count > min(_MOST_WORKERS, 2 * cores):
            return None
        make = _threads if plan.name == "threads" else partial(_processes, options)
        grown = make(count, plan.reason)
    return replace(grown, pinned=plan.pinned, ahead_batches=plan.ahead_batches)


def duration(seconds: float) -> str:
    """``0.4 µs``, ``12 ms``, ``1.3 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.2g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    micros = seconds * 1e6
    return f"{micros:.2g} µs" if micros < 100 else f"{micros:.0f} µs"


def _shared_memory_free() -> int | None:
    if not sys.platform.startswith("linux") or not Path("/dev/shm").is_dir():
        return None
    return shutil.disk_usage("/dev/shm").free


def _bytes(sample: Any) -> int:
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, Mapping):
        return sum(map(_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(_bytes, sample))
    return int(getattr(sample, "nbytes", 8))
