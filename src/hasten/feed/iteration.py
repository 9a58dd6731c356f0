"""One iteration of a DataLoader that was taken over, and its indices as they are drawn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.errors import DataError
from hasten.feed.draws import Draws, LateOrder
from hasten.feed.sources import Item, as_rows
from hasten.feed.tables import Table

Items = Generator[Item, None, None]


@dataclass
class Epoch:
    """An iteration of a DataLoader that was taken over.

    Attributes:
        start: the states of the generators as it began, and whether the workers of the epoch
            before went on.
        seen: of the indices given, where others may be given next time.
        base: of the seeds of its workers.
        after: of each worker that has drawn, its generators after the last batch given.
        before: the same before the first batch.
    """

    start: dict[str, Any]
    seen: Any
    base: int = 0
    after: dict[int, dict[str, Any]] = field(default_factory=dict)
    before: dict[int, dict[str, Any]] = field(default_factory=dict)

    def note(self, indices: Any) -> None:
        """A batch of these indices was given: kept in mind where they may be others next time."""
        if self.seen is not None:
            self.seen.update(repr(indices).encode())

    @property
    def digest(self) -> str:
        """Of all that was noted."""
        return "" if self.seen is None else self.seen.hexdigest()

    @property
    def workers(self) -> dict[str, Any]:
        """Where the workers are, for a checkpoint."""
        return {"base": self.base, "after": kept(self.after)}


class Direct(LateOrder):
    """Of a DataLoader without workers: drawn when it is asked for."""

    def __init__(self, draws: Draws, epoch: Epoch, wanted: Any = None) -> None:
        self._draws = draws
        self._epoch = epoch
        self._wanted = wanted  # drawn already

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        if self._wanted is not None:
            self._epoch.note(self._wanted)
            yield self._wanted
        for indices in _rest(self._draws):
            self._epoch.note(indices)
            yield indices


class Heeded(LateOrder):
    """Another order, as long as what its indices stand for is in a table still.

    Attributes:
        given: batches.
        left: the indices of the first batch that is not in the table; None where all were.
    """

    def __init__(self, order: LateOrder, table: Table, *, copied: bool) -> None:
        """`copied`: the table is indexed in a copy of it, which does not see what is written."""
        self._order = order
        self._table = table
        self._written = table.versions() if copied else None
        self.given = 0
        self.left: Any = None

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        for indices in self._order.batches(epoch, first):
            if not self._in_table(indices):
                self.left = indices
                return
            self.given += 1
            yield indices

    def _in_table(self, indices: Any) -> bool:
        if self._written is not None and self._written != self._table.versions():
            return False
        try:
            rows = as_rows(indices, self._table.rows)
        except DataError:  # no rows of a table: the data set says itself what it makes of them
            return False
        return self._table.holds_for(rows)


def unwritten(items: Generator[Item, None, None], table: Table, written: Any, kept: int) -> Items:
    """The same batches, of a table that `kept` worker processes would have copies of.

    Args:
        written: its `versions` as they got them, of what is not shared with them.

    Raises:
        DataError: it was written to since, which they would not see.
    """
    try:
        for item in items:
            if table.versions(shared=False) != written:
                raise DataError(
                    f"the tensors of the data set were written to, which the {kept} worker "
                    "processes of the DataLoader, each with a copy, would not have seen yet: give "
                    'plan="processes", which has such copies'
                )
            yield item
            del item
    finally:
        items.close()


class Known(LateOrder):
    """Of a DataLoader with workers: as far as it is drawn."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        while self._draws.known:
            yield self._draws.known.popleft()


class Now(LateOrder):
    """That of the epoch which begins now: for what lasts over epochs."""

    order: LateOrder

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        return self.order.batches(epoch, first)


def _rest(draws: Draws) -> Iterator[Any]:
    while True:
        try:
            indices = next(draws)
        except StopIteration:
            return
        yield indices


def kept(value: Any) -> Any:
    """Packed states for a checkpoint, which takes tensors and no bytes."""
    if isinstance(value, dict):
        return {key: kept(part) for key, part in value.items()}
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value


def back(value: Any) -> Any:
    """What `_kept` was given."""
    if isinstance(value, dict):
        return {key: back(part) for key, part in value.items()}
    return bytes(value.cpu().numpy()) if isinstance(value, torch.Tensor) else value
