"""Whether a data set is still what it was: its pickle, and its tensors' and arrays' bytes.

To that come what no pickle has: the attributes of its classes, those of functions, and the
variables of people's modules that its code names.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import marshal
import pickle
import types
import zlib
from typing import Any

import numpy as np
import torch

from hasten.feed.buffers import read_only
from hasten.feed.inside import inside
from hasten.feed.surroundings import (
    CALLED,
    MOST_FUNCTIONS,
    changeable,
    functions_in,
    functions_of,
    of_class,
    own,
    own_classes,
)

_MOST_BYTES = 1 << 24  # some 20 ms; starting workers anew costs little more


class _TooMuchError(Exception):
    pass


def fingerprint(*objects: Any) -> bytes | None:
    """The same for objects of the same content; None where that cannot be told, or not soon.

    Functions count by their code and what it names, classes that the objects are of by their
    attributes.
    """
    sink = _Sink()
    pickler = _Pickler(sink, sink)
    try:
        pickler.dump(objects)
        _around(pickler, [function for item in objects for function in functions_of(item)])
    except Exception:  # noqa: BLE001 - open files, lambdas, too many bytes: it cannot be told
        return None
    return sink.hash.digest()


def _around(pickler: _Pickler, functions: list[Any]) -> None:
    """Add what the classes of all that was pickled hold, and what functions name."""
    classes, seen = 0, set[int]()
    while functions or classes < len(pickler.kinds):  # there come more meanwhile
        found: list[Any] = []
        if functions:
            function = functions.pop()
            if id(function) in seen or len(seen) >= MOST_FUNCTIONS:
                continue
            seen.add(id(function))
            found += [*_of_function(function), *changeable(function)]
        else:
            kind = pickler.kinds[classes]
            classes += 1
            found += of_class(kind)[0]
            functions += functions_in(kind)
            pickler.note(own(inspect.getmro(type(kind))))
        for value in found:
            if isinstance(value, CALLED):
                functions += functions_of(value)
                pickler.add(f"{value.__module__}.{value.__qualname__}")
                if isinstance(value, types.MethodType):
                    pickler.add(value.__self__)
            elif isinstance(value, type):
                pickler.note(own([value]))
                pickler.add(f"{value.__module__}.{value.__qualname__}")
            else:
                pickler.add(value.__name__ if isinstance(value, types.ModuleType) else value)


def _of_function(function: Any) -> list[Any]:
    """Its code, and what it holds beside that."""
    inner = inspect.unwrap(function) if not isinstance(function, types.FunctionType) else function
    if not isinstance(inner, types.FunctionType):
        return [vars(function)]
    cells = [cell.cell_contents for cell in inner.__closure__ or () if cell != types.CellType()]
    code = marshal.dumps(inner.__code__, 2)  # a version without marks for what is referred to
    return [vars(function), code, inner.__defaults__, inner.__kwdefaults__, *cells]


class _Sink(io.RawIOBase):
    """Hashes what is written to it, up to a bound."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.left = _MOST_BYTES

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = len(memoryview(data).cast("B")) if not isinstance(data, bytes) else len(data)
        self.take(size)
        self.hash.update(data)
        return size

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _TooMuchError


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, sink: _Sink) -> None:
        super().__init__(file, protocol=5)
        self._sink = sink
        self.kinds: list[type] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, type):
            self.note(own_classes(value))
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout is not torch.strided:
                raise _TooMuchError
            self._sink.take(value.numel() * value.element_size())
            flat = read_only(value.detach().contiguous().reshape(-1).view(torch.uint8))
            return str, (f"{value.dtype} {tuple(value.shape)} {zlib.crc32(flat.data)}",)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._sink.take(value.nbytes)
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return str, (f"{value.dtype} {value.shape} {zlib.crc32(flat.data)}",)
        return NotImplemented

    def note(self, kinds: list[type]) -> None:
        """Classes to be looked at."""
        self.kinds.extend(kind for kind in kinds if kind not in self.kinds)

    def add(self, value: Any) -> None:
        """What a class holds; of what cannot be pickled (locks, functions) what can be seen."""
        try:
            self.dump(value)
        except _TooMuchError:
            raise
        except Exception:
            seen = inside(value)
            if seen is None:
                raise
            self.dump(seen)
