"""Jobs that worker processes were given: their replies in order, and new workers for dead ones."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hasten.errors import DataError
from hasten.feed.blame import short
from hasten.feed.describe import late
from hasten.feed.pool import DiedError, LateError, Pool
from hasten.feed.resting import Rest

_log = logging.getLogger("hasten.feed")

_SEARCH_S = 30.0  # for the one sample that workers die of

MOST_DEATHS = 3
"""Workers that may die at one batch, before it is held to be the batch's fault."""


@dataclass(frozen=True)
class Bound:
    """On the bytes of batches that are made ahead of the loop.

    Attributes:
        most_bytes: of all of them; 0 for any number of bytes.
        batch_bytes: of one, as far as is known before any came; 0 where nothing is.
    """

    most_bytes: int = 0
    batch_bytes: int = 0

    def most(self, pool: Pool, each: int) -> int:
        """Jobs that its workers may have at once, of `each` at most; as long as nothing is known
        of their size, one for each worker."""
        count, size = each * len(pool), pool.reply_bytes or self.batch_bytes
        if not self.most_bytes:
            return count
        return max(1, min(count, self.most_bytes // size)) if size else len(pool)


UNBOUND = Bound()


class Jobs:
    """Batches that workers are making, in order; given to the workers in turn."""

    def __init__(
        self,
        pool: Pool,
        each: int,
        timeout_s: float,
        *,
        bound: Bound = UNBOUND,
        again: Callable[[int, Any], Any] | None = None,
        alone: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Nothing is under way yet.

        Args:
            pool: who makes them.
            each: most jobs of a worker.
            timeout_s: longest wait for a batch; 0 for ever.
            bound: on what may be under way.
            again: what a new worker is sent in place of the job (of the worker's number, and the
                job) that it is to begin with; the same where not given.
            alone: the job of making one sample of a job (the job, and the index), to find the
                sample that workers die of; None where that cannot be asked for.
        """
        self._alone = alone
        self._again = again
        self._pool = pool
        self._each = each
        self._timeout_s = timeout_s
        self._bound = bound
        self._waiting: deque[tuple[int, Any, Any, int]] = deque()
        self._held: dict[int, deque[Any]] = {}  # of workers that were replaced: jobs not sent yet
        self._turn = 0
        self._deaths = 0
        self._rest = Rest(len(pool))

    @property
    def full(self) -> bool:
        """No worker may be sent more."""
        return len(self._waiting) >= self._bound.most(self._pool, self._each)

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

    def drop(self) -> None:
        """Take what is under way, of an epoch that was left, and drop it.

        Raises:
            DataError: see `next`.
        """
        while self._waiting:
            self.next()

    def next(self) -> tuple[Any, Any]:
        """(indices, reply) of the oldest batch.

        Raises:
            DataError: it did not come in time, or worker after worker died of it.
        """
        while True:
            number, indices, job, worker = self._waiting[0]
            try:
                reply = received(self._pool, worker, self._timeout_s, self._rest)
            except DiedError as died:
                self._deaths += 1
                if self._deaths >= MOST_DEATHS and died.imported:
                    raise DataError(f"{died}. So did {self._deaths - 1} before it") from died
                if self._deaths >= MOST_DEATHS:
                    raise DataError(
                        f"{died}. It was the {self._deaths}rd to die at batch {number} of the "
                        f"epoch, of the samples {short(as_list(indices))}: look at "
                        f"{self._culprit(worker, job, as_list(indices))}"
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

    def _culprit(self, worker: int, job: Any, indices: list[Any]) -> str:
        """What to look at: the sample that a worker dies of alone, where there is one."""
        limit = time.monotonic() + _SEARCH_S
        if self._alone is None or len(indices) == 1:
            return "those"
        self._pool.replace(worker)
        for index in indices:
            self._pool.send(worker, self._alone(job, index))
            try:
                self._pool.receive(worker, max(0.0, limit - time.monotonic()))
            except DiedError:
                return f"sample {index!r}, of which alone a worker dies too"
            except LateError:
                break
        return "those"

    def _send_held(self, worker: int) -> None:
        held = self._held.get(worker)
        if held:
            self._pool.send(worker, held.popleft())
        elif held is not None:
            del self._held[worker]


def received(pool: Pool, worker: int, timeout_s: float, rest: Rest | None = None) -> Any:
    """A worker's next reply. `rest`: what to do where it has to be waited for.

    Raises:
        DiedError: see `Pool.receive`.
        DataError: it did not come in time.
    """
    try:
        if rest is not None:
            with suppress(LateError):
                return pool.receive(worker, 0.0)
            return rest.during(lambda: pool.receive(worker, timeout_s or None))
        return pool.receive(worker, timeout_s or None)
    except LateError as error:
        raise DataError(late("worker processes", timeout_s)) from error


def as_list(indices: Any) -> list[Any]:
    """The indices of a batch, or the one of a sample, for a message."""
    listed = indices.tolist() if hasattr(indices, "tolist") else indices
    return listed if isinstance(listed, list) else [listed]
