"""The plan `processes`: batches from worker processes, which are replaced when they die."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import torch

from hasten.errors import DataError, UsageError
from hasten.feed.compare import identical
from hasten.feed.keys import workers_generator
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.pool import DiedError, Pool, Work
from hasten.feed.samples import Maker, short
from hasten.feed.sources import Item, Report
from hasten.feed.work import Beginning, MapWork, Piece, RemoteError, StreamWork

_log = logging.getLogger("hasten.feed")

_MOST_DEATHS = 3
"""Workers that may die at one batch, before it is held to be the batch's fault."""


class Processes:
    """Worker processes make whole batches, in turn; what they get shows no trace of who made it.

    A worker that dies is replaced, and its batches are made again from the first that has not
    come: order and randomness follow from seed, epoch and index, so nothing is lost or twice.
    """

    def __init__(
        self, options: Options, plan: Plan, maker: Maker, order: Order | None, report: Report
    ) -> None:
        self._options = options
        self._plan = plan
        self._maker = maker
        self._order = order
        self._report = report
        self._each = max(1, plan.prefetch_batches // plan.workers)
        self._lasting: Pool | None = None

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        pool, self._lasting = self._lasting or self._started(epoch), None
        whole = False
        try:
            if self._order is None:
                yield from self._stream(pool, epoch, first)
            else:
                yield from self._made(pool, self._order, epoch, first)
            whole = True
        finally:
            # One that was left in the middle has jobs that are of no use any more; where another
            # iteration, at the same time, has kept its own, one is enough.
            if whole and self._options.persistent_workers and self._lasting is None:
                self._lasting = pool
            else:
                pool.close()

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = None

    def __del__(self) -> None:
        self.close()

    def _started(self, epoch: int) -> Pool:
        options, workers = self._options, self._plan.workers
        draw = torch.empty((), dtype=torch.int64)
        base = int(draw.random_(generator=workers_generator(self._maker.seed, epoch)).item())
        function = options.worker_init_fn
        beginning = Beginning(options.dataset, workers, base, function)
        work: Work = MapWork(self._maker, beginning)
        if self._order is None:
            work = StreamWork(
                options.dataset,
                beginning,
                batch_size=options.batch_size,
                drop_last=options.drop_last,
                collate_fn=options.collate_fn,
                seed=self._maker.seed,
                told=function is not None,
            )
        return start_pool(options, workers, work, self._each)

    def _made(
        self, pool: Pool, order: Order, epoch: int, first: int
    ) -> Generator[Item, None, None]:
        jobs = Jobs(pool, self._each, self._options.timeout)
        numbered = enumerate(order.batches(epoch, first), first)
        more = True
        while True:
            while more and not jobs.full:
                number, indices = next(numbered, (-1, None))
                more = number >= 0
                if more:
                    jobs.add(number, indices, (epoch, number, indices))
            if jobs.empty:
                return
            indices, made = jobs.next()
            if made.failure is not None:
                raise_failure(made.failure)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield made.number, made.batch, indices if made.kept is None else made.kept
            del made  # else the loop's batch lives on while the next one is waited for

    def _stream(self, pool: Pool, epoch: int, first: int) -> Generator[Item, None, None]:
        readers = [
            _Reader(pool, worker, epoch, self._each, self._options.timeout)
            for worker in range(len(pool))
        ]
        active, number = list(readers), 0
        while active:
            for reader in list(active):
                piece = reader.next()
                if piece.failure is not None:
                    raise_failure(piece.failure)
                if piece.ended:
                    active.remove(reader)
                    continue
                if reader.given == 1:
                    self._check_shared(readers, reader, piece)
                if number >= first:
                    yield number, piece.batch, None
                number += 1
                del piece
        self._check_parts(readers)

    def _check_shared(self, readers: Sequence[_Reader], reader: _Reader, piece: Piece) -> None:
        """Whether the stream's copies give each their part, by the first batch of each."""
        if piece.shared or len(readers) == 1:
            return
        if reader is readers[0]:
            reader.first_batch = piece.batch
        elif identical(readers[0].first_batch, piece.batch):
            raise DataError(self._repeats(len(readers), f"workers 0 and {reader.worker} began "
                                          "with the same batch"))  # fmt: skip

    def _check_parts(self, readers: Sequence[_Reader]) -> None:
        dataset: Any = self._options.dataset
        if len(readers) == 1 or any(r.shared for r in readers) or not hasattr(dataset, "__len__"):
            return
        count = len(dataset)
        if count and all(reader.samples == count for reader in readers):
            raise DataError(self._repeats(len(readers), f"each gave {count:,} samples, which is "
                                          "what its len says of all"))  # fmt: skip

    def _repeats(self, workers: int, seen: str) -> str:
        name = type(self._options.dataset).__name__
        return (
            f"the stream {name} gives the whole of its samples in each of the {workers} workers "
            f"({seen}): in __iter__, give each its part by the id and num_workers of "
            "torch.utils.data.get_worker_info(), or use num_workers=1"
        )


class Jobs:
    """Batches that workers are making, in order; given to the workers in turn."""

    def __init__(self, pool: Pool, each: int, timeout_s: float) -> None:
        """`each`: most jobs of a worker; `timeout_s`: longest wait for one; 0 for ever."""
        self._pool = pool
        self._each = each
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, Any, Any, int]] = deque()
        self._held: dict[int, deque[Any]] = {}  # of workers that were replaced: jobs not sent yet
        self._turn = 0
        self._deaths = 0

    @property
    def full(self) -> bool:
        """No worker may be sent more."""
        return len(self._waiting) >= self._each * len(self._pool)

    @property
    def empty(self) -> bool:
        """Nothing is under way."""
        return not self._waiting

    def add(self, number: int, indices: Any, job: Any, *, worker: int | None = None) -> None:
        """Send the job of a batch, to the next worker in turn or the one named."""
        if worker is None:
            worker, self._turn = self._turn, (self._turn + 1) % len(self._pool)
        self._waiting.append((number, indices, job, worker))
        if worker in self._held:
            self._held[worker].append(job)
        else:
            self._pool.send(worker, job)

    def next(self) -> tuple[Any, Any]:
        """(indices, reply) of the oldest batch.

        Raises:
            DataError: it did not come in time, or worker after worker died of it.
        """
        while True:
            number, indices, _, worker = self._waiting[0]
            try:
                reply = received(self._pool, worker, self._timeout_s)
            except DiedError as died:
                self._deaths += 1
                if self._deaths >= _MOST_DEATHS:
                    raise DataError(
                        f"{died}. It was the {self._deaths}rd to die at batch {number} of the "
                        f"epoch, of the samples {short(as_list(indices))}: look at those"
                    ) from died
                _log.warning("%s. A new one makes its batches again, from %d on", died, number)
                self._pool.replace(worker)
                # One by one, so that the next death is known to be of the batch waited for.
                again = deque(job for _, _, job, of in self._waiting if of == worker)
                self._pool.send(worker, again.popleft())
                self._held[worker] = again
            else:
                self._waiting.popleft()
                self._deaths = 0
                self._send_held(worker)
                return indices, reply

    def _send_held(self, worker: int) -> None:
        held = self._held.get(worker)
        if held:
            self._pool.send(worker, held.popleft())
        elif held is not None:
            del self._held[worker]


class _Reader:
    """One worker's part of a stream.

    Attributes:
        given: batches that it gave in this epoch; `samples`: in them.
        shared: see `Piece`.
        first_batch: kept of worker 0, to compare those of others with.
    """

    def __init__(self, pool: Pool, worker: int, epoch: int, each: int, timeout_s: float) -> None:
        self.worker = worker
        self.given = 0
        self.samples = 0
        self.shared = True
        self.first_batch: Any = None
        self._pool = pool
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._deaths = 0
        self._asked = each
        self._begin()

    def _begin(self) -> None:
        self._pool.send(self.worker, (self._epoch, self.given))
        for _ in range(self._asked - 1):
            self._pool.send(self.worker, None)

    def next(self) -> Piece:
        """Its next batch, or the end."""
        while True:
            try:
                piece: Piece = received(self._pool, self.worker, self._timeout_s)
            except DiedError as died:
                self._deaths += 1
                if self._deaths >= _MOST_DEATHS:
                    raise DataError(
                        f"{died}. It was the {self._deaths}rd to die at its batch {self.given}"
                    ) from died
                _log.warning("%s. A new one reads its part again up to there", died)
                self._pool.replace(self.worker)
                self._asked = 1  # so that the next death is known to be of that batch
                self._begin()
                continue
            self._deaths = 0
            self.shared = piece.shared
            if piece.ended:
                for _ in range(self._asked - 1):  # answered in the same way; persistent ones go on
                    received(self._pool, self.worker, self._timeout_s)
                return piece
            if piece.failure is None:
                self.given += 1
                self.samples += piece.samples
                self._pool.send(self.worker, None)
            return piece


def start_pool(options: Options, workers: int, work: Work, each: int) -> Pool:
    """Worker processes, as the options want them started.

    Raises:
        UsageError: the data set cannot be sent to them.
    """
    context = options.multiprocessing_context
    try:
        return Pool(workers, work, context=context, jobs_each=each)
    except Exception as error:
        if "pickl" in f"{type(error).__name__} {error}".lower():
            raise _unpicklable(error, options.dataset) from error
        raise


def received(pool: Pool, worker: int, timeout_s: float) -> Any:
    """A worker's next reply.

    Raises:
        DiedError: see `Pool.receive`.
        DataError: it did not come in time.
    """
    try:
        return pool.receive(worker, timeout_s or None)
    except TimeoutError as error:
        raise DataError(
            f"no batch came from the worker processes within timeout={timeout_s:g} s"
        ) from error


def raise_failure(failure: tuple[str, str]) -> None:
    """Raise what went wrong in a worker: (message, traceback)."""
    message, text = failure
    raise DataError(message) from (RemoteError(text) if text else None)


def as_list(indices: Any) -> list[Any]:
    """The indices of a batch, or the one of a sample, for a message."""
    listed = indices.tolist() if hasattr(indices, "tolist") else indices
    return listed if isinstance(listed, list) else [listed]


def _unpicklable(error: Exception, dataset: Any) -> UsageError:
    return UsageError(
        f"the data set {type(dataset).__name__} cannot be sent to worker processes ({error}); "
        "define classes, functions and collate_fn at the top of a module instead of inside a "
        'function or as a lambda, or use num_workers=0 or multiprocessing_context="fork"'
    )
