"""The global random generators (torch, random, numpy): saved, seeded for a sample, put back.

A data set that draws from them would otherwise give other samples under another plan, and would
disturb the stream that the model's dropout draws from.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

TORCH, PYTHON, NUMPY = "torch", "random", "numpy"
ALL = frozenset({TORCH, PYTHON, NUMPY})

State = dict[str, Any]

_MT19937_BYTES = 625 * 4  # uint32 key[624] and int pos, in either order
_HALF_BYTES = 16  # int has_gauss; double gauss


def save(which: Iterable[str] = ALL) -> State:
    """The states of the named generators."""
    state: State = {}
    for name in which:
        if name == TORCH:
            state[name] = torch.default_generator.get_state()
        elif name == PYTHON:
            state[name] = _python.save()
        else:
            state[name] = _numpy.save()
    return state


def restore(state: State, which: Iterable[str] | None = None) -> None:
    """Put back the named generators of a saved state (all that it holds by default)."""
    for name in state if which is None else which:
        if name == TORCH:
            torch.default_generator.set_state(state[name])
        elif name == PYTHON:
            random.setstate(state[name])
        elif not _numpy.same(state[name]):
            _numpy.set(state[name])


def image() -> tuple[Any, ...]:
    """The states of all three as they lie in memory: to be put back often, where `save` and
    `restore` take 100 µs for generators that go back and forth."""
    return torch.default_generator.get_state(), _python.image(), _numpy.image()


def put(given: tuple[Any, ...]) -> None:
    """Put back an image."""
    torch.default_generator.set_state(given[0])
    _python.put(given[1])
    _numpy.put(given[2])


def seed(key: int, which: Iterable[str] = ALL) -> None:
    """Seed the named generators from 64 bits."""
    for name in which:
        if name == TORCH:
            torch.default_generator.manual_seed(key)
        elif name == PYTHON:
            random.seed(key)
        else:
            np.random.seed(key & 0xFFFFFFFF)


def touched(before: State) -> frozenset[str]:
    """Which of the saved generators have been drawn from (or seeded) since."""
    changed = set()
    for name, old in before.items():
        if name == TORCH:
            same = _bytes(old) == _bytes(torch.default_generator.get_state())
        elif name == PYTHON:
            same = _python.same(old)
        else:
            same = _numpy.same(old)
        if not same:
            changed.add(name)
    return frozenset(changed)


def seed_worker(base: int, worker: int) -> None:
    """Seed all three as PyTorch seeds them in the worker processes of a DataLoader.

    Args:
        base: the number that the DataLoader drew for the epoch.
        worker: its number, from 0.
    """
    random.seed(base + worker)
    torch.default_generator.manual_seed(base + worker)
    np.random.seed(_generate_state(base, worker))  # type: ignore[no-untyped-call]


def packed(state: State) -> dict[str, Any]:
    """A saved state in plain values: to be sent to another process, or kept in a checkpoint."""
    plain = dict(state)
    if TORCH in plain:
        plain[TORCH] = bytes(plain[TORCH].numpy())
    if NUMPY in plain:
        numpy = dict(plain[NUMPY])
        inner = numpy.pop("state")
        words = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in inner.items()}
        plain[NUMPY] = {**numpy, "state": words}
    return plain


def unpacked(plain: dict[str, Any]) -> State:
    """What `packed` was given."""
    state = dict(plain)
    if TORCH in state:
        state[TORCH] = torch.frombuffer(bytearray(state[TORCH]), dtype=torch.uint8)
    if PYTHON in state:
        version, words, gauss = state[PYTHON]
        state[PYTHON] = version, tuple(words), gauss
    if NUMPY in state:
        inner = dict(state[NUMPY]["state"])
        if isinstance(inner.get("key"), bytes):
            inner["key"] = np.frombuffer(inner["key"], dtype=np.uint32)
        state[NUMPY] = {**state[NUMPY], "state": inner}
    return state


def _bytes(state: torch.Tensor) -> bytes:
    """Of a generator's state; PyTorch's own comparison takes six times as long."""
    return ctypes.string_at(state.data_ptr(), state.numel())


class _PythonState:
    """The state of `random`, whose own getstate takes 8 µs: read again only when it moved.

    The words of the generator lie behind the head of its object, in CPython. Whether they do is
    seen once, by comparing with what getstate gives; where they do not, that is asked each time.
    """

    def __init__(self) -> None:
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._memory: Any = None
        self._state: Any = None
        words, start = random.getstate()[1], object.__basicsize__
        known = (words[-1], *words[:-1])
        size = type(self._generator).__basicsize__
        there = sys.implementation.name == "cpython" and size >= start + _MT19937_BYTES
        self._start = id(self._generator) + start if there else 0
        if there and tuple(memoryview(self._words()).cast("I")) != known:
            self._start = 0
        self._writable = bool(self._start) and _is_all_of_it(start)

    def save(self) -> Any:
        memory = self._read()
        if memory is None or memory != self._memory:
            self._state = random.getstate()
            self._memory = memory
        return self._state

    def image(self) -> Any:
        return self._read() if self._writable else (None, random.getstate())

    def put(self, image: Any) -> None:
        words, rest = image
        if words is None:
            random.setstate(rest)
            return
        ctypes.memmove(self._start, words, _MT19937_BYTES)
        self._generator.gauss_next = rest

    def same(self, old: Any) -> bool:
        if old is self._state and self._memory is not None:
            return bool(self._read() == self._memory)
        return bool(old == random.getstate())

    def _read(self) -> Any:
        """The words, and the second of a pair of normals; None where they were not found."""
        return (self._words(), self._generator.gauss_next) if self._start else None

    def _words(self) -> bytes:
        return ctypes.string_at(self._start, _MT19937_BYTES)


class _NumpyState:
    """numpy's global state, whose own get_state takes 25 µs: read again only when it moved.

    Memory (0.5 µs to read) tells whether it moved: the generator's, and where the second half of
    a pair of normals waits.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._state: dict[str, Any] = {}
        self._half: int | None = None
        self._sought = False

    def save(self) -> dict[str, Any]:
        memory = self._read()
        if not memory or memory != self._memory:
            self._state = np.random.get_state(legacy=False)
            self._memory = memory
        return self._state

    def set(self, state: dict[str, Any]) -> None:
        np.random.set_state(state)

    def image(self) -> tuple[int, Any]:
        memory = self._read()
        if memory:
            return self._place(), memory
        return 0, np.random.get_state(legacy=False)

    def put(self, image: tuple[int, Any]) -> None:
        place, memory = image
        if not place:
            np.random.set_state(memory)
        elif place == self._place() and self._half is not None:
            ctypes.memmove(place, memory, _MT19937_BYTES)
            ctypes.memmove(id(_global) + self._half, memory[_MT19937_BYTES:], _HALF_BYTES)
        else:  # somebody has put another generator in its place meanwhile
            has, number = struct.unpack("ixxxxd", memory[_MT19937_BYTES:])
            words = np.frombuffer(memory[:_MT19937_BYTES], dtype=np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), has, number))

    @staticmethod
    def _place() -> int:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        return int(generator.ctypes.state_address)

    def same(self, old: dict[str, Any]) -> bool:
        if old is self._state and self._memory and self._read() == self._memory:
            return True
        new: Any = np.random.get_state(legacy=False)
        if old["bit_generator"] != new["bit_generator"]:
            return False
        if (old["has_gauss"], old["gauss"]) != (new["has_gauss"], new["gauss"]):
            return False
        return all(np.array_equal(old["state"][k], new["state"][k]) for k in old["state"])

    def _read(self) -> bytes:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not self._sought:
            self._sought, self._half = True, half_place()
        if type(generator) is not np.random.MT19937 or self._half is None:
            return b""
        half = ctypes.string_at(id(_global) + self._half, _HALF_BYTES)
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) + half


def _is_all_of_it(start: int) -> bool:
    """Whether a generator of `random` is another once its words are: tried on two of its own."""
    one, other = random.Random(1), random.Random(2)
    other.random()
    ctypes.memmove(id(one) + start, id(other) + start, _MT19937_BYTES)
    return one.getstate() == other.getstate()


def half_place() -> int | None:
    """Where a RandomState keeps the second half of a pair of normals: whether it has one (int),
    and the number (double) 8 bytes later; found and tried on one of its own. None: not found."""
    tried = np.random.RandomState(0)
    places = set(range(0, type(tried).__basicsize__ - _HALF_BYTES + 1, 8))
    for _ in range(4):
        tried.standard_normal()
        state: Any = tried.get_state(legacy=False)
        wanted = state["has_gauss"], state["gauss"]
        places = {place for place in places if _half(tried, place) == wanted}
    return places.pop() if len(places) == 1 else None


def _half(generator: Any, place: int) -> tuple[int, float]:
    has, number = struct.unpack("ixxxxd", ctypes.string_at(id(generator) + place, _HALF_BYTES))
    return has, number


_global: Any = np.random.mtrand._rand
_numpy = _NumpyState()
_python = _PythonState()
