"""What samples cost, by trying some of them."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hasten.feed import randomness
from hasten.feed.compare import identical
from hasten.feed.lateness import Lock, Queued
from hasten.feed.samples import Maker

Clock = Callable[[], float]

CROWDED = 0.2
"""Share of the time that a thread waits for a core, from which other programs want the cores."""
TRIAL_S = 0.5
"""How long samples are tried, to stay below a second in all."""
_TRIAL_SAMPLES = 64
_TELLING_S = 0.15  # cheap samples are tried for longer
_SOON_S = 0.05  # those that are not cheap, a good many of them
_NOT_CHEAP_S = 0.0002
_MOST_SAMPLES = 4096
_AGAIN_SAMPLES = 8  # asked for twice more, to see whether they are the same
_AGAIN_S = 0.1
_COLLATINGS = 4  # the first finds nothing in the caches
_COLLATING_S = 0.01
_COLLATED_BYTES = 64 << 20  # of samples that are kept to be collated
_FEW_SAMPLES = 8  # that tell whether there are any questions to ask of the interpreter's lock
_COLD_SAMPLES = 32  # of twice as many, the first are not counted: they find their caches cold


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a few samples cost.

    Attributes:
        samples: that were tried and came.
        seconds: of one, by the clock, without what it waited for a core that others had;
            of its processor time where `cpu_seconds`.
        free: share of the time in which another thread can have the interpreter's lock; None
            where samples are too short to tell.
        collate_seconds: to make one batch of samples that are there.
        bytes: of the tensors and arrays in one sample.
        draws: the global random generators that samples or the collate function drew from.
        opens: files that samples opened and left open; workers that are forked would share them.
        shares: they read on in files that were open already, which forked workers would share.
        steady: an index gives the same sample each time it is asked for, with the global
            generators seeded alike.
        cut: the trial took too long and was ended.
        queued: share of the time by the clock in which samples waited for a core.
    """

    samples: int
    seconds: float
    cpu_seconds: float
    free: float | None = None
    collate_seconds: float = 0.0
    bytes: int = 0
    draws: frozenset[str] = frozenset()
    opens: bool = False
    shares: bool = False
    steady: bool = True
    cut: bool = False
    queued: float = 0.0

    @property
    def crowded(self) -> bool:
        """Whether other programs want the cores: nothing here wants a second one meanwhile."""
        return self.queued > CROWDED

    @property
    def busy(self) -> float:
        """Share of a sample's time in which it computes; the rest it waits, as for a disk."""
        return min(1.0, self.cpu_seconds / self.seconds) if self.seconds > 0 else 1.0

    @property
    def forks(self) -> bool:
        """Whether workers that are forked now or later may make them, for all that was seen."""
        return self.steady and not self.opens and not self.shares

    @property
    def waits(self) -> bool:
        """Whether a sample is known to wait for most of its time."""
        return self.busy <= 0.5 and not self.cut


def workers_for(cores: int, busy: float) -> int:
    """Workers that keep `cores` at work, each computing for a share `busy` of its time."""
    return math.ceil(cores / max(busy, 0.05))


def measure(
    maker: Maker,
    count: int,
    batch: int = 1,
    *,
    clock: Clock = time.perf_counter,
    cheap_s: float = 0.0,
    cpu_clock: Clock = time.thread_time,
    queued: Clock | None = None,
    tell: Callable[[Measured], None] = lambda found: None,
    drawing: bool = True,
) -> Measured | None:
    """Time some samples, spread over the data set, in this process; None where none came.

    One that fails is passed over: iterating tells of it. The global generators stay as they were.

    Args:
        batch: samples that are collated for a batch.
        cheap_s: samples that take less than this each need no longer trial: the first are slow
            ones.
        queued: seconds that this thread has waited for a core; asked of the system if None.
        tell: given what is known of the samples, before any are collated.
        drawing: samples may draw from the global generators; else those are not touched here, for
            another thread uses them.
    """
    if count == 0:
        return None
    tries = min(count, _MOST_SAMPLES)
    step = _stride(count)
    before = randomness.save() if drawing else {}
    files = _files()
    samples: list[Any] = []
    seconds = cpu = 0.0
    timed = size = held = made = 0
    cold = seconds, cpu, timed, size, 0.0
    begin = clock()
    with Queued() as queue, Lock() as lock:
        # Not asked for each sample: reading a file would let go of the interpreter's lock.
        waited = queued or queue.waited
        waited_s = -waited()
        try:
            for number in range(tries):
                started, cpu_started = clock(), cpu_clock()
                try:
                    sample = maker.sample(0, number * step % count)
                except Exception:  # noqa: BLE001 - told with its index when it is iterated
                    if clock() - begin > TRIAL_S:
                        break
                    continue
                ended = clock()
                if timed == 1 and made == 1:  # the first warms up what all of them need
                    seconds = cpu = 0.0
                    timed = size = 0
                seconds, cpu = seconds + ended - started, cpu + cpu_clock() - cpu_started
                size += _bytes(sample)
                timed += 1
                made += 1
                if made == _FEW_SAMPLES and not lock.tells(seconds / timed):
                    lock.stop()
                if made == _COLD_SAMPLES:
                    lock.stop()  # on a busy machine samples wait for it to get a core
                    cold = seconds, cpu, timed, size, waited()
                elif made == 2 * _COLD_SAMPLES:
                    seconds, cpu = seconds - cold[0], cpu - cold[1]
                    timed, size, waited_s = timed - cold[2], size - cold[3], -cold[4]
                if held < _COLLATED_BYTES and len(samples) < max(batch, _TRIAL_SAMPLES):
                    samples.append(sample)
                    held += _bytes(sample)
                if ended - begin > _longest_s(number + 1, seconds / timed, cheap_s):
                    break
            if not made:
                return None
            waited_s += waited()
            each_s = max(cpu, seconds - waited_s) / timed
            queued_share = waited_s / seconds if seconds > 0 else 0.0
            found = Measured(
                samples=made,
                seconds=each_s,
                cpu_seconds=cpu / timed,
                free=lock.free(each_s),
                bytes=size // timed,
                draws=randomness.touched(before) | maker.uses,
                opens=True,  # for all that is known yet: this trial has files open itself
                queued=queued_share,
            )
            tell(found)
            collate_s = _collating(maker, samples, batch, found.bytes, clock, drawing=drawing)
            draws = randomness.touched(before) | maker.uses
            asked = [number * step % count for number in range(made)]
            steady = _steady(maker, draws, asked, each_s)
        finally:
            randomness.restore(before)
    opens = _files() != files
    return replace(found, collate_seconds=collate_s, draws=draws, opens=opens, steady=steady)


def _longest_s(tried: int, each_s: float, cheap_s: float) -> float:
    """How long to go on after so many samples, of so many seconds each."""
    if tried < _TRIAL_SAMPLES:
        return TRIAL_S
    if each_s < cheap_s:
        return 0.0
    return _SOON_S if each_s > _NOT_CHEAP_S else _TELLING_S


def _steady(maker: Maker, draws: frozenset[str], indices: list[int], each_s: float) -> bool:
    """Whether samples come out the same when they are asked for again, as far as time allows.

    One that counts its calls, writes to what it reads, or draws from a generator of its own does
    not: what a batch holds would depend on who makes it.
    """
    seeded = copy.copy(maker)
    seeded.uses = draws
    for index in indices[: min(_AGAIN_SAMPLES, int(_AGAIN_S / max(each_s, 1e-6)) // 2)]:
        try:
            first = copy.deepcopy(seeded.sample(0, index))  # the next may write to what it shows
            if not identical(first, seeded.sample(0, index)):
                return False
        except Exception:  # noqa: BLE001, S112 - told with its index when it is iterated
            continue
    return True


def _stride(count: int) -> int:
    """A step that visits a data set's indices without repeating one, far apart from the start."""
    step = max(1, int(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step


def _collating(
    maker: Maker, samples: list[Any], batch: int, sample_bytes: int, clock: Clock, *, drawing: bool
) -> float:
    """Seconds for a batch, the least of a few; of a very large one, a part is put together."""
    part = max(1, min(batch, _COLLATED_BYTES // max(1, sample_bytes)))
    given = [samples[number % len(samples)] for number in range(part)]
    took: list[float] = []
    while not took or (len(took) < _COLLATINGS and sum(took) < _COLLATING_S):
        begin = clock()
        try:
            if drawing:
                maker.collate(0, 0, given, list(range(len(given))))
            else:
                maker.collate_fn(given if maker.batched else given[0])
        except Exception:  # noqa: BLE001 - told when the batch is made
            return 0.0
        took.append(clock() - begin)
    return min(took) * batch / part


def _files() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return 0


def _bytes(sample: Any) -> int:
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, Mapping):
        return sum(map(_bytes, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(_bytes, sample))
    return int(getattr(sample, "nbytes", 8))
