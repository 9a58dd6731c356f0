"""Copies of large pictures at the size that is needed, so that later epochs do not decode them.

With a cache every sample is cut from such a copy, kept or not: what is learned does not depend on
what the cache has room for. A copy lies there decoded: reading it costs a third of decoding it from
a JPEG, which would take a sixth of the room and be off by 0.7 of 255.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils.data import get_worker_info

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.vision.cutting import Copy
from hasten.vision.decode import ImageError, decode_copy

CACHES = ("none", "ram", "disk")
_log = logging.getLogger("hasten.vision")
_APART = (
    "cache: %d worker processes keep copies each for itself, and until it ends: most pictures are "
    "decoded again in later epochs. Leave num_workers out (threads share the memory), or use the "
    "cache disk"
)
_SHARE_OF_MEMORY = 0.5  # of what is free, by default
Key = tuple[str, int, int, int, int]
"""A picture and what was made of it: path, bytes, time of change in ns, size, channels."""


class Store(Protocol):
    """Where copies are kept; used by many threads at once."""

    def get(self, key: Key) -> Copy | None:
        """The copy, or None where it is not there or cannot be used."""
        ...

    def put(self, key: Key, copy: Copy) -> None:
        """Keep a copy, if there is room."""
        ...

    def describe(self) -> str:
        """One line: where, and how much at most; empty where nothing can be kept."""
        ...


class Copies:
    """Gives the copy of a picture, from a store or made anew.

    Args:
        store: where they are kept.
        size: side of the squares that are cut from them, in pixels.
        channels: 3 for RGB, 1 for grey.
    """

    def __init__(self, store: Store, *, size: int, channels: int) -> None:
        self.store = store
        self.size = size
        self.channels = channels

    def of(self, path: str, *, name: str) -> Copy:
        """The copy of the picture at ``path``, called ``name`` in messages.

        Raises:
            ImageError: the file cannot be used.
        """
        key = self._key(path, name)
        copy = self.store.get(key)
        if copy is None:
            copy = decode_copy(path, size=self.size, channels=self.channels, name=name)
            self.store.put(key, copy)
        return copy

    def _key(self, path: str, name: str) -> Key:
        try:
            status = os.stat(path)  # noqa: PTH116 - hot
        except OSError as error:
            raise ImageError(f"{name}: cannot be read ({error.strerror or error})") from error
        return path, status.st_size, status.st_mtime_ns, self.size, self.channels


class InMemory:
    """Copies in this process's memory.

    Worker processes have memory of their own, where a copy is of use to one of them alone, and
    until it ends. They share out what the limit leaves, and the first one says so.

    Args:
        limit_bytes: that they take at most; None is half of the memory that is free now.
        say: told, once, when there is room for no more.
    """

    def __init__(
        self, limit_bytes: int | None = None, *, say: Callable[[str], None] | None = None
    ) -> None:
        self._say = say
        self._process = os.getpid()
        self._told = mmap.mmap(-1, 1)  # of this process and all that are forked from it
        self.limit_bytes = _free_memory() if limit_bytes is None else limit_bytes
        self.used_bytes = 0
        self._copies: dict[str, tuple[Key, Copy]] = {}
        self._lock = threading.Lock()

    def get(self, key: Key) -> Copy | None:
        """See `Store`."""
        found = self._copies.get(key[0])
        return found[1] if found is not None and found[0] == key else None

    def put(self, key: Key, copy: Copy) -> None:
        """See `Store`."""
        with self._lock:
            if self._process != os.getpid():
                self._share_out()
            old = self._copies.pop(key[0], None)  # of a file that has changed
            if old is not None:
                self.used_bytes -= old[1].content.nbytes
            if self.used_bytes + copy.content.nbytes <= self.limit_bytes:
                self._copies[key[0]] = key, copy
                self.used_bytes += copy.content.nbytes
                return
            say, self._say = self._say, None
        if say is not None:
            say(
                f"cache: {gigabytes(self.limit_bytes)} of memory hold {len(self._copies):,} "
                "pictures; training goes on, others are decoded each time. Give more by "
                "--cache-bytes, or --cache disk"
            )

    def _share_out(self) -> None:
        """Now in another process, forked or sent this store: a worker takes its part alone."""
        self._process = os.getpid()
        worker = get_worker_info()
        if worker is None:
            return
        left = max(0, self.limit_bytes - self.used_bytes)
        self.limit_bytes = self.used_bytes + left // worker.num_workers
        self._say = None  # what is full is said of the whole
        if worker.id == 0 and not self._told[0]:
            self._told[0] = 1
            _log.warning(_APART, worker.num_workers)

    def describe(self) -> str:
        """See `Store`."""
        return f"decoded copies in memory, {gigabytes(self.limit_bytes)} at most"

    def __getstate__(self) -> dict[str, int]:
        return {"limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(state["limit_bytes"])  # type: ignore[misc]
        self._process = 0  # of whoever is sent it


def check_cache(cache: str, limit_bytes: int | None) -> None:
    """Refuse settings that cannot be used.

    Raises:
        UsageError: the kind is unknown, or the limit is not above 0.
    """
    if cache not in CACHES:
        raise UsageError(f"cache is one of {', '.join(CACHES)}, not {cache!r}")
    if limit_bytes is not None and limit_bytes < 1:
        raise UsageError(f"cache-bytes is {limit_bytes}: a number of bytes above 0")


def store_of(cache: str, limit_bytes: int | None, say: Callable[[str], None]) -> Store | None:
    """The store that settings name; None for ``none``.

    Args:
        cache: one of ``CACHES``.
        limit_bytes: that copies take at most; None chooses.
        say: told, once, that there is room for no more.

    Raises:
        UsageError: as :func:`check_cache`; or there is a limit and no cache; or files are kept
            nowhere (``HASTEN_CACHE_DIR=off``).
    """
    check_cache(cache, limit_bytes)
    if cache == "none":
        if limit_bytes is not None:
            raise UsageError("cache-bytes is for a cache: give --cache ram or --cache disk too")
        return None
    if cache == "ram":
        return InMemory(limit_bytes, say=say)
    from .disk_copies import OnDisk, default_folder

    return OnDisk(default_folder(), limit_bytes, say=say)


def gigabytes(count: int) -> str:
    """``12.3 GB``, ``45 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def bytes_of(text: str, option: str) -> int:
    """A number of bytes from ``500MB``, ``20 GB``, ``1000000``.

    Raises:
        UsageError: it is no such number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise UsageError(f"{option} is a number of bytes such as 500MB or 20GB, not {text!r}")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " "))


def _free_memory() -> int:
    memory = runtime.memory(torch.device("cpu"))
    free = memory.free_bytes if memory is not None else 4 << 30
    return int(free * _SHARE_OF_MEMORY)
