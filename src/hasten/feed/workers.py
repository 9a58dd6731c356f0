"""The plan `processes`: batches from worker processes, which are replaced when they die."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from hasten.errors import DataError, UsageError
from hasten.feed.compare import identical
from hasten.feed.fingerprint import fingerprint
from hasten.feed.keys import workers_generator
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.pool import DiedError, Pool, Work
from hasten.feed.samples import Maker, short
from hasten.feed.sources import Inline, Item, Report
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
        self._content: bytes | None = None  # of the data set that the lasting workers have

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        if self._lasting is not None and self._plan.kept and self._content != self._seen():
            self.close()
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
            kept = self._options.persistent_workers or self._content is not None
            if whole and kept and self._lasting is None:
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

    def _seen(self) -> bytes | None:
        return fingerprint(self._options.dataset, self._options.collate_fn)

    def _started(self, epoch: int) -> Pool:
        options, workers = self._options, self._plan.workers
        self._content = self._seen() if self._plan.kept else None
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
        return start_pool(options, workers, work, self._each, self._plan.niceness)

    def _made(
        self, pool: Pool, order: Order, epoch: int, first: int
    ) -> Generator[Item, None, None]:
        jobs = Jobs(pool, self._each, self._options.timeout)
        numbered = enumerate(order.batches(epoch, first), first)
        head = list(islice(numbered, self._plan.head_batches))
        jobs.fill(numbered, lambda number, indices: (epoch, number, indices))
        # The workers are at those behind the head by now.
        yield from Inline(self._maker, None, self._report).made(epoch, head)
        while len(jobs):
            indices, made = jobs.next()
            # Before the batch is given: workers are to work while the loop does.
            jobs.fill(numbered, lambda number, indices: (epoch, number, indices))
            if made.failure is not None:
                raise_failure(made.failure)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield made.number, made.batch, indices if made.kept is None else made.kept
            del made  # else the loop's batch lives on while the next one is waited for

    def _stream(self, pool: Pool, epoch: int, first: int) -> Generator[Item, None, None]:
        options = self._options
        readers = [
            Reader(pool, worker, epoch, self._each, options.timeout) for worker in range(len(pool))
        ]
        for number, piece in enumerate(in_turn(readers)):
            said = repeats(options.dataset, readers, piece)
            if said:
                raise DataError(said)
            if piece is not None and number >= first:
                yield number, piece.batch, None
            del piece


class Jobs:
    """Batches that workers are making, in order; given to the workers in turn."""

    def __init__(
        self,
        pool: Pool,
        each: int,
        timeout_s: float,
        *,
        again: Callable[[int, Any], Any] | None = None,
    ) -> None:
        """Nothing is under way yet.

        Args:
            pool: who makes them.
            each: most jobs of a worker.
            timeout_s: longest wait for a batch; 0 for ever.
            again: what a new worker is sent in place of the job (of the worker's number, and the
                job) that it is to begin with; the same where not given.
        """
        self._again = again
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

    def __len__(self) -> int:
        """Batches under way."""
        return len(self._waiting)

    def add(self, number: int, indices: Any, job: Any, *, worker: int | None = None) -> None:
        """Send the job of a batch, to the next worker in turn or the one named."""
        if worker is None:
            worker, self._turn = self._turn, (self._turn + 1) % len(self._pool)
        self._waiting.append((number, indices, job, worker))
        if worker in self._held:
            self._held[worker].append(job)
        else:
            self._pool.send(worker, job)

    def fill(self, numbered: Iterator[tuple[int, Any]], job_of: Callable[[int, Any], Any]) -> None:
        """Give the workers as much to do as they may have."""
        while not self.full:
            number, indices = next(numbered, (-1, None))
            if number < 0:
                return
            self.add(number, indices, job_of(number, indices))

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
                begin = again.popleft()
                self._pool.send(worker, self._again(worker, begin) if self._again else begin)
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


class Reader:
    """One worker's part of a stream.

    Attributes:
        given: batches that it gave in this epoch; `samples`: in them.
        shared: see `Piece`.
        first_batch: kept of worker 0, to compare those of others with.
    """

    def __init__(
        self,
        pool: Pool,
        worker: int,
        epoch: int,
        each: int,
        timeout_s: float,
        *,
        fresh: bool = True,
    ) -> None:
        """`fresh`: what it gives follows from the seed and this epoch, so another can read on."""
        self._fresh = fresh
        self._unanswered = 0
        self.worker = worker
        self.given = 0
        self.samples = 0
        self.shared = False
        self.first_batch: Any = None
        self._pool = pool
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._deaths = 0
        self._asked = each
        self._begin()

    def _begin(self) -> None:
        self._unanswered = 0
        self._ask((self._epoch, self.given))
        for _ in range(self._asked - 1):
            self._ask(None)

    def _ask(self, job: Any) -> None:
        self._unanswered += 1
        self._pool.send(self.worker, job)

    def _answer(self) -> Piece:
        piece: Piece = received(self._pool, self.worker, self._timeout_s)
        self._unanswered -= 1
        return piece

    def next(self) -> Piece:
        """Its next batch, or the end."""
        while True:
            try:
                piece = self._answer()
            except DiedError as died:
                if not self._fresh:
                    raise DataError(
                        f"{died}. What it gave followed from what it gave in the epochs before "
                        "(persistent_workers), so no other can go on for it: begin the epoch anew"
                    ) from died
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
                self.drain()
                return piece
            if piece.failure is None:
                self.given += 1
                self.samples += piece.samples
                self._ask(None)
            return piece

    def drain(self) -> None:
        """Take the answers that nobody waits for any more: the worker may go on later."""
        try:
            while self._unanswered:
                self._answer()
        except DiedError as died:
            self._unanswered = 0
            _log.warning("%s. Nothing more was wanted of it", died)
            self._pool.replace(self.worker)


def in_turn(readers: Sequence[Reader]) -> Generator[Piece | None, None, None]:
    """The pieces of all, one of each in turn as long as it has any; None after the last."""
    active = list(readers)
    while active:
        for reader in list(active):
            piece = reader.next()
            if piece.failure is not None:
                raise_failure(piece.failure)
            if piece.ended:
                active.remove(reader)
                continue
            if reader.given == 1 and reader.worker == 0 and len(readers) > 1:
                reader.first_batch = piece.batch
            yield piece
            del piece
    yield None


def repeats(dataset: Any, readers: Sequence[Reader], piece: Piece | None) -> str:
    """What to say where each worker gives the whole of a stream; '' as long as that is not seen.

    Args:
        dataset: the stream.
        readers: of its copies.
        piece: that one of them has just given; None at the end of the epoch.
    """
    first, seen = readers[0], ""
    if len(readers) == 1 or any(reader.shared for reader in readers):
        return ""
    if piece is None:
        count = len(dataset) if hasattr(dataset, "__len__") else 0
        if count and all(reader.samples == count for reader in readers):
            seen = f"each gave {count:,} samples, which is what its len says of all"
    elif readers[1].given == 1 and first.first_batch is not None:
        if identical(first.first_batch, piece.batch):
            seen = "workers 0 and 1 began with the same batch"
        first.first_batch = None
    if not seen:
        return ""
    return (
        f"the stream {type(dataset).__name__} gives the whole of its samples in each of the "
        f"{len(readers)} workers ({seen}): in __iter__, give each its part by the id and "
        "num_workers of torch.utils.data.get_worker_info(), or use num_workers=1"
    )


def start_pool(options: Options, workers: int, work: Work, each: int, niceness: int = 0) -> Pool:
    """Worker processes, as the options want them started.

    Raises:
        UsageError: the data set cannot be sent to them.
    """
    context = options.multiprocessing_context
    try:
        return Pool(workers, work, context=context, jobs_each=each, niceness=niceness)
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
