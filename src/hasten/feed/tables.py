"""Data sets that are whole tensors in memory: recognised, and batched by one indexed copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from hasten.feed.buffers import Array, array, tensor_of
from hasten.feed.keys import Indices


class Table:
    """Columns in one or several parts, and the order of their rows.

    Attributes:
        rows: samples in it.
        row_bytes: bytes of one sample, all columns.
    """

    def __init__(self, parts: list[list[torch.Tensor]], order: Indices | None = None) -> None:
        """`order`: int64 [rows], row numbers over all parts one after the other; None for all."""
        self._parts = parts
        self._order = order
        self._arrays = [[array(c) if c.is_contiguous() else None for c in part] for part in parts]
        self._starts = np.cumsum([0] + [len(part[0]) for part in parts])
        self.rows = int(self._starts[-1]) if order is None else len(order)
        self.row_bytes = sum(t[:1].numel() * t.element_size() for t in parts[0])

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all the tensors below, whether their rows are used or not."""
        return sum(t.numel() * t.element_size() for part in self._parts for t in part)

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
            torch.empty((len(indices), *c.shape[1:]), dtype=c.dtype, pin_memory=pin)
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

    def versions(self) -> list[tuple[int, int]]:
        """Where the tensors are and how often they were written to: changes when they change."""
        return [(t.data_ptr(), t._version) for part in self._parts for t in part]

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
        return Resident([column.to(device) for column in columns], self.versions())


class Resident:
    """A table whose columns lie on a device.

    Attributes:
        source: the `versions` of the tensors it was copied from.
    """

    def __init__(self, columns: list[torch.Tensor], source: list[tuple[int, int]]) -> None:
        self._columns = columns
        self.source = source

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The samples at int64 [B] indices that lie on the device."""
        return [column.index_select(0, indices) for column in self._columns]


def recognise(dataset: Any, collate_fn: Callable[[Any], Any] | None) -> Table | None:
    """The table behind a data set, where batching it by index gives what collating gives.

    TensorDataset, and Subset, random_split and ConcatDataset of it. A few samples are compared
    with the ordinary way; where anything differs, there is no table.
    """
    if collate_fn is not None and collate_fn is not default_collate:
        return None
    parts, order = _flatten(dataset)
    if not parts or not _alike(parts):
        return None
    table = Table(parts, order)
    if table.rows == 0 or table.rows != len(dataset):
        return None
    trial = sorted({0, table.rows // 2, table.rows - 1})
    expected = default_collate([dataset[index] for index in trial])
    found = table.take(np.array(trial, dtype=np.int64))
    return table if all(map(_identical, expected, found)) else None


def _rows(column: torch.Tensor, values: Array | None, rows: Indices, pin: bool) -> torch.Tensor:
    if values is None:  # numpy would copy the whole column first, as it has gaps
        taken = column.index_select(0, torch.from_numpy(rows))
        return taken.pin_memory() if pin else taken
    if not pin:
        return tensor_of(values.take(rows, 0), column.dtype)
    target = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
    values.take(rows, 0, out=array(target), mode="clip")  # "raise" would go through a copy
    return target


def _flatten(dataset: Any) -> tuple[list[list[torch.Tensor]], Indices | None]:
    if type(dataset) is TensorDataset:
        return [list(dataset.tensors)], None
    if type(dataset) is Subset:
        parts, order = _flatten(dataset.dataset)
        indices = np.asarray(dataset.indices)
        if not parts or indices.ndim != 1 or indices.dtype.kind not in "iu":
            return [], None
        count = len(order) if order is not None else sum(len(part[0]) for part in parts)
        if len(indices) and not (-count <= indices.min() and indices.max() < count):
            return [], None
        indices = np.where(indices < 0, indices + count, indices).astype(np.int64)
        return parts, indices if order is None else order[indices]
    if type(dataset) is ConcatDataset:
        all_parts: list[list[torch.Tensor]] = []
        orders, start = [], 0
        for child in dataset.datasets:
            parts, order = _flatten(child)
            if not parts:
                return [], None
            count = sum(len(part[0]) for part in parts)
            orders.append(start + (np.arange(count) if order is None else order))
            all_parts += parts
            start += count
        return all_parts, np.concatenate(orders).astype(np.int64)
    return [], None


def _alike(parts: list[list[torch.Tensor]]) -> bool:
    """Plain dense host tensors, the same columns in each part."""
    for part in parts:
        for tensor in part:
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if not plain or tensor.requires_grad or tensor.device.type != "cpu":
                return False
    kinds = [[(t.dtype, t.shape[1:]) for t in part] for part in parts]
    return bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same bits, type and layout."""
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
