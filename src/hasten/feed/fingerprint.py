"""Whether a data set is still what it was: its pickle, and its tensors' and arrays' bytes.

To that come what no pickle has: the attributes of its classes, those of functions, and the
variables of people's modules that its code names.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import types
import zlib
from typing import Any

import numpy as np
import torch

from hasten.feed.buffers import read_only
from hasten.feed.inside import inside, whole
from hasten.feed.surroundings import (
    functions_in,
    functions_of,
    of_class,
    of_library,
    own,
    own_classes,
)

_MOST_BYTES = 1 << 24  # some 20 ms; starting workers anew costs little more


class _TooMuchError(Exception):
    pass


class Content:
    """What objects and all around them held at a moment; equal where that is the same."""

    def __init__(self, digest: bytes, around: list[Any]) -> None:
        self._digest = digest
        self._around = around

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Content) or self._digest != other._digest:
            return False
        try:
            return bool(self._around == other._around)
        except Exception:  # noqa: BLE001 - of items that do not compare
            return False

    __hash__ = None  # type: ignore[assignment]


def fingerprint(*objects: Any) -> Content | None:
    """The same for objects of the same content; None where that cannot be told, or not soon.

    Of functions, and variables that their code names, what a `Mark` looks at is compared: it is not
    pickled, which would call code of theirs and may take long.
    """
    sink = _Sink()
    pickler = _Pickler(sink, sink)
    try:
        pickler.dump(objects)
        functions = [function for item in objects for function in functions_of(item)]
        for kind in pickler.kinds:  # there may come more meanwhile
            for value in of_class(kind)[0]:
                if not isinstance(value, types.FunctionType):
                    pickler.add(value)
            functions += functions_in(kind)
            pickler.note(own(inspect.getmro(type(kind))))
    except Exception:  # noqa: BLE001 - open files, lambdas, too many bytes: it cannot be told
        return None
    around = whole(*(function for function in functions if not of_library(function.__module__)))
    return None if around is None else Content(sink.hash.digest(), around)


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
