"""Cutting other loaders than hasten's own among processes: slices of the batches of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hasten.errors import DataError, UsageError
from hasten.feed.order import Shard

_STREAM = (
    "the stream {0} would give each of the {1} processes all samples, for its own code alone can"
    " share them out: give a data set with __getitem__ and __len__, or train with one process"
)
_OTHER = (
    "a {0} cannot be shared out among {1} processes: give a hasten.Loader or a DataLoader of a"
    " data set with __getitem__ and __len__, or a list of batches"
)


class Slices:
    """A loader's batches, of each this process's slice.

    Attributes:
        loader: a DataLoader of those slices alone; or what was given, whose batches are cut.
        shares: of the batch at each position of the epoch under way, the samples of this process
            and of all.
    """

    def __init__(self, loader: Iterable[Any], shard: Shard) -> None:
        self.shares: dict[int, tuple[int, int]] = {}
        self._shard = shard
        self.loader = self._cut(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader) if isinstance(self.loader, DataLoader) else self._rows(self.loader)

    def _cut(self, loader: Any) -> Any:
        if isinstance(loader, (list, tuple)):
            return loader
        if not isinstance(loader, DataLoader):
            raise UsageError(_OTHER.format(type(loader).__name__, self._shard.of))
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError(_STREAM.format(type(loader.dataset).__name__, self._shard.of))
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if loader.batch_sampler is None:
            raise UsageError("batch_size=None makes no batches that processes could share out")
        if isinstance(inner, DistributedSampler):
            raise UsageError(
                "the DataLoader has a DistributedSampler, and hasten shares out the batches itself:"
                " leave the sampler out (shuffle=True), and give the batch size of all processes"
            )
        cut = copy.copy(loader)
        # By the dictionary: a DataLoader refuses that its sampler be set later.
        cut.__dict__["batch_sampler"] = _SlicedSampler(loader.batch_sampler, self)
        cut.__dict__["_iterator"] = None
        return cut

    def _rows(self, batches: Iterable[Any]) -> Iterator[Any]:
        self.shares.clear()
        for number, batch in enumerate(batches):
            size = rows_in(batch)
            yield rows(batch, *self.take(number, size))

    def take(self, number: int, size: int) -> tuple[int, int]:
        """Note the size of a batch; where this process's rows of it begin and end."""
        start, end = self._shard.bounds(size)
        self.shares[number] = (end - start, size)
        return (start, end) if end > start else (0, 1)


class _SlicedSampler:
    """A batch sampler's batches, of each this process's slice."""

    def __init__(self, given: Any, slices: Slices) -> None:
        self._given, self._slices = given, slices

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[list[Any]]:
        # It begins here, as in one process: some samplers draw now, and the loader draws next.
        return self._slices_of(iter(self._given))

    def _slices_of(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        self._slices.shares.clear()
        # At once: a sampler that draws while it goes on would draw from this process's own
        # generators, which are not those of the others.
        for number, batch in enumerate(list(batches)):
            start, end = self._slices.take(number, len(batch))
            yield batch[start:end]


def rows_in(batch: Any) -> int:
    """Rows of the first tensor in a nest.

    Raises:
        DataError: it has none.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch.shape[0]
    if isinstance(batch, (tuple, list)) and batch:
        return rows_in(batch[0])
    if isinstance(batch, Mapping) and batch:
        return rows_in(next(iter(batch.values())))
    raise DataError(f"a batch with a {type(batch).__name__} cannot be cut into rows")


def rows(batch: Any, start: int, end: int) -> Any:
    """Rows of every tensor in a nest of tuples, lists and mappings.

    Raises:
        DataError: something in it has no rows.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch[start:end]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows(item, start, end) for item in batch))
    if isinstance(batch, (tuple, list)):
        if batch and isinstance(batch[0], (str, bytes)):
            return batch[start:end]
        return type(batch)(rows(item, start, end) for item in batch)
    if isinstance(batch, Mapping):
        return {name: rows(item, start, end) for name, item in batch.items()}
    raise DataError(f"a batch with a {type(batch).__name__} cannot be cut into rows")
