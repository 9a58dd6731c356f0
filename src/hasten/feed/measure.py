"""What samples cost, tried out before a plan is chosen: in a process of its own where it can be."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hasten.feed import randomness
from hasten.feed.compare import identical
from hasten.feed.forking import unwarned
from hasten.feed.samples import Maker

Clock = Callable[[], float]

TRIAL_S = 0.5
"""How long samples are tried, to stay below a second in all."""
_TRIAL_SAMPLES = 64
_TELLING_S = 0.15  # cheap samples are tried for longer: the first of them find their caches cold
_SOON_S = 0.05  # those that are not cheap, a good many of them
_NOT_CHEAP_S = 0.0002
_MOST_SAMPLES = 4096
_AGAIN_SAMPLES = 8  # asked for twice more, to see whether they are the same
_AGAIN_S = 0.1
_COLLATED_BYTES = 64 << 20  # of samples that are kept to be collated
_PATIENCE_S = 0.9  # a child that has not answered by then is not waited for
_TICK_S = 0.0005
_LATE_S = 0.0001  # a thread that got the interpreter so late has waited for its lock
_IDLE_S = 0.006  # in which it is seen how late one comes anyway


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
        steady: an index gives the same sample each time it is asked for, with the global
            generators seeded alike.
        cut: the trial took too long and was ended.
    """

    samples: int
    seconds: float
    cpu_seconds: float
    free: float | None = None
    collate_seconds: float = 0.0
    bytes: int = 0
    draws: frozenset[str] = frozenset()
    opens: bool = False
    steady: bool = True
    cut: bool = False

    @property
    def busy(self) -> float:
        """Share of a sample's time in which it computes; the rest it waits, as for a disk."""
        return min(1.0, self.cpu_seconds / self.seconds) if self.seconds > 0 else 1.0

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
) -> Measured | None:
    """Time some samples, spread over the data set, in this process; None where none came.

    One that fails is passed over: iterating tells of it. The global generators stay as they were.

    Args:
        batch: samples that are collated for a batch.
        cheap_s: samples that take less than this each need no longer trial: the first are slow
            ones.
        queued: seconds that this thread has waited for a core; asked of the system if None.
        tell: given what is known of the samples, before any are collated.
    """
    if count == 0:
        return None
    tries = min(count, _MOST_SAMPLES)
    step = _stride(count)
    outside = randomness.save()
    files = _files()
    samples: list[Any] = []
    seconds = cpu = 0.0
    timed = size = held = made = 0
    begin = clock()
    with _Queue() as queue, _Lock() as lock:
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
                if held < _COLLATED_BYTES and len(samples) < max(batch, _TRIAL_SAMPLES):
                    samples.append(sample)
                    held += _bytes(sample)
                if ended - begin > _longest_s(number + 1, seconds / timed, cheap_s):
                    break
            if not made:
                return None
            waited_s += waited()
            each_s = max(cpu, seconds - waited_s) / timed
            found = Measured(
                samples=made,
                seconds=each_s,
                cpu_seconds=cpu / timed,
                free=lock.free(each_s),
                bytes=size // timed,
                draws=randomness.touched(outside) | maker.uses,
                opens=True,  # for all that is known yet: this trial has files open itself
            )
            tell(found)
            collate_s = _collating(maker, samples, batch, found.bytes, clock)
            draws = randomness.touched(outside) | maker.uses
            asked = [number * step % count for number in range(made)]
            steady = _steady(maker, draws, asked, each_s)
        finally:
            randomness.restore(outside)
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


def measure_apart(
    maker: Maker, count: int, batch: int, *, clock: Clock, cheap_s: float = 0.0
) -> Measured | None:
    """What `measure` gives, from a forked child, so that nothing of the trial stays here.

    Samples may count, cache, or open files, which worker processes that are forked later would
    share. A trial that takes too long is ended. Where processes are not forked, it is made here.
    """
    if not sys.platform.startswith("linux"):
        return measure(maker, count, batch, clock=clock, cheap_s=cheap_s)
    reading, writing = os.pipe()
    with unwarned():
        try:
            child = os.fork()
        except OSError:  # no more processes, or no memory for one
            os.close(reading)
            os.close(writing)
            return measure(maker, count, batch, clock=clock, cheap_s=cheap_s)
    if child == 0:
        _child(
            lambda tell: measure(maker, count, batch, clock=clock, cheap_s=cheap_s, tell=tell),
            writing,
        )
    os.close(writing)
    began = time.monotonic()
    answers: list[bytes] = []
    try:
        while (left := began + _PATIENCE_S - time.monotonic()) > 0:
            if not select.select([reading], [], [], left)[0]:
                break
            part = os.read(reading, select.PIPE_BUF)
            if not part:
                break
            answers.append(part)
            told = time.monotonic()
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found: list[Measured | None] = [pickle.loads(answer) for answer in answers]
    if len(found) == 2 or found == [None]:
        return found[-1]
    if time.monotonic() - began < _PATIENCE_S:
        return None  # it died; so would a worker
    if found and found[0] is not None:  # collating takes longer than it was given
        return replace(found[0], collate_seconds=began + _PATIENCE_S - told)
    return Measured(samples=1, seconds=_PATIENCE_S, cpu_seconds=0.0, cut=True)


def _child(work: Callable[[Callable[[Measured], None]], Measured | None], writing: int) -> None:
    """In the child: answer, and leave without any of the parent's cleaning up."""

    def tell(found: Measured | None) -> None:
        os.write(writing, pickle.dumps(found).ljust(select.PIPE_BUF, b"\0"))

    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        gc.disable()  # it would write to the pages of all objects, and so copy them
        torch.set_num_threads(1)  # the parent's pool of threads is not here
        tell(work(tell))
        status = 0
    finally:
        os._exit(status)


class _Queue:
    """How long this thread has waited for a core, where the system counts it (Linux)."""

    def __enter__(self) -> _Queue:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def waited(self) -> float:
        """In seconds, so far; always 0 where nobody counts."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9


class _Lock:
    """How often another thread gets the interpreter's lock at once: it asks every half ms.

    What it waits for a core is not counted, and how late it comes while nobody holds the lock is
    seen first. Samples that call PyTorch let go of the lock for moments, so that waiting is
    short; but it is waiting. (Two threads that make samples would tell nothing on a busy machine,
    where they wait for a core instead of for each other.)
    """

    def __init__(self) -> None:
        self._late: list[float] = []
        self._idle: list[float] = []
        self._over = False
        self._thread = threading.Thread(target=self._ask, name="hasten-feed-lock", daemon=True)

    def __enter__(self) -> _Lock:
        self._thread.start()
        time.sleep(_IDLE_S)
        self._idle, self._late = self._late, []
        return self

    def __exit__(self, *exception: object) -> None:
        self._over = True
        self._thread.join()

    def free(self, each_s: float) -> float | None:
        """Share of the time; None where samples are so short that nobody would be late."""
        if not self._late or each_s < 2 * _LATE_S:
            return None
        # The least: while the thread is started, it may be late for other reasons.
        usual = min(self._idle, default=0.0)
        if each_s < 2 * usual:
            return None
        # By time, not by count: one that waits for long asks seldom.
        prompt = sum(_TICK_S + each for each in self._late if each < max(_LATE_S, 1.5 * usual))
        return prompt / sum(_TICK_S + each for each in self._late)

    def _ask(self) -> None:
        with _Queue() as queue:
            while not self._over:
                before, queued = time.perf_counter(), queue.waited()
                time.sleep(_TICK_S)
                late = time.perf_counter() - before - _TICK_S - (queue.waited() - queued)
                self._late.append(late)


def _stride(count: int) -> int:
    """A step that visits a data set's indices without repeating one, far apart from the start."""
    step = max(1, int(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step


def _collating(
    maker: Maker, samples: list[Any], batch: int, sample_bytes: int, clock: Clock
) -> float:
    """Seconds for a batch; of a very large one, a part is put together."""
    part = max(1, min(batch, _COLLATED_BYTES // max(1, sample_bytes)))
    given = [samples[number % len(samples)] for number in range(part)]
    begin = clock()
    try:
        maker.collate(0, 0, given, list(range(len(given))))
    except Exception:  # noqa: BLE001 - told when the batch is made
        return 0.0
    return (clock() - begin) * batch / part


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
