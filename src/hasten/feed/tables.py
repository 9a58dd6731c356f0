"""Data sets that are whole tensors in memory: recognised, and batched by one indexed copy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from hasten.feed import randomness
from hasten.feed.buffers import Array, array, tensor_of
from hasten.feed.columns import Column, Layout, Part, parts_in
from hasten.feed.compare import identical
from hasten.feed.interpret import layout_of
from hasten.feed.keys import Indices, permutation
from hasten.feed.samples import many_of

_TRIALS = 3
_TRIAL_ROWS = 8


Holds = Callable[[bool], bool]
"""Whether a data set is made of what it was made of; `True` asks not to look through lists."""


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
        holds: Holds = lambda quick: True,
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
        self._arrays = [[array(c) if c.is_contiguous() else None for c in part] for part in parts]
        self._starts = np.cumsum([0] + [len(part[0]) for part in parts])
        self.rows = int(self._starts[-1]) if order is None else len(order)
        self.row_bytes = sum(t[:1].numel() * t.element_size() for t in parts[0])

    def holds(self) -> bool:
        """Whether the data set is still made of these tensors and lists, in this order."""
        return self._holds(False)

    def holds_for(self, indices: Indices) -> bool:
        """Whether it is, as far as these samples go and without a look at the whole of a list."""
        lists = [] if self.layout is None else self.layout.lists
        if lists and not self.one_part:
            return self.holds()
        if not self._holds(True):
            return False
        rows = indices if self._order is None else self._order[indices]
        return not lists or all(column.unchanged(rows.tolist()) for column in lists)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all the tensors below, whether their rows are used or not."""
        return sum(t.numel() * t.element_size() for part in self._parts for t in part)

    @property
    def exact(self) -> bool:
        """Nothing is computed of the rows: a batch is the same on every device."""
        return self.layout is None or self.layout.exact

    def batch(self, indices: Indices, *, pin: bool = False) -> Any:
        """The samples at int64 [B] indices, as the default collate function puts them together."""
        taken = self.take(indices, pin=pin)
        return taken if self.layout is None else self.layout.collated(taken)

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

    def versions(self, *, shared: bool = True) -> list[tuple[int, int]]:
        """Where the tensors are and how often they were written to: changes when they change.

        Args:
            shared: also of those in memory that processes share.
        """
        every = [t for part in self._parts for t in part]
        found = [t for t in every if shared or not t.is_shared()]  # type: ignore[no-untyped-call]
        return [(t.data_ptr(), t._version) for t in found]

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


def recognise(dataset: Any, collate_fn: Callable[[Any], Any] | None) -> Table | None:
    """The table behind a data set, where batching it by index gives what collating gives.

    TensorDataset; data sets whose `__getitem__` is seen to only index tensors, arrays or lists
    of numbers, and to do the same to each number (`columns`); Subset, random_split, StackDataset
    and ConcatDataset of them. Several batches, of the first, the last, repeated and random samples,
    are compared bit by bit with the ordinary way; where anything differs, fails or is drawn,
    there is no table.
    """
    if collate_fn is not None and collate_fn is not default_collate:
        return None
    found = _flatten(dataset)
    if found is None or not found.parts or not _alike(found.parts):
        return None
    table = Table(found.parts, found.order, layout=found.layout, holds=found.hold)
    if table.rows == 0 or table.rows != len(dataset):
        return None
    before = randomness.save()
    try:
        return (
            table if all(_agree(dataset, table, trial) for trial in _trials(table.rows)) else None
        )
    except Exception:  # noqa: BLE001 - iterating the ordinary way tells of it
        return None
    finally:
        randomness.restore(before)


def _trials(rows: int) -> list[Indices]:
    """Row numbers of a few batches: the first and last, one twice, and some by chance."""
    fixed = np.array([0, rows // 2, rows - 1, 0], dtype=np.int64)
    shuffled = permutation(rows, 0, 0) if rows < 1 << 20 else np.arange(rows)[:: rows // 64]
    drawn = [shuffled[n * _TRIAL_ROWS : (n + 1) * _TRIAL_ROWS] for n in range(_TRIALS)]
    return [fixed, fixed[:1], *(trial for trial in drawn if len(trial))]


def _agree(dataset: Any, table: Table, trial: Indices) -> bool:
    before = randomness.save()
    expected = default_collate([dataset[index] for index in trial.tolist()])
    if randomness.touched(before):
        return False
    parallel = not table.one_part or identical(expected, table.batch_in_parallel(trial))
    return identical(expected, table.batch(trial)) and parallel


def _rows(column: torch.Tensor, values: Array | None, rows: Indices, pin: bool) -> torch.Tensor:
    if values is None:  # numpy would copy the whole column first, as it has gaps
        taken = column.index_select(0, torch.from_numpy(rows))
        return taken.pin_memory() if pin else taken
    if not pin:
        return tensor_of(values.take(rows, 0), column.dtype)
    target = torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=True)
    values.take(rows, 0, out=array(target), mode="clip")  # "raise" would go through a copy
    return target


@dataclass
class _Found:
    """Columns of each part, the order of all rows, and what must stay as it is for them."""

    parts: list[list[torch.Tensor]]
    order: Indices | None = None
    layout: Layout | None = None
    holds: list[Holds] = field(default_factory=list)

    def hold(self, quick: bool) -> bool:
        return all(holds(quick) for holds in self.holds)

    @property
    def count(self) -> int:
        return len(self.order) if self.order is not None else sum(len(p[0]) for p in self.parts)


def _flatten(dataset: Any) -> _Found | None:
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return _Found([list(tensors)], holds=[lambda _: dataset.tensors is tensors])
    if type(dataset) is Subset:
        return _subset(dataset)
    if type(dataset) is ConcatDataset:
        return _concatenated(dataset)
    if type(dataset) is StackDataset:
        return _stacked(dataset)
    layout = layout_of(dataset)
    if layout is None or many_of(dataset) is not None:  # that one's code was not read
        return None
    columns = [part.column.rows for part in parts_in(layout.shape)]
    count = len(dataset)
    if any(len(column) != count for column in columns):
        return None  # an index that counts from the end would be another one
    return _Found([columns], layout=layout, holds=[layout.holds, lambda _: len(dataset) == count])


def _subset(dataset: Subset[Any]) -> _Found | None:
    below, given, inner = _flatten(dataset.dataset), dataset.indices, dataset.dataset
    indices = np.asarray(given)
    if below is None or indices.ndim != 1 or indices.dtype.kind not in "iu":
        return None
    count = below.count
    if len(indices) and not (-count <= indices.min() and indices.max() < count):
        return None
    rows = np.where(indices < 0, indices + count, indices).astype(np.int64)
    order = rows if below.order is None else below.order[rows]
    kept = list(given) if isinstance(given, list) else indices.copy()

    def same(quick: bool) -> bool:
        now = dataset.indices
        if now is not given or dataset.dataset is not inner:
            return False
        if quick:
            return True
        return now == kept if isinstance(now, list) else bool(np.array_equal(np.asarray(now), kept))

    return _Found(below.parts, order, below.layout, [*below.holds, same])


def _concatenated(dataset: ConcatDataset[Any]) -> _Found | None:
    children = list(dataset.datasets)
    found = list(map(_flatten, children))
    holds: list[Holds] = [
        lambda _: (
            len(dataset.datasets) == len(children)
            and all(now is was for now, was in zip(dataset.datasets, children, strict=True))
        )
    ]
    parts: list[list[torch.Tensor]] = []
    orders, start = [], 0
    layouts = [child.layout if child is not None else None for child in found]
    for child in found:
        if child is None or not child.parts:
            return None
        rows = sum(len(part[0]) for part in child.parts)
        orders.append(start + (np.arange(rows) if child.order is None else child.order))
        parts += child.parts
        holds += child.holds
        start += rows
    first = layouts[0]
    if any(layout is not first for layout in layouts) and not _same_layouts(layouts):
        return None
    return _Found(parts, np.concatenate(orders).astype(np.int64), first, holds)


def _stacked(dataset: StackDataset[Any]) -> _Found | None:
    """The columns of all, side by side, where they are whole or all in one order."""
    given = dataset.datasets
    children = list(given.values() if isinstance(given, dict) else given)
    found = [_Found([[c]]) if type(c) is torch.Tensor else _flatten(c) for c in children]
    whole = [child for child in found if child is not None and len(child.parts) == 1]
    if len(whole) < len(children):
        return None
    order = _order_of(whole[0])
    if not all(np.array_equal(_order_of(child), order) for child in whole):
        return None
    shapes = [
        child.layout.shape if child.layout is not None else _sample(child.parts[0], bare)
        for child, bare in zip(whole, map(_is_tensor, children), strict=True)
    ]

    def same(_: bool) -> bool:
        now = list(given.values() if isinstance(given, dict) else given)
        same_ones = len(now) == len(children) and all(map(operator.is_, now, children))
        return dataset.datasets is given and same_ones

    shape = dict(zip(given, shapes, strict=True)) if isinstance(given, dict) else tuple(shapes)
    return _Found(
        [[column for child in whole for column in child.parts[0]]],
        None if all(child.order is None for child in whole) else order,
        Layout(shape, ()),
        [*(holds for child in whole for holds in child.holds), same],
    )


def _is_tensor(child: Any) -> bool:
    return type(child) is torch.Tensor


def _sample(columns: list[torch.Tensor], bare: bool) -> Any:
    parts = tuple(Part(Column(column, column)) for column in columns)
    return parts[0] if bare else parts


def _order_of(found: _Found) -> Indices:
    return np.arange(found.count) if found.order is None else found.order


def _same_layouts(layouts: list[Layout | None]) -> bool:
    """All take rows in the same way, and do nothing to them."""
    signs = {repr(_sign(layout.shape)) if layout and layout.exact else "" for layout in layouts}
    return len(signs) == 1 and "" not in signs


def _sign(shape: Any) -> Any:
    parts = {id(part): f"part {part.kind}" for part in parts_in(shape)}
    if id(shape) in parts:
        return parts[id(shape)]
    if isinstance(shape, dict):
        return {key: _sign(value) for key, value in shape.items()}
    if isinstance(shape, (tuple, list)):
        return type(shape), [_sign(value) for value in shape]
    return shape


def _alike(parts: list[list[torch.Tensor]]) -> bool:
    """Plain dense host tensors, the same columns in each part."""
    for part in parts:
        for tensor in part:
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if not plain or tensor.requires_grad or tensor.device.type != "cpu":
                return False
    kinds = [[(t.dtype, t.shape[1:]) for t in part] for part in parts]
    return bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)
