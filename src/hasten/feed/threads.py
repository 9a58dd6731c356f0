"""Batches from a pool of threads: samples whose work releases the interpreter lock, as decoding."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hasten.errors import DataError
from hasten.feed.awaited import Awaited, in_spite_of_signals
from hasten.feed.buffers import Ring, array
from hasten.feed.depth import Depth
from hasten.feed.describe import late
from hasten.feed.ending import close_at_end
from hasten.feed.forking import room_for
from hasten.feed.modes import Modes
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.resting import Rest
from hasten.feed.samples import Maker
from hasten.feed.sources import Item, Report

Kind = tuple[torch.Size, torch.dtype] | None
"""Of one part of a sample: shape and type if it is a tensor, None if it is anything else."""

_RING_BATCHES = 4  # kept for use again beyond those ahead of the loop: it may hold some itself


class Threads:
    """The plan `threads`: each thread makes a sample and writes it into the batch's memory.

    Batches come in order. Ahead of the loop are at most `plan.prefetch_batches`, and
    `plan.prefetch_bytes` once the size of a batch is known.
    """

    def __init__(
        self, maker: Maker, plan: Plan, order: Order, report: Report, timeout_s: float = 0
    ) -> None:
        """`timeout_s`: longest wait for a batch; 0 for ever."""
        self._timeout_s = timeout_s
        self._maker = maker
        self._plan = plan
        self._order = order
        self._report = report
        self._depth = Depth(plan)
        self._memory = _Memory(plan)

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        numbered = enumerate(self._order.batches(epoch, first), first)
        jobs: deque[_Job] = deque()
        with _Pool(self._plan.workers) as pool:

            def fill(count: int) -> None:
                while len(jobs) < count:
                    number, indices = next(numbered, (-1, None))
                    if number < 0:
                        return
                    listed = self._maker.listed(indices)
                    jobs.append(_Job(self._maker, self._memory, epoch, number, listed))
                    pool.add(jobs[-1])

            while True:
                fill(1 + self._depth.batches)
                if not jobs:
                    return
                job = jobs.popleft()
                if not pool.wait(job, self._timeout_s):
                    raise DataError(late("threads", self._timeout_s))
                item = self._item(job)
                del job
                if item is not None:
                    self._depth.saw(item[1])
                    fill(self._depth.batches)  # which were fewer while nothing was known
                    yield item
                    del item  # else its memory could not be used for the next batch

    def _item(self, job: _Job) -> Item | None:
        for place, error in sorted(job.errors.items()):
            if not isinstance(error, Exception):
                raise error
            index = job.indices[place]
            self._report(index, self._maker.skip(index, error))
        places = [place for place in range(len(job.indices)) if place not in job.errors]
        if not places:
            return None
        kept = [job.indices[place] for place in places]
        if job.columns is None or job.raw:
            samples = [job.sample(place) for place in places]
            batch = self._maker.collate(job.epoch, job.number, samples, kept)
        else:
            batch = self._written(job, places, kept)
        return job.number, batch, kept

    def _written(self, job: _Job, places: list[int], kept: list[Any]) -> Any:
        assert job.columns is not None
        rest: Iterator[Any] = iter(())
        if any(column is None for column in job.columns):
            others = [job.rest[place] for place in places]
            rest = iter(self._maker.collate(job.epoch, job.number, others, kept))
        whole = len(places) == len(job.indices)
        at = torch.tensor(places, device="cpu")
        batch = [
            next(rest) if column is None else column if whole else column[at]
            for column in job.columns
        ]
        return batch[0] if job.container is None else batch

    def close(self) -> None:
        """See `Source`."""
        self._memory = _Memory(self._plan)


class _Memory:
    """Gives batches their memory; asked by any thread."""

    def __init__(self, plan: Plan) -> None:
        self._pinned = plan.pinned
        self._ring = Ring(most=2 * (plan.prefetch_batches + _RING_BATCHES))

    def empty(self, count: int, kind: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        shape, dtype = (count, *kind[0]), kind[1]
        if self._pinned:  # PyTorch keeps such memory for use again, and knows when it is free
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        return self._ring.empty(shape, dtype)


class _Job:
    """One batch in the making. What the first finished sample looks like sets its memory.

    Attributes:
        columns: of each part of a sample, the tensor [B, …] that the threads write to, or None
            for what is no tensor; None as a whole where nothing is.
        container: tuple or list, as the samples are; None where a sample is a bare tensor.
        rest: of each place, a tuple or list of the parts that are no tensors.
        raw: samples that could not be written to the columns.
    """

    def __init__(
        self, maker: Maker, memory: _Memory, epoch: int, number: int, indices: list[Any]
    ) -> None:
        self._maker = maker
        self._memory = memory
        self._lock = threading.Lock()
        self._kinds: list[Kind] | None = None
        self._plain = not (maker.batched and maker.default_collate)
        self.epoch = epoch
        self.number = number
        self.indices = indices
        self.left = len(indices)
        self.columns: list[torch.Tensor | None] | None = None
        self.container: type | None = None
        self.rest: dict[int, Any] = {}
        self.raw: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}

    def run(self, place: int) -> None:
        """Make one sample (in a thread of the pool)."""
        try:
            slots = self._slots(place)
            sample = self._maker.sample(self.epoch, self.indices[place], slots)
            if self._plain or not self._write(sample, place, slots or ()):
                self.raw[place] = sample
        except BaseException as error:  # noqa: BLE001 - raised by the loop, when it comes to it
            self.errors[place] = error

    def _slots(self, place: int) -> list[torch.Tensor] | None:
        """Where the sample's tensors are wanted, once that is known."""
        if self.columns is None or not self._maker.writes:
            return None
        return [column[place] for column in self.columns if column is not None]

    def _write(self, sample: Any, place: int, slots: Sequence[torch.Tensor]) -> bool:
        """Copy a sample's tensors into the batch, but those that are its `slots`.

        False where they do not fit into it.
        """
        container = type(sample) if type(sample) in (tuple, list) else None
        values = [sample] if container is None else sample
        parts = [_tensor(value) for value in values]
        kinds: list[Kind] = [None if part is None else (part.shape, part.dtype) for part in parts]
        with self._lock:
            if self._kinds is None:
                self._kinds = kinds
                self.container = container
                if any(kinds):
                    count = len(self.indices)
                    self.columns = [k and self._memory.empty(count, k) for k in kinds]
        if kinds != self._kinds or container is not self.container or self.columns is None:
            return False
        for part, column in zip(parts, self.columns, strict=True):
            if part is not None and column is not None and not any(part is s for s in slots):
                # Not column[place].copy_: PyTorch would start a pool of threads in each of ours.
                np.copyto(array(column)[place, ...], array(part))
        if container is not None:
            pairs = zip(parts, values, strict=True)
            self.rest[place] = container(value for part, value in pairs if part is None)
        return True

    def sample(self, place: int) -> Any:
        """The sample as it was made."""
        if place in self.raw:
            return self.raw[place]
        assert self.columns is not None
        rest = iter(self.rest.get(place, ()))
        parts = [next(rest) if column is None else column[place].clone() for column in self.columns]
        return parts[0] if self.container is None else self.container(parts)


class _Pool:
    """Threads that work through the samples of jobs, in order, until it is closed."""

    def __init__(self, workers: int) -> None:
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._tasks: deque[tuple[_Job, int]] = deque()
        self._closed = False
        self._stuck = False
        self._rest = Rest(workers)
        modes = Modes()
        self._threads = [
            Awaited(modes.during, self._run, name=f"hasten-feed-{number}")
            for number in range(workers)
        ]

    def __enter__(self) -> _Pool:
        close_at_end(self)
        try:
            with room_for("threads", len(self._threads)):
                for thread in self._threads:
                    thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self, job: _Job) -> None:
        with self._work:
            self._tasks.extend((job, place) for place in range(len(job.indices)))
            self._work.notify(len(job.indices))

    def wait(self, job: _Job, timeout_s: float) -> bool:
        """Whether it was done in time. If not, its threads may never end, and are left to that."""
        if job.left:
            self._stuck = not self._rest.during(lambda: self._wait(job, timeout_s))
        return not self._stuck

    def _wait(self, job: _Job, timeout_s: float) -> bool:
        with self._done:
            return self._done.wait_for(lambda: not job.left or self._closed, timeout_s or None)

    def close(self) -> None:
        in_spite_of_signals(self._end)

    def _end(self) -> None:
        with self._work:
            self._closed = True
            self._tasks.clear()
            self._work.notify_all()
            self._done.notify_all()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(0 if self._stuck else None)

    def _run(self) -> None:
        job: _Job | None = None
        while True:
            with self._work:  # once a sample, which threads wait for each other in
                if job is not None:
                    job.left -= 1
                    if not job.left:
                        self._done.notify_all()
                    job = None
                while not self._tasks and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                job, place = self._tasks.popleft()
            job.run(place)


def _tensor(value: Any) -> torch.Tensor | None:
    """A plain host tensor of the value, as the default collate function would stack it."""
    if type(value) is np.ndarray:
        if value.ndim == 0 or value.dtype.kind not in "biufc" or not value.flags.writeable:
            return None
        value = torch.from_numpy(value) if min(value.strides, default=0) >= 0 else None
    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    if value.requires_grad or value.device.type != "cpu" or value.is_conj() or value.is_neg():
        return None
    return value
