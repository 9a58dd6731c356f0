"""What samples of a data set that only indexes tensors are made of, and a batch of them."""

from __future__ import annotations

import dataclasses
import warnings
from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from hasten.feed.keys import Indices


class NotUnderstoodError(Exception):
    """The code does something that is not known to be the same for a batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """Rows of one tensor, array or list, as an attribute holds it.

    Attributes:
        source: the object itself.
        rows: host tensor [N, …] over the same memory; where `source` is a list, made of it.
        copy: of a list, as it was.
    """

    source: Any
    rows: torch.Tensor
    copy: list[Any] | None = None

    @classmethod
    def of(cls, source: Any) -> Column:
        """That which indexing an object takes rows of.

        Raises:
            NotUnderstoodError: its rows are no numbers, or a tensor cannot look into it.
        """
        return cls(source, _rows(source), list(source) if type(source) in (list, tuple) else None)

    def unchanged(self, rows: Indices | None) -> bool:
        """Of a list, whether its numbers at these places (None: all) are what they were."""
        copy, source = self.copy, self.source
        assert copy is not None
        if rows is None:
            return list(source) == copy
        return len(source) == len(copy) and all(source[r] == copy[r] for r in rows.tolist())


def _rows(source: Any) -> torch.Tensor:
    if type(source) is torch.Tensor:
        return source
    if type(source) in (np.ndarray, np.memmap) and source.dtype.kind in "biuf" and source.ndim:
        if source.dtype == np.uint64 or not source.dtype.isnative or min(source.strides) < 0:
            raise NotUnderstoodError("an array that tensors cannot look into")
        view = source.view(np.ndarray)
        if not view.flags.writeable:  # nobody writes to it through the tensor
            view = np.lib.stride_tricks.as_strided(view, writeable=False)
        return torch.from_numpy(view) if view.flags.writeable else _read_only(view)
    if type(source) in (list, tuple) and source:
        kinds = set(map(type, source))
        if kinds <= {int} or kinds <= {float}:
            return _numbers(source, whole=kinds == {int})
    raise NotUnderstoodError(f"a {type(source).__name__} as a column")


def _numbers(source: Any, *, whole: bool) -> torch.Tensor:
    """In memory of their own; by an array, which takes a third of what `torch.tensor` does."""
    try:
        packed = array("q" if whole else "d", source)
    except OverflowError:
        raise NotUnderstoodError("numbers of more than 64 bits") from None
    return torch.frombuffer(packed, dtype=torch.int64 if whole else torch.float64).clone()


def _read_only(view: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it could be written to: it is not
        return torch.from_numpy(view)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A number or row of a sample: a column's row, and what is done to it, step by step."""

    column: Column
    steps: tuple[Callable[[Any], Any], ...] = ()
    kind: type | None = None  # int, float or bool, where it was made a Python number
    fits: tuple[torch.dtype, ...] = ()  # integers that its number is made, else that raises

    def then(self, step: Callable[[Any], Any]) -> Part:
        """The same, with one more step."""
        if self.kind is not None:
            raise NotUnderstoodError("arithmetic on a Python number")
        return dataclasses.replace(self, steps=(*self.steps, step))


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """What the samples of a data set are.

    Attributes:
        shape: Parts in tuples, lists and dicts; constants as they are.
        held: (how to get it, what it was) of attributes, items and globals that were looked up.
    """

    shape: Any
    held: tuple[tuple[Callable[[], Any], Any], ...]

    def holds(self, rows: Indices | None) -> bool:
        """All that was looked up is what it was, and the numbers in lists at these places (None:
        all of them)."""
        try:
            if not all(get() is value for get, value in self.held):
                return False
        except (AttributeError, NameError, ValueError, LookupError):
            return False
        return all(column.unchanged(rows) for column in self.lists) and self.fit(rows)

    def fit(self, rows: Indices | None) -> bool:
        """The numbers at these places (None: all) fit what is made of them one by one: of a NaN,
        or 300 in 8 bits, Python and PyTorch raise, where in a batch it becomes whatever comes."""
        for column, dtype in self._fitting:
            asked = column if rows is None else column[torch.from_numpy(rows)]
            if len(asked):
                least, most = (each.item() for each in torch.aminmax(asked))
                limits = torch.iinfo(dtype)
                if not (limits.min - 1 < least and most < limits.max + 1):  # nor is a NaN
                    return False
        return True

    @cached_property
    def _fitting(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        parts = parts_in(self.shape)
        return [(part.column.rows, dtype) for part in parts for dtype in part.fits]

    @cached_property
    def lists(self) -> list[Column]:
        """The columns that are lists of numbers."""
        found = {id(p.column): p.column for p in parts_in(self.shape) if p.column.copy is not None}
        return list(found.values())

    @property
    def exact(self) -> bool:
        """Rows are taken and at most made wider: the same on every device."""
        return not any(part.steps for part in parts_in(self.shape))

    def collated(self, taken: list[torch.Tensor]) -> Any:
        """A batch as the default collate function makes it, of the rows of each part in order."""
        rows = iter(taken)
        return _collated(self.shape, rows, len(taken[0]))


def parts_in(shape: Any) -> list[Part]:
    """The parts of a sample, in order."""
    if isinstance(shape, Part):
        return [shape]
    values = shape.values() if isinstance(shape, dict) else shape
    return (
        [p for v in values for p in parts_in(v)] if isinstance(shape, (tuple, list, dict)) else []
    )


def _collated(shape: Any, rows: Iterator[torch.Tensor], count: int) -> Any:
    if isinstance(shape, Part):
        found = next(rows)
        for step in shape.steps:
            found = step(found)
        return found if shape.kind is None else found.to(_NUMBERS[shape.kind])
    if isinstance(shape, dict):
        return {key: _collated(value, rows, count) for key, value in shape.items()}
    if isinstance(shape, tuple) and hasattr(shape, "_fields"):
        return type(shape)(*(_collated(value, rows, count) for value in shape))
    if isinstance(shape, (tuple, list)):
        return [_collated(value, rows, count) for value in shape]
    return default_collate([shape] * count)


_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


def is_sample(shape: Any) -> bool:
    """Whether it has parts, and nothing that no sample should hold."""
    return bool(parts_in(shape)) and not _odd(shape)


def _odd(shape: Any) -> bool:
    if isinstance(shape, (tuple, list)):
        return any(map(_odd, shape))
    if isinstance(shape, dict):
        return any(map(_odd, shape.values()))
    return not isinstance(shape, (Part, int, float, str, bytes))
