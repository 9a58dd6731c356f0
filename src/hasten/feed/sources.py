"""Where host batches come from when no thread or process of ours is involved."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from hasten.errors import DataError
from hasten.feed import randomness
from hasten.feed.compare import identical
from hasten.feed.describe import NOTHING_IN_BATCH
from hasten.feed.keys import WORKERS, Indices, mix
from hasten.feed.one_stream import OneStream
from hasten.feed.order import Order, OwnOrder
from hasten.feed.position import check_reached
from hasten.feed.relay import Relay
from hasten.feed.samples import Maker
from hasten.feed.tables import Resident, Table

Item = tuple[int, Any, Any]
"""(number of the batch in its epoch from 0, the batch, its indices or None for a stream)."""

Clock = Callable[[], float]

_LARGE_BYTES = 1 << 18
_SHORTEST, _LONGEST = 8, 1 << 12  # batches by one thread, after several have waited
_TRUSTED = 64  # batches by several that went well, after which that is halved
_SLOWER = 2.0  # a copy by several threads that takes so much longer than by one has waited
# Threads that had nothing to do for so long sleep, and take up to so long to wake: no wait for a
# core. Counted as that, each trial after some batches by one thread failed, for minutes on end.
_AWAKE_S, _WAKING_S = 0.005, 0.0005

Report = Callable[[Any, str], None]
"""Called with (index, message) for each skipped sample."""


class Source(Protocol):
    """Batches of one epoch after another. Closing the iterator ends what it started."""

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """The batches of an epoch from number `first` on."""

    def close(self) -> None:
        """End what lasts from epoch to epoch."""


class Gather:
    """One indexed copy a column, made by the thread that asks, into fresh memory.

    No hand-over to another thread: it costs more than the copy. Nor do PyTorch's threads make
    it, unless batches are large: when another thread wants their core, one of them waits for a
    time slice (some ms) at each of a thousand copies. So a large batch is copied by them only
    while that is seen to be faster (docs/notes/001).
    """

    def __init__(
        self,
        table: Table,
        order: Order,
        *,
        pin: bool,
        clock: Clock = time.perf_counter,
        maker: Maker | None = None,
    ) -> None:
        """`maker`, where the table was found by reading code: a sample of each batch of the first
        epoch is made in the ordinary way too, and compared.
        """
        self._table = table
        self._order = order
        self._pin = pin
        self._clock = clock
        self._unchecked = maker
        self._alone_s = 0.0  # what one thread takes for a batch
        self._together_s = 0.0  # when several threads have last made one
        self._rest = 0  # batches that one thread still makes
        self._stay = _SHORTEST  # batches that it makes after the next time that several wait
        self._good = 0
        self.unfit = ""

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        take = self._table.batch
        numbered = enumerate(self._rows(epoch, first), first)
        if self._unchecked is not None:
            yield from self._checked(self._unchecked, epoch, numbered)
            return
        if self._pin:
            for number, indices in numbered:
                yield number, take(indices, pin=True), indices
            return
        yield from self._large(numbered)
        for number, indices in numbered:
            yield number, take(indices), indices

    def _checked(
        self, maker: Maker, epoch: int, numbered: Iterator[tuple[int, Indices]]
    ) -> Generator[Item, None, None]:
        """The first epoch. Where a sample differs, its batch is made in the ordinary way."""
        for number, indices in numbered:
            one = indices[number % len(indices) :][:1]
            expected = maker.make(epoch, number, one.tolist()).batch
            if maker.uses or not identical(expected, self._table.batch(one)):
                self.unfit = f"sample {one[0]} is not what indexing the tensors gives"
                yield number, maker.make(epoch, number, indices.tolist()).batch, indices
                return
            yield number, self._table.batch(indices, pin=self._pin), indices
        self._unchecked = None

    def _rows(self, epoch: int, first: int) -> Iterator[Indices]:
        if _own(self._order) is not None:
            return self._order.batches(epoch, first)
        rows = self._table.rows
        return (as_rows(indices, rows) for indices in self._order.batches(epoch, first))

    def _large(self, numbered: Iterator[tuple[int, Indices]]) -> Generator[Item, None, None]:
        """Large batches: by several threads, and by one for a while after they had to wait.

        Each time they have to wait, twice as long; that is remembered from epoch to epoch, so a
        machine that others use costs a few time slices in all, and a free one loses little to an
        accident.
        """
        table, clock = self._table, self._clock
        if not table.one_part or torch.get_num_threads() == 1:
            return
        for number, indices in numbered:
            if len(indices) * table.row_bytes < _LARGE_BYTES:
                yield number, table.batch(indices), indices
                return
            together = self._alone_s > 0 and self._rest == 0
            begin = clock()
            woken = together and begin - self._together_s > _AWAKE_S
            batch = table.batch_in_parallel(indices) if together else table.batch(indices)
            ended = clock()
            took_s = ended - begin - (_WAKING_S if woken else 0.0)
            self._together_s = ended if together else self._together_s
            yield number, batch, indices
            del batch
            if not together:
                self._alone_s = min(took_s, 1.1 * self._alone_s or took_s)
                self._rest = max(0, self._rest - 1)
            elif took_s > _SLOWER * self._alone_s:
                self._rest, self._stay, self._good = self._stay, min(2 * self._stay, _LONGEST), 0
            else:
                self._good += 1
                if self._good % _TRUSTED == 0:
                    self._stay = max(_SHORTEST, self._stay // 2)

    def close(self) -> None:
        """See `Source`."""


class OnDevice:
    """The plan `resident`: shuffling is an index on the device, where the data set is.

    It is copied there once, or for each epoch where what is written to it leaves no trace.
    """

    def __init__(self, table: Table, order: Order, device: torch.device) -> None:
        self._table = table
        self._order = order
        self._device = device
        self._resident: Resident | None = None

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        last = self._resident.source if self._resident is not None else None
        if self._resident is None or self._table.traceless or last != self._table.versions():
            self._resident = None  # its memory is free before the new copy is made
            self._resident = self._table.on(self._device)
        take, number, own = self._resident.batch, first, _own(self._order)
        if own is not None:
            on_device = torch.from_numpy(own.indices(epoch)).to(self._device)
            size = own.batch_size
            # The order is drawn from all the same: it knows by that when the epoch is over.
            for number, indices in enumerate(self._order.batches(epoch, first), first):
                part = slice(number * size, (number + 1) * size)
                yield number, take(own.shard.part(on_device[part])), indices
            return
        for indices in self._order.batches(epoch, first):
            rows = as_rows(indices, self._table.rows)
            yield number, take(torch.from_numpy(rows).to(self._device)), rows
            number += 1

    def close(self) -> None:
        """See `Source`."""
        self._resident = None


class Inline:
    """Sample by sample, when asked."""

    def __init__(self, maker: Maker, order: Order | None, report: Report) -> None:
        """`order` may be None where only `made` is asked for."""
        self._maker = maker
        self._order = order
        self._report = report

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        assert self._order is not None
        return self.made(epoch, enumerate(self._order.batches(epoch, first), first))

    def made(self, epoch: int, numbered: Iterable[tuple[int, Any]]) -> Generator[Item, None, None]:
        """Batches of these (number, indices)."""
        for number, indices in numbered:
            made = self._maker.make(epoch, number, indices)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield number, made.batch, indices if made.kept is None else made.kept

    def close(self) -> None:
        """See `Source`."""


class Stream:
    """An IterableDataset read by the thread that asks; resumed by reading and dropping samples.

    The global generators are seeded by (seed, epoch) for it, and put back after each batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        batch_size: int | None,
        *,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn or (default_convert if batch_size is None else default_collate)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._seed = seed

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        outside, inside = randomness.image(), None
        read: Iterator[Item] | None = None
        while True:
            try:
                if read is None or inside is None:
                    randomness.seed(mix(self._seed, epoch, WORKERS, 0))  # as worker 0 of 1
                    read = self._read(first)
                else:
                    randomness.put(inside)
                item = next(read, None)
                inside = randomness.image()
            finally:
                randomness.put(outside)
            if item is None:
                return
            yield item
            del item
            outside = randomness.image()

    def _read(self, first: int) -> Iterator[Item]:
        """The batches from `first` on; those before are put together only where that may draw."""
        size, number, whole = self._batch_size or 1, 0, True
        stream = OneStream(self._dataset, f"the stream {type(self._dataset).__name__}")
        alone = self._batch_size is None
        while whole:
            samples = stream.next(size)
            whole = len(samples) == size
            if samples and (whole or not self._drop_last):
                if number >= first:
                    yield number, stream.collated(self._collate, samples, alone=alone), None
                elif self._collate not in (default_collate, default_convert):
                    stream.collated(self._collate, samples, alone=alone)
                number += 1
            del samples
        check_reached(first, number, self._dataset)

    def close(self) -> None:
        """See `Source`."""


def _own(order: Order) -> OwnOrder | None:
    """Hasten's own order, which gives row numbers; None for one of the user's."""
    if isinstance(order, OwnOrder):
        return order
    return order.own if isinstance(order, Relay) else None


def as_rows(indices: Any, rows: int) -> Indices:
    """What a sampler gave, as row numbers; negative ones count from the end, as in the tensors."""
    found = np.asarray(indices)
    if not found.size:
        raise DataError(NOTHING_IN_BATCH)
    if found.dtype.kind not in "iu":
        raise DataError(
            f"the sampler gave {indices!r}, where whole numbers below {rows} were expected: the "
            "data set is tensors, which those alone can index"
        )
    found = found.astype(np.int64, copy=False)
    if found.ndim != 1:
        raise DataError(f"the sampler gave {indices!r}, where a list of indices was expected")
    least = np.minimum.reduce(found)  # half of what the method takes
    if not (-rows <= least and np.maximum.reduce(found) < rows):
        raise DataError(f"the sampler gave an index beyond the {rows} samples: {indices!r}")
    return found.copy() if least >= 0 else np.where(found < 0, found + rows, found)
