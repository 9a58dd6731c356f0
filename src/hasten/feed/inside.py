"""What a data set keeps in itself: whether making samples changes it, as far as can be seen.

A generator kept in an attribute, a counter, a cache: a data set that changes when it is asked for
samples gives others in another process, or when it is asked earlier. Looked at are attributes,
containers and what functions close over, all the way down; by a `Mark` also attributes of classes,
variables that people's code names, and all of long lists. Not seen is what lies behind extension
types (open files, database handles). Of what has a state that nothing tells (sparse and nested
tensors, generators without one, whatever raises when it is asked), it is said that it cannot be
looked into.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import random
import types
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hasten.feed import contents, surroundings
from hasten.feed.modes import ambient
from hasten.feed.native import referred, under_way

_LONG = 64  # longer containers count by their length and place in memory, or by their items' places
_MOST_ITEMS = 5_000_000  # of long containers: some 10 ms each time they are compared
_WHOLE_BYTES = 1 << 20  # of arrays and tensors of more, some values are compared
_MOST_BYTES = 1 << 22  # of tensors: some 0.2 ms each time they are compared
_MOST = 4000  # objects that are looked at
_SMALL_BYTES = 256  # smaller tensors and arrays count by their values
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType, torch.dtype)
_WHOLE = (torch.Tensor, np.ndarray, torch.Generator, np.random.Generator, np.random.BitGenerator)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BYTES = (bytearray, array)
_PASSED = (logging.Logger, logging.Handler)
_LIVE = (types.GeneratorType, itertools.count, itertools.cycle, itertools.chain, zip, map, filter)

Inside = list[Any] | None
"""Of some objects, all that is compared; None where that is too much, or cannot be told."""


class UntoldError(Exception):
    """There is more in the objects than can be looked at before each batch, or what cannot be."""


def inside(*objects: Any) -> Inside:
    """What these objects hold now, to be compared with ``==`` to what they hold later.

    Whatever they hold, nothing is raised.
    """
    found: list[Any] = []
    return found if _told(_Look(found), objects) else None


def whole(*objects: Any) -> Inside:
    """The same with all that a `Mark` looks at; kept, so that it can be compared later."""
    found: list[Any] = []
    return found if _told(_Whole(found, keep=True), objects) else None


def _told(look: _Look, objects: Any) -> bool:
    """Look at all that the objects hold; whether it can be told."""
    try:
        look.at_all(objects)
    except UntoldError:
        return False
    return True


def told(item: Any) -> bool:
    """Whether what an object holds can be told."""
    return inside(item) is not None


class Mark:
    """What objects hold now, with all that a sample may be made of, as far as it can be seen.

    To the attributes of `inside` come those of their classes, what class functions close over or
    cache, and of long containers every item: what is put in its place is seen, what is written
    within it is not. Of large arrays and tensors some values are compared.

    Attributes:
        told: whether it can be told; else they count as changed.
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._then: list[Any] = []
        self.told = self._look(self._then, keep=True)

    def changed(self) -> bool:
        """Whether they hold anything else by now. Whatever they hold, nothing is raised."""
        now: list[Any] = []
        try:
            return not (self.told and self._look(now, keep=False) and bool(self._then == now))
        except Exception:  # noqa: BLE001 - of items that were put there and do not compare
            return True

    def _look(self, found: list[Any], *, keep: bool) -> bool:
        found.append(ambient())
        return _told(_Whole(found, keep=keep), self._objects)


class _Look:
    def __init__(self, found: list[Any]) -> None:
        self._found = found
        self._seen: set[int] = set()

    def at_all(self, objects: Any) -> None:
        todo = list(objects)
        while todo:
            item = todo.pop()
            try:
                todo.extend(self._next(item))
            except Exception as error:
                raise UntoldError(f"a {type(item).__name__}") from error

    def _next(self, item: Any) -> list[Any]:
        """What to look at next; what can be compared at once goes to the list."""
        if isinstance(item, _PLAIN):
            self._found.append(_value(item))
            return self._beside(item)
        if id(item) in self._seen:
            return []
        self._seen.add(id(item))
        if len(self._seen) > _MOST:
            raise UntoldError("too much")
        self._found.append(id(item))
        state = _state(item)
        if state is not None:
            self._found.append(state)
        elif isinstance(item, _CONTAINERS):
            self._found.append(len(item))
        return [] if isinstance(item, _PASSED) else self._within(item, state)

    def _beside(self, item: Any) -> list[Any]:
        """What somebody's kind of number or text has besides."""
        if type(item) in _PLAIN or isinstance(item, type | types.ModuleType):
            return []
        return _given(item)

    def _within(self, item: Any, state: str | None) -> list[Any]:
        return _parts(item) if state is None else _given(item)


class _Whole(_Look):
    """Looks at what is long, too, and around."""

    def __init__(self, found: list[Any], *, keep: bool) -> None:
        """`keep`: for later; else what is found is compared before anything changes."""
        super().__init__(found)
        self._keep = keep
        self._left = _MOST_ITEMS
        self._left_bytes = _MOST_BYTES

    def _beside(self, item: Any) -> list[Any]:
        if isinstance(item, type):
            return list(self._of_classes(surroundings.own(item.__mro__)))
        return super()._beside(item)

    def _within(self, item: Any, state: str | None) -> list[Any]:
        if isinstance(item, (*_BYTES, np.ndarray)):
            self._found.append(contents.of_bytes(item, _WHOLE_BYTES))
            return [*_given(item), *_objects(item)]
        if isinstance(item, torch.Tensor):
            values, size = contents.of_tensor(item, min(_WHOLE_BYTES, self._left_bytes))
            self._left_bytes -= size
            self._found.append(values)
        if isinstance(item, _CONTAINERS) and len(item) > _LONG:
            self._left -= len(item)
            if self._left < 0:
                raise UntoldError("too much")
            self._found.extend(
                _listed(item) if self._keep or not isinstance(item, list) else [item]
            )
        return [*super()._within(item, state), *self._around(item)]

    def _around(self, item: Any) -> Iterator[Any]:
        if isinstance(item, types.FunctionType):
            yield from surroundings.changeable(item)
        yield from self._of_classes(surroundings.own_classes(item))

    def _of_classes(self, kinds: list[type]) -> Iterator[Any]:
        for kind in kinds:
            if id(kind) not in self._seen:
                self._seen.add(id(kind))
                inner, plain = surroundings.of_class(kind)
                self._found.extend(plain)
                yield from inner
                for function in surroundings.functions_in(kind):
                    yield from surroundings.changeable(function)


def _objects(item: Any) -> list[Any]:
    """The items of an array of few objects."""
    few = isinstance(item, np.ndarray) and item.dtype == object and item.size <= _LONG
    return item.ravel().tolist() if few else []


def _listed(item: Any) -> list[list[Any]]:
    """Its items, which live as long as the lists do: so a place in memory is not another's.

    Not as a dict or set: those are compared by looking up each item, which takes 30 times as long.
    """
    return [list(item), list(item.values())] if isinstance(item, dict) else [list(item)]


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()] if len(item) <= _LONG else []
    if isinstance(item, _CONTAINERS):
        return list(item) if len(item) <= _LONG else []
    return list(_attributes(item))


def _state(item: Any) -> str | None:
    """Of what has no parts, all that can be compared; None of anything else."""
    if isinstance(item, torch.Tensor):
        return _tensor(item)
    if isinstance(item, np.ndarray):
        return _array(item)
    if isinstance(item, _BYTES):
        return repr(item) if len(item) <= _LONG else str(len(item))
    return _generator(item)


def _value(item: Any) -> Any:
    if isinstance(item, (str, bytes)) and len(item) > _LONG:
        return hash(item)
    return repr(item) if isinstance(item, (float, complex)) else item  # a NaN is no other NaN


def _attributes(item: Any) -> Iterator[Any]:
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            yield _cell(cell)
        yield item.__defaults__
        yield item.__kwdefaults__
        yield from _given(item)
        return
    if isinstance(item, types.MethodType):
        yield item.__self__
        yield item.__func__
        return
    native = referred(item, _WHOLE_BYTES)
    if native is not None:
        yield from native
        return
    if isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    if isinstance(item, _LIVE):
        yield repr(item)  # of a counter it tells the next number
        return
    if isinstance(item, io.IOBase):
        return
    for kind in type(item).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(item, _mangled(kind, name), None)
    known = getattr(item, "__dict__", None)
    if isinstance(known, dict):
        yield known


def _mangled(kind: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if private else name


def _given(item: Any) -> list[Any]:
    """Attributes that somebody gave to what usually has none."""
    known = getattr(item, "__dict__", None)
    return [known] if known and isinstance(known, dict) else []


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def alive(*objects: Any) -> bool:
    """Whether a generator or iterator is among what they hold: how far it has come is not seen."""
    return any(under_way(item) for item in walk(objects))


def bulky(*objects: Any) -> list[Any]:
    """Among what they hold, the large tensors and arrays and the long containers."""
    return [item for item in walk(objects) if _large(item)]


def _large(item: Any) -> bool:
    if is_lazy(item):  # it has no size, and says so by raising
        return False
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size() > _SMALL_BYTES
    if isinstance(item, np.ndarray):
        return item.nbytes > _SMALL_BYTES
    return isinstance(item, _CONTAINERS) and len(item) > _LONG


def walk(objects: Any, past: tuple[type, ...] = ()) -> Iterator[Any]:
    """All that these objects hold, themselves among it; the first few thousand.

    What raises when it is asked what it is, or what it holds, is passed over.

    Args:
        past: of these kinds, none is given nor looked into.
    """
    todo, seen = list(objects), set[int]()
    while todo and len(seen) < _MOST:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        parts = _open(item, (*_PLAIN, *past))
        if parts is not None:
            yield item
            todo.extend(parts)


def _open(item: Any, past: tuple[type, ...]) -> list[Any] | None:
    try:
        if isinstance(item, past):
            return None
        return [] if isinstance(item, _WHOLE) else _parts(item)
    except Exception:  # noqa: BLE001 - a proxy of nothing, attributes that cannot be read
        return None


def _tensor(item: torch.Tensor) -> str:
    """Where it is, and how often it was written to; of a small one, the values.

    Raises:
        UntoldError: it has no memory of its own to say that of (sparse, nested, one that wraps
            others), or was made under `torch.inference_mode()`, which counts nothing, and is large.
    """
    with torch._C.DisableTorchFunctionSubclass():
        small = item.device.type == "cpu" and item.numel() * item.element_size() <= _SMALL_BYTES
        bare = type(item) is torch.Tensor and item.layout is torch.strided
        readable = small and bare and not item.is_quantized
        place, shape = item.data_ptr(), tuple(item.shape)
        if not place and item.numel():
            raise UntoldError("a tensor that wraps others")
        if item.is_inference() and not readable:
            raise UntoldError("a large tensor made under torch.inference_mode()")
        version = -1 if item.is_inference() else item._version
        values = repr(item.detach().flatten().tolist()) if readable else ""
    return repr((place, version, shape, str(item.dtype))) + values


def _array(item: Any) -> str:
    small = item.nbytes <= _SMALL_BYTES and item.dtype != object
    values = item.tobytes().hex() if small else ""
    return repr((item.__array_interface__["data"], item.shape, str(item.dtype))) + values


def _generator(item: Any) -> str | None:
    """The state of a random generator; None of anything else."""
    if isinstance(item, torch.Generator):
        return bytes(item.get_state().numpy()).hex() if item.device.type == "cpu" else repr(item)
    if isinstance(item, np.random.Generator):
        return _bits(item.bit_generator)
    if isinstance(item, np.random.BitGenerator):
        return _bits(item)
    if isinstance(item, np.random.RandomState):
        state = item.get_state(legacy=False)
        return repr({k: v for k, v in state.items() if k != "state"}) + _words(state["state"])
    if isinstance(item, random.Random):
        return repr(hash(item.getstate()))
    return None


def _bits(item: Any) -> str:
    state = item.state
    rest = {k: v for k, v in state.items() if k != "state"}
    return repr(rest) + _words(state["state"])


def _words(state: Any) -> str:
    if not isinstance(state, dict):
        return repr(state)
    return repr([v.tobytes() if isinstance(v, np.ndarray) else v for v in state.values()])
