"""Whole tensors in memory, batched by one indexed copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hasten.feed.buffers import Array, array, read_only, tensor_of
from hasten.feed.columns import Layout
from hasten.feed.keys import Indices
from hasten.feed.modes import one_thread

_TOGETHER = 1 << 15  # numbers, of more of which PyTorch computes by several threads

Holds = Callable[[Indices | None], bool]
"""Whether a data set is made of what it was made of: as far as these samples go, or (of None) all,
with every number of its lists."""


class Table:
    """Columns in one or several parts, and the order of their rows.

    Attributes:
        rows: samples in it.
        row_bytes: bytes of one sample, all columns.
        layout: what samples are made of the columns; None where they are tuples of them.
    """

    def __init__(
        self,
        parts: list[list[torch.Tensor]],
        order: Indices | None = None,
        *,
        layout: Layout | None = None,
        holds: Holds = lambda rows: True,
    ) -> None:
        """Columns [N, …] of each part.

        Args:
            order: int64 [rows], row numbers over all parts one after the other; None for all.
            holds: see `holds`.
        """
        self.layout = layout
        self._holds = holds
        self._parts = parts
        self._order = order
        self._arrays = [
            [read_only(c) if c.is_contiguous() else None for c in part] for part in parts
        ]
        self._starts = np.cumsum([0] + [len(part[0]) for part in parts])
        self.rows = int(self._starts[-1]) if order is None else len(order)
        self.row_bytes = sum(t[:1].numel() * t.element_size() for t in parts[0])
        self._memory = self._places()

    def holds(self) -> bool:
        """Whether the data set is still made of these tensors and lists, in this order."""
        return self._holds(None) and self._memory == self._places()

    def holds_for(self, indices: Indices) -> bool:
        """Whether it is, as far as these samples go and without a look at the whole of a list."""
        return self._holds(indices) and self._memory == self._places()

    def _places(self) -> list[tuple[Any, ...]]:
        """What a tensor can be given in place: other memory, another shape, gradients."""
        return [
            (t.data_ptr(), t.shape, t.stride(), t.requires_grad)
            for part in self._parts
            for t in part
        ]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all the tensors below, whether their rows are used or not."""
        return sum(t.numel() * t.element_size() for part in self._parts for t in part)

    @property
    def traceless(self) -> bool:
        """Whether some of it can be written to without a version that counts it: it lies in memory
        that is not PyTorch's alone (an array's, or one that processes share), or was made under
        `torch.inference_mode()`."""
        every = [t for part in self._parts for t in part]
        return any(t.is_inference() or not t.untyped_storage().resizable() for t in every)

    @property
    def exact(self) -> bool:
        """Nothing is computed of the rows: a batch is the same on every device."""
        return self.layout is None or self.layout.exact

    def batch(self, indices: Indices, *, pin: bool = False) -> Any:
        """The samples at int64 [B] indices, as the default collate function puts them together.

        One thread copies and computes: see `Gather`.
        """
        taken = self.take(indices, pin=pin)
        if self.layout is None:
            return taken
        if self.layout.exact or max(map(torch.numel, taken)) <= _TOGETHER:
            return self.layout.collated(taken)
        with one_thread():
            return self.layout.collated(taken)

    def batch_in_parallel(self, indices: Indices) -> Any:
        """What `batch` gives, by PyTorch's threads; for a table of one part."""
        taken = self.take_in_parallel(indices)
        return taken if self.layout is None else self.layout.collated(taken)

    def take(self, indices: Indices, *, pin: bool = False) -> list[torch.Tensor]:
        """The samples at int64 [B] indices: a [B, …] tensor of each column, in fresh memory.

        One thread copies them. (`take_in_parallel` is faster while cores are free.)

        Args:
            indices: from 0 to rows - 1.
            pin: into page-locked memory.
        """
        if self._order is not None:
            indices = self._order[indices]
        if len(self._parts) == 1:
            columns = zip(self._parts[0], self._arrays[0], strict=True)
            return [_rows(column, values, indices, pin) for column, values in columns]
        part_of = np.searchsorted(self._starts, indices, side="right") - 1
        batch = [
            torch.empty((len(indices), *c.shape[1:]), dtype=c.dtype, device="cpu", pin_memory=pin)
            for c in self._parts[0]
        ]
        for number in np.unique(part_of):
            places = np.flatnonzero(part_of == number)
            rows = indices[places] - self._starts[number]
            columns = zip(self._parts[number], self._arrays[number], strict=True)
            for target, (column, values) in zip(batch, columns, strict=True):
                array(target)[places] = array(_rows(column, values, rows, False))
        return batch

    @property
    def one_part(self) -> bool:
        """All rows lie in one set of tensors."""
        return len(self._parts) == 1

    def take_in_parallel(self, indices: Indices) -> list[torch.Tensor]:
        """What `take` gives, copied by PyTorch's threads; for a table of one part."""
        index = torch.from_numpy(indices if self._order is None else self._order[indices])
        return [column.index_select(0, index) for column in self._parts[0]]

    def versions(self, *, shared: bool = True) -> list[tuple[int, int]]:
        """Where the tensors are and how often they were written to: changes when they change, where
        that leaves a trace (`traceless`).

        Args:
            shared: also of those in memory that processes share.
        """
        every = [t for part in self._parts for t in part]
        found = [t for t in every if shared or not t.is_shared()]  # type: ignore[no-untyped-call]
        return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in found]

    def on(self, device: torch.device) -> Resident:
        """A copy of the used rows on a device."""
        columns = [
            torch.cat([part[number] for part in self._parts])
            if len(self._parts) > 1
            else self._parts[0][number]
            for number in range(len(self._parts[0]))
        ]
        if self._order is not None:
            order = torch.from_numpy(self._order)
            columns = [column.index_select(0, order) for column in columns]
        return Resident([column.to(device) for column in columns], self.versions(), self.layout)


class Resident:
    """A table whose columns lie on a device.

    Attributes:
        source: the `versions` of the tensors it was copied from.
    """

    def __init__(
        self, columns: list[torch.Tensor], source: list[tuple[int, int]], layout: Layout | None
    ) -> None:
        self._columns = columns
        self._layout = layout
        self.source = source

    def batch(self, indices: torch.Tensor) -> Any:
        """The samples at int64 [B] indices that lie on the device."""
        taken = [column.index_select(0, indices) for column in self._columns]
        return taken if self._layout is None else self._layout.collated(taken)


def _rows(column: torch.Tensor, values: Array | None, rows: Indices, pin: bool) -> torch.Tensor:
    if values is None:  # numpy would copy the whole column first, as it has gaps
        taken = column.index_select(0, torch.from_numpy(rows))
        return taken.pin_memory() if pin else taken
    if not pin:
        return tensor_of(values.take(rows, 0), column.dtype)
    target = torch.empty(
        (len(rows), *column.shape[1:]), dtype=column.dtype, device="cpu", pin_memory=True
    )
    values.take(rows, 0, out=array(target), mode="clip")  # "raise" would go through a copy
    return target
