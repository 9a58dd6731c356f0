"""Streams in worker processes: each reads its part, and the pieces are given in turn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from hasten.errors import DataError
from hasten.feed.compare import identical
from hasten.feed.jobs import MOST_DEATHS, UNBOUND, Bound, received
from hasten.feed.pool import DiedError, Pool
from hasten.feed.work import Piece

_log = logging.getLogger("hasten.feed")


class Share:
    """What the readers of one pool may have under way together.

    Attributes:
        under_way: batches that were asked for and have not come.
    """

    def __init__(self, pool: Pool, each: int, bound: Bound = UNBOUND) -> None:
        self._pool = pool
        self._each = each
        self._bound = bound
        self.under_way = 0

    def has_room_for(self, has: int) -> bool:
        """Whether one that has so many under way may ask for another."""
        most = self._bound.most(self._pool, self._each)
        return self.under_way < most and has < max(1, most // len(self._pool))


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
        share: Share | None = None,
    ) -> None:
        """Its worker begins at once, where there is room.

        Args:
            pool: of processes that read the stream.
            worker: its number there.
            epoch: to read.
            each: most batches that it is asked for ahead.
            timeout_s: longest wait for one; 0 for ever.
            fresh: what it gives follows from the seed and this epoch, so another can read on.
            share: of all readers; None where nothing but `each` bounds what is under way.
        """
        self._fresh = fresh
        self._share = share or Share(pool, each)
        self._unanswered = 0
        self._begun = False
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
        self.fill()

    def fill(self) -> None:
        """Ask for as many batches as it may have under way."""
        while self._unanswered < self._asked and self._share.has_room_for(self._unanswered):
            self._ask()

    def _ask(self) -> None:
        self._count(1)
        self._pool.send(self.worker, None if self._begun else (self._epoch, self.given))
        self._begun = True

    def _count(self, more: int) -> None:
        self._unanswered += more
        self._share.under_way += more

    def _answer(self) -> Piece:
        if not self._unanswered:
            self._ask()
        piece: Piece = received(self._pool, self.worker, self._timeout_s)
        self._count(-1)
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
                if self._deaths >= MOST_DEATHS:
                    raise DataError(
                        f"{died}. It was the {self._deaths}rd to die at its batch {self.given}"
                    ) from died
                _log.warning("%s. A new one reads its part again up to there", died)
                self._pool.replace(self.worker)
                self._asked = 1  # so that the next death is known to be of that batch
                self._count(-self._unanswered)
                self._begun = False
                continue
            self._deaths = 0
            self.shared = piece.shared
            if piece.ended:
                self.drain()
                return piece
            if piece.failure is None:
                self.given += 1
                self.samples += piece.samples
            return piece

    def drain(self) -> None:
        """Take the answers that nobody waits for any more: the worker may go on later."""
        try:
            while self._unanswered:
                self._answer()
        except DiedError as died:
            self._count(-self._unanswered)
            _log.warning("%s. Nothing more was wanted of it", died)
            self._pool.replace(self.worker)


def in_turn(readers: Sequence[Reader]) -> Generator[Piece | None, None, None]:
    """The pieces of all, one of each in turn as long as it has any; None after the last."""
    active = deque(readers)
    while active:
        reader = active[0]
        piece = reader.next()
        if piece.failure is not None:
            piece.failure.throw()
        if piece.ended:
            active.popleft()
            continue
        active.rotate(-1)
        for following in active:  # what there is room for is that of the one whose turn is next
            following.fill()
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
