"""Data sets that are whole tensors in memory: recognised, and compared with the ordinary way."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
from hasten.feed.columns import Column, Layout, Part, parts_in
from hasten.feed.compare import identical
from hasten.feed.fetching import many_of
from hasten.feed.interpret import layout_of
from hasten.feed.keys import Indices, permutation
from hasten.feed.options import Options
from hasten.feed.reading import has_source, method
from hasten.feed.tables import Holds, Table

_TRIALS = 3
_TRIAL_ROWS = 8


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
    before = randomness.save()
    try:
        return _table_of(dataset)
    except Exception:  # noqa: BLE001 - iterating the ordinary way tells of it
        return None
    finally:
        randomness.restore(before)


def unread(options: Options) -> bool:
    """Whether a data set that is not recognised holds a tensor or array with a row for each sample,
    and the source of its class cannot be read: it may be one of whole tensors."""
    usual = options.collate_fn is None or options.collate_fn is default_collate
    if options.iterable or not options.batched or not usual:
        return False
    return _without_source(options.dataset)


def _without_source(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _without_source(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        below = dataset.datasets
        return any(map(_without_source, below.values() if isinstance(below, dict) else below))
    asked = method(dataset, "__getitem__")
    if not isinstance(asked, types.FunctionType) or has_source(asked):
        return False
    held = [v for v in vars(dataset).values() if isinstance(v, (torch.Tensor, np.ndarray))]
    return any(value.ndim > 0 and len(value) == len(dataset) for value in held)


def _table_of(dataset: Any) -> Table | None:
    found = _flatten(dataset)
    if found is None or not found.parts or not _alike(found.parts):
        return None
    table = Table(found.parts, found.order, layout=found.layout, holds=found.hold)
    if table.rows == 0 or table.rows != len(dataset):
        return None
    return table if all(_agree(dataset, table, trial) for trial in _trials(table.rows)) else None


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


@dataclass
class _Found:
    """Columns of each part, the order of all rows, and what must stay as it is for them."""

    parts: list[list[torch.Tensor]]
    order: Indices | None = None
    layout: Layout | None = None
    holds: list[Holds] = field(default_factory=list)

    def hold(self, rows: Indices | None) -> bool:
        return all(holds(rows) for holds in self.holds)

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
    if not layout.fit(None):
        return None
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

    def same(asked: Indices | None) -> bool:
        now = dataset.indices
        if now is not given or dataset.dataset is not inner or len(now) != len(kept):
            return False
        if asked is None:
            alike = now == kept if isinstance(now, list) else np.array_equal(np.asarray(now), kept)
            return bool(alike) and below.hold(None)
        return all(now[i] == kept[i] for i in asked.tolist()) and below.hold(rows[asked])

    return _Found(below.parts, order, below.layout, [same])


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
    orders, start, samples = [], 0, 0
    layouts = [child.layout if child is not None else None for child in found]
    for child in found:
        if child is None or not child.parts:
            return None
        rows = sum(len(part[0]) for part in child.parts)
        orders.append(start + (np.arange(rows) if child.order is None else child.order))
        parts += child.parts
        holds.append(partial(_part_holds, child, first=samples))
        samples += child.count
        start += rows
    first = layouts[0]
    if any(layout is not first for layout in layouts) and not _same_layouts(layouts):
        return None
    return _Found(parts, np.concatenate(orders).astype(np.int64), first, holds)


def _part_holds(child: _Found, rows: Indices | None, *, first: int) -> bool:
    """Of a child whose samples are numbered from `first` on."""
    if rows is None:
        return child.hold(None)
    its = rows[(rows >= first) & (rows < first + child.count)] - first
    return len(its) == 0 or child.hold(its)


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

    def same(_: Indices | None) -> bool:
        now = list(given.values() if isinstance(given, dict) else given)
        same_ones = len(now) == len(children) and all(map(operator.is_, now, children))
        return dataset.datasets is given and same_ones

    shape = dict(zip(given, shapes, strict=True)) if isinstance(given, dict) else tuple(shapes)
    return _Found(
        [[column for child in whole for column in child.parts[0]]],
        None if all(child.order is None for child in whole) else order,
        Layout(shape, ()),
        [*(child.hold for child in whole), same],
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
            plain &= not tensor.is_nested
            if not plain or tensor.requires_grad or tensor.device.type != "cpu":
                return False
    kinds = [[(t.dtype, t.shape[1:]) for t in part] for part in parts]
    return bool(kinds[0]) and all(kind == kinds[0] for kind in kinds)
