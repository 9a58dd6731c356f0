"""The memory that nested data holds: all of its tensors, or the answer that nobody can tell."""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import functools
import pathlib
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.devices.walking import Walk

_MOST = 10_000  # objects that are looked at, of one with a `to` of its own


@dataclass(slots=True)
class Held:
    """What nested data holds.

    Attributes:
        tensors: each once, where ``hasten.move`` looks for them; of a sparse or nested one those
            that it is made of.
        unseen: the type of what has a ``to`` of its own and holds more than can be looked into;
            "" where these are all the tensors that moving it would make.
    """

    tensors: list[torch.Tensor]
    unseen: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors' elements."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def held(obj: Any) -> Held:
    """The tensors in a nest.

    An object with a ``to`` of its own moves by that whatever it holds: so its attributes are
    followed all the way down, as far as they are Python's.

    Raises:
        UsageError: a container holds itself.
    """
    items = obj if type(obj) is tuple or type(obj) is list else (obj,)
    if all(type(item) is torch.Tensor and _is_plain(item) for item in items):
        return Held(list({id(item): item for item in items}.values()))
    walk = _Look()
    walk.visit(obj, "")
    return walk.held


class _Look(Walk):
    name = "hasten"

    def __init__(self) -> None:
        super().__init__()
        self.held = Held([])

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        found = _memories(tensor)
        if found is None:
            self.held.unseen = f"tensor of layout {tensor.layout}"
        else:
            self.held.tensors += found
        return tensor

    def sequence(self, obj: Any, path: str) -> Any:
        for item in obj:
            if type(item) not in _LEAVES:
                self.visit(item, path)
        return obj

    def container(self, obj: Any, path: str) -> Any:
        if not callable(getattr(obj, "to", None)):
            return super().container(obj, path)
        found, whole = _all_in(obj)
        for tensor in found:
            self.visit(tensor, path)
        if not whole:
            self.held.unseen = f"{type(obj).__module__}.{type(obj).__qualname__}"
        return obj


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _memories(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Tensors of one memory each that this one is made of; None where they cannot be had."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # of a class in Python that wraps others
        parts = [getattr(tensor, name) for name in flatten()[0]]
    elif _is_plain(tensor):
        return [tensor]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in _COMPRESSED:
        parts = [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]]
    else:
        return None
    found: list[torch.Tensor] = []
    for part in parts:
        inner = _memories(part)
        if inner is None:
            return None
        found += inner
    return found


_LEAVES = {
    *(str, bytes, bytearray, int, float, complex, bool, type(None), type(...), type, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.Size),
    *(np.dtype, types.ModuleType, weakref.ref, decimal.Decimal),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
}
"""Hold no tensor."""
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, collections.deque, types.SimpleNamespace),
    *(collections.OrderedDict, collections.defaultdict, str, bytes, int, float, object),
)
"""Types of C whose parts are known; a class may build on them."""


def _all_in(obj: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors that Python finds in an object, and whether these are all."""
    found, todo, seen = [], [obj], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
            continue
        parts = _parts(item)
        if parts is None or len(seen) > _MOST:
            return found, False
        todo += [part for part in parts if type(part) not in _LEAVES]
    return found, True


def _parts(item: Any) -> list[Any] | None:
    """What an object is made of; None where that cannot be seen."""
    if type(item) in _LEAVES or isinstance(item, type | np.generic | pathlib.PurePath):
        return []
    if isinstance(item, np.ndarray):
        return list(item.flat) if item.dtype == object else []
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        return [*cells, item.__defaults__, item.__kwdefaults__, item.__dict__]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.BuiltinFunctionType):
        return [item.__self__]
    if type(item) is functools.partial:
        return [item.func, item.args, item.keywords, item.__dict__]
    return list(_attributes(item)) if _is_of_python(type(item)) else None


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _attributes(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from dict.values(item)
        yield from dict.keys(item)
    if isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        yield from item
    if isinstance(item, collections.defaultdict):
        yield item.default_factory
    yield from getattr(item, "__dict__", {}).values()
    for name in copyreg._slotnames(type(item)):  # type: ignore[attr-defined]
        if hasattr(item, name):
            yield getattr(item, name)


def _is_of_python(kind: type) -> bool:
    """Whether all that an object holds is in its attributes, slots, or a container of Python's own.

    A type of C has room for more in its objects.
    """
    base = next(base for base in kind.__mro__ if base in _CONTAINERS)
    room = base.__basicsize__ + 8 * len(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    if kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__:
        room += 8
    inside = kind.__dictoffset__ > 0 or (kind.__itemsize__ > 0 and kind.__dictoffset__ < 0)
    if inside and not base.__dictoffset__:
        room += 8
    return kind.__basicsize__ <= room
