"""What a Loader can be asked about itself, under the names and with the values of DataLoader's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler, default_collate, default_convert

from hasten.feed.options import Options
from hasten.feed.order import GivenOrder, Order, OwnOrder, OwnSampler
from hasten.feed.taken import TakenOrder


class Attributes:
    """Read by loops and libraries that were written for a DataLoader (`len(loader.sampler)`)."""

    _options: Options
    _order: Order | None
    _epoch: int

    @property
    def dataset(self) -> Any:
        """The data set given."""
        return self._options.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples a batch; None with a batch_sampler or without batching, as in DataLoader."""
        return None if self._options.batch_sampler is not None else self._options.batch_size

    @property
    def drop_last(self) -> bool:
        """As given."""
        return bool(self._options.drop_last)

    @property
    def sampler(self) -> Any:
        """As given; else one that gives the indices of the next epoch. None for a stream."""
        if isinstance(self._order, TakenOrder):
            return self._order.original.sampler
        if isinstance(self._order, OwnOrder):
            if not self._order.shuffle:
                return SequentialSampler(self.dataset)
            return OwnSampler(self._order, self._epoch)
        if self._options.batch_sampler is not None:
            return SequentialSampler(self.dataset)  # as a DataLoader has one, which is not used
        return self._order.sampler if isinstance(self._order, GivenOrder) else None

    @property
    def batch_sampler(self) -> Any:
        """As given; else one that gives the batches of `sampler`. None where nothing is batched."""
        if isinstance(self._order, TakenOrder):
            return self._order.original.batch_sampler
        if self._options.batch_sampler is not None or self._order is None:
            return self._options.batch_sampler
        size = self._options.batch_size
        return None if size is None else BatchSampler(self.sampler, size, self.drop_last)

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """As given, or PyTorch's default."""
        usual = default_collate if self._options.batched else default_convert
        return self._options.collate_fn or usual

    @property
    def generator(self) -> torch.Generator | None:
        """As given."""
        if isinstance(self._order, TakenOrder):
            found: torch.Generator | None = self._order.original.generator
            return found
        return self._options.generator

    @property
    def timeout(self) -> float:
        """As given, in seconds."""
        return self._options.timeout

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """As given."""
        return self._options.worker_init_fn

    @property
    def multiprocessing_context(self) -> Any:
        """As given."""
        return self._options.multiprocessing_context

    @property
    def prefetch_factor(self) -> int | None:
        """As given."""
        return self._options.prefetch_factor

    @property
    def persistent_workers(self) -> bool:
        """Whether it was asked for."""
        return bool(self._options.persistent_workers)

    @property
    def pin_memory(self) -> bool:
        """Whether it was asked for."""
        return self._options.pin_memory is True

    @property
    def pin_memory_device(self) -> str:
        """As given."""
        return self._options.pin_memory_device

    @property
    def in_order(self) -> bool:
        """As given."""
        return bool(self._options.in_order)

    @property
    def seed(self) -> int:
        """Of the order and of the samples' randomness."""
        return self._options.seed
