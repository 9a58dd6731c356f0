"""Memory that a worker's replies lie in, used again when nobody holds them any more.

Fresh memory is handed out by the kernel page by page, zeroed, and mapped page by page in the
process that reads it: that costs far more than writing a batch into memory that both know.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

_UNIT = 1 << 16  # sizes are multiples of this many bytes
NAMELESS = hasattr(os, "memfd_create")
"""Memory without a name can be had, of which /dev/shm, and its size, knows nothing."""

MOST_SEGMENTS = 64
"""Of a worker. What does not fit travels through its socket."""


class Segment:
    """A piece of a worker's memory.

    Attributes:
        number: its name in messages.
        size: in bytes.
        descriptor: of the file without a name that it is.
        address: where it begins, in the worker.
        close: to be called once it is not wanted any more, which else it is when it is dropped; its
            memory goes when the last that holds it has gone.
        known: the process that reads it has been given the descriptor.
        doomed: it is not to be used again.
        holders: tensors of the worker's, and messages on their way or in use, that lie in it.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor = _nameless(size)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.close.atexit = False
        self.memory = mmap.mmap(self.descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.known = False
        self.doomed = False
        self.holders = 0

    def write(self, offset: int, memory: memoryview) -> None:
        """Copy this to it."""
        memoryview(self.memory)[offset : offset + memory.nbytes] = memory

    def read(self, offset: int, size: int) -> bytes:
        """A copy of a part."""
        return self.memory[offset : offset + size]


class Arena:
    """A worker's segments.

    Attributes:
        spare: most segments that are kept for use again.
    """

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self._segments: dict[int, Segment] = {}
        self._by_address: dict[int, Segment] = {}
        self._next = 0
        self._lock = threading.RLock()  # a tensor may go at any moment
        self._forgotten: list[int] = []

    def taken(self, size: int) -> Segment | None:
        """A segment of at least so many bytes that nobody holds, held once from now on; None
        where there can be no more."""
        with self._lock:
            free = [s for s in self._segments.values() if not s.holders]
            fits = [s for s in free if _serves(s.size, size)]
            found = min(fits, key=lambda s: s.size, default=None)
            if found is None:
                if len(self._segments) >= MOST_SEGMENTS:
                    return None
                try:
                    found = Segment(self._next, -(-size // _UNIT) * _UNIT)
                except (OSError, ValueError):  # no more memory, or no more files
                    return None
                self._next += 1
                self._segments[found.number] = self._by_address[found.address] = found
            found.holders += 1
            return found

    def lent(self, size: int) -> Any:
        """Memory of so many bytes as an object with a buffer, whose segment is held as long as
        the object; None where there is none."""
        segment = self.taken(size)
        if segment is None:
            return None
        buffer = (ctypes.c_char * size).from_buffer(segment.memory)
        weakref.finalize(buffer, self.released, segment.number).atexit = False
        return buffer

    def at(self, address: int) -> Segment | None:
        """The segment that begins there."""
        return self._by_address.get(address)

    def hold(self, segment: Segment) -> None:
        """Once more."""
        with self._lock:
            segment.holders += 1

    def released(self, number: int, *, lost: bool = False) -> None:
        """A holder has gone; `lost`: another process may hold it for as long as it likes."""
        with self._lock:
            segment = self._segments[number]
            segment.holders -= 1
            segment.doomed |= lost
            if segment.holders:
                return
            spare = [s for s in self._segments.values() if not s.holders]
            if segment.doomed:
                self._drop(segment)
            elif len(spare) > self.spare:
                self._drop(spare[0])  # of the longest standing

    def forgotten(self) -> list[int]:
        """Numbers of those that were known and are no more, since the last call."""
        with self._lock:
            found, self._forgotten = self._forgotten, []
            return found

    def _drop(self, segment: Segment) -> None:
        del self._segments[segment.number]
        del self._by_address[segment.address]
        if segment.known:
            self._forgotten.append(segment.number)
        segment.close()


class Borrowed:
    """A worker's segments, in the process that gets its replies.

    Attributes:
        released: numbers of those that a message was in and is held no more.
        lost: numbers of those that must not be used again.
        opened_bytes: of the reply that was opened last.
    """

    def __init__(self) -> None:
        self.opened_bytes = 0
        self.released: deque[int] = deque()
        self.lost: deque[int] = deque()
        self._maps: dict[int, mmap.mmap] = {}
        self._held: dict[int, list[Any]] = {}
        _all.add(self)

    def learn(self, fresh: Sequence[tuple[int, int]], descriptors: Sequence[int]) -> None:
        """Of new ones, (number, size), and their descriptors, which are closed here.

        Raises:
            OSError: one cannot be mapped.
        """
        try:
            for (number, size), descriptor in zip(fresh, descriptors, strict=True):
                self._maps[number] = mmap.mmap(descriptor, size)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def forget(self, numbers: Sequence[int]) -> None:
        """Of those that come no more."""
        for number in numbers:
            self._maps.pop(number, None)
            self._held.pop(number, None)

    def buffer(self, number: int) -> Any:
        """Its memory, held until this object has gone."""
        memory = self._maps[number]
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        told = [number, self.released]
        held = self._held.setdefault(number, [])
        held.append(told)
        weakref.finalize(buffer, _tell, told, held).atexit = False
        return buffer

    def given_back(self) -> list[tuple[int, bool]]:
        """Of what is held no more since the last call: (number, whether it was retired)."""
        return [
            (ended.popleft(), ended is self.lost)
            for ended in (self.released, self.lost)
            for _ in range(len(ended))
        ]

    def retire(self) -> None:
        """What is held now must not be used again: a process is forked, which may keep it."""
        for held in list(self._held.values()):
            for told in list(held):
                told[1] = self.lost


def _tell(told: list[Any], held: list[Any]) -> None:
    held.remove(told)
    told[1].append(told[0])


_all: weakref.WeakSet[Borrowed] = weakref.WeakSet()


def _before_fork() -> None:
    for borrowed in list(_all):
        borrowed.retire()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _serves(there: int, wanted: int) -> bool:
    """Not for much less: what is kept of a small batch would hold the memory of a large one."""
    return wanted <= there <= max(2 * wanted, wanted + _UNIT)


def _nameless(size: int) -> int:
    """The descriptor of so many bytes of memory that has no name, and so cannot be left behind."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hasten-feed")
    else:
        posix: Any = importlib.import_module("_posixshmem")
        name = f"/hasten-feed-{secrets.token_hex(8)}"
        descriptor = posix.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
        posix.shm_unlink(name)
    try:
        os.ftruncate(descriptor, size)
        if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # a full /dev/shm is told here, not by SIGBUS
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
