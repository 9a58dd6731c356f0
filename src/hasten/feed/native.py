"""What objects of Python's own kinds refer to and what state they have, where no attribute says."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import io
import itertools
import mmap
import types
import weakref
from collections.abc import Iterator, MappingView
from typing import Any

_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType)
_VIEWS = (types.MappingProxyType, MappingView)
_IN_MEMORY = (io.BytesIO, io.StringIO)
_OF_C = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_ITERATORS = ("builtins", "itertools")


def referred(item: Any, most_bytes: int) -> list[Any] | None:
    """What an object stands for, reads from or holds; None of a kind that is not known here.

    Args:
        most_bytes: the memory of larger ones is not compared, only how far they were read.
    """
    if isinstance(item, weakref.ref):
        return [item()]
    if isinstance(item, _METHODS):  # d.get of a dict
        owner = item.__self__
        return [] if isinstance(owner, types.ModuleType) else [owner]
    if isinstance(item, _VIEWS) and type(item).__module__ in ("builtins", "collections"):
        return gc.get_referents(item)  # the dict, which it does not give otherwise
    if isinstance(item, memoryview):
        return [item.obj]
    if isinstance(item, contextvars.ContextVar):
        return [item.get(None)]
    if isinstance(item, _IN_MEMORY):
        small = len(item.getvalue()) <= most_bytes
        return [item.tell(), hash(item.getvalue()) if small else None]
    if isinstance(item, (*_OF_C, mmap.mmap)):
        memory = memoryview(item)
        return [hash(bytes(memory)) if memory.nbytes <= most_bytes else memory.nbytes]
    return None


def under_way(item: Any) -> bool:
    """Whether it is a generator, or an iterator that does not tell how far it has come."""
    if isinstance(item, types.GeneratorType):
        return True
    if isinstance(item, (itertools.count, io.IOBase)) or not isinstance(item, Iterator):
        return False
    return type(item).__module__ in _ITERATORS
