"""What is open when a process is forked, and would be shared by it and its parent.

Of an open file they share the place that it is at: one who seeks or reads moves it for the other,
who then reads from somewhere else (a fork's `ZipFile` raises BadZipFile, a raw file gives other
bytes). So a fork opens such files anew, each at the place that it was at. That cannot be done with
connections: who holds one is not forked, nor tried in a fork.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hasten.feed.inside import walk
from hasten.feed.surroundings import functions_of, variables_of

if sys.platform != "win32":
    import fcntl

SHARED = "it holds {0}, which a forked process would share: open it in the first sample instead"
"""What to say of a data set, and of what `unshareable` found in it."""

READ_ON = "samples read on in files that are open already, which processes would share"
"""The same of those whose place samples are seen to move."""

_STANDARD = 3  # input, output and errors are for the main process to say
# Their handles lie in C, and their makers say that they are not to be used on both sides of a fork.
_CONNECTING_WORDS = (
    "sqlite3 apsw duckdb _duckdb psycopg psycopg2 psycopg_c MySQLdb mysql pyodbc oracledb pymongo"
    " h5py tables netCDF4 lmdb plyvel"
)
_CONNECTING = frozenset(_CONNECTING_WORDS.split())


@runtime_checkable
class Forked(Protocol):
    """Work of forked processes that read open files as their own."""

    def about_to_fork(self) -> None:
        """Called in the parent, before each."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an open file is at, and which file it is: a number may be another's later."""

    at: int
    file: tuple[int, int]


class OpenFiles:
    """The files that are open for reading now: noted by the parent, opened anew by its fork."""

    def __init__(self) -> None:
        self._places = dict(_places())
        self._shared = set(self._places)

    def own(self, *, writable: bool = False) -> None:
        """In the fork: each is a file of its own from here on, at the place that was noted.

        What cannot be opened a second time stays shared. What the fork has closed stays closed.

        Args:
            writable: also those open for reading and writing, whose writers may want to go on at
                one another's end.
        """
        for descriptor, noted in self._places.items():
            if not self._is_there(descriptor):
                continue
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDWR and not writable:
                continue
            with suppress(OSError):
                again = os.open(f"/proc/self/fd/{descriptor}", flags & (os.O_ACCMODE | os.O_APPEND))
                try:
                    os.lseek(again, noted.at, os.SEEK_SET)
                    os.dup2(again, descriptor, os.get_inheritable(descriptor))
                finally:
                    os.close(again)
                self._shared.discard(descriptor)

    def _is_there(self, descriptor: int) -> bool:
        """Whether it still is the file that was noted. A process that was forked closes some at
        once, its standard input and what is its siblings', and may open others by the number, as
        other threads may."""
        now = _place(descriptor)
        return now is not None and now.file == self._places[descriptor].file

    def moved(self) -> bool:
        """Whether one of them is at another place now."""
        return any(
            now is not None and now.file == noted.file and now.at != noted.at
            for now, noted in ((_place(number), noted) for number, noted in self._places.items())
        )

    def put_back(self) -> None:
        """In the fork: what stayed shared is for its parent at the place that was noted."""
        for descriptor in self._shared:
            if self._is_there(descriptor):
                os.lseek(descriptor, self._places[descriptor].at, os.SEEK_SET)

    def moved_in(self, process: int) -> bool:
        """The same of a fork, which the caller has not waited for.

        What is no longer open here was another thread's for a moment, and what the fork has closed
        is none of its samples': it may have opened another file by the number.
        """
        for descriptor, noted in self._places.items():
            if not self._is_there(descriptor):
                continue
            with suppress(OSError, ValueError, IndexError):
                status = Path(f"/proc/{process}/fd/{descriptor}").stat()
                if (status.st_dev, status.st_ino) != noted.file:
                    continue
                text = Path(f"/proc/{process}/fdinfo/{descriptor}").read_text(encoding="ascii")
                if int(text.split()[1]) != noted.at:
                    return True
        return False


def _places() -> Iterator[tuple[int, _Place]]:
    if sys.platform == "win32":
        return
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208 - of names alone, for each fork
                descriptor = int(name)
                place = _place(descriptor) if descriptor >= _STANDARD else None
                if place is not None:
                    yield descriptor, place
            return


def _place(descriptor: int) -> _Place | None:
    """Where a regular file that is open for reading is at; None of everything else."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if flags & os.O_ACCMODE == os.O_WRONLY or flags & getattr(os, "O_PATH", 0):
            return None
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:  # closed meanwhile
        return None
    return _Place(at, (status.st_dev, status.st_ino))


def unshareable(*objects: Any) -> str:
    """What these objects hold that a fork must not use beside its parent; "" where nothing is seen.

    Connections (sockets, pipes, databases, HDF5 files) and locks that somebody holds just now, also
    in variables of modules that methods of theirs, or of what they hold, name.
    """
    passed = (logging.Logger, logging.Handler)
    functions = dict.fromkeys(chain.from_iterable(map(functions_of, walk(objects, past=passed))))
    named = chain.from_iterable(map(variables_of, functions))
    for item in walk([*objects, *named], past=passed):
        if isinstance(item, io.IOBase):
            if _is_connected(item):
                return f"{type(item).__name__} of a pipe or socket"
        elif isinstance(item, socket.socket | Connection):
            if item.fileno() >= 0:
                return f"{type(item).__module__}.{type(item).__qualname__}"
        elif isinstance(item, _LOCKS):
            if _is_held(item):
                return f"{type(item).__qualname__} that is locked"
        elif type(item).__module__.split(".")[0] in _CONNECTING:
            return f"{type(item).__module__}.{type(item).__qualname__}"
    return ""


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_BRIEFLY_S = 0.01


def _is_held(lock: Any) -> bool:
    """By another thread, which no fork has: it would wait for ever."""
    taken = lock.acquire(timeout=_BRIEFLY_S)
    if taken:
        lock.release()
    return not taken


def _is_connected(item: io.IOBase) -> bool:
    try:
        descriptor = item.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # of memory, or closed
        return False
    return descriptor >= _STANDARD and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
