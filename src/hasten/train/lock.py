"""One run in one folder: a lock of the operating system's, which dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from hasten.errors import HastenError, UsageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NAME = ".lock"
_LIMIT_BYTES = 4096
_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_open: set[int] = set()  # descriptors that a forked child must not keep
_watching: list[bool] = []


class FolderLock:
    """Holds a run's folder: a second run in it, in this process or another, is refused.

    The system takes the lock back when the process ends, in whatever way; a worker that it forked
    does not keep it. ``RUN/.lock`` says who holds it. It is removed at an orderly end, and one
    that is left over means nothing.

    On a network file system it needs a lock service that works between the machines; where there
    are no locks at all, :attr:`works` is False and nothing is refused.

    Args:
        folder: it exists.
        clock: seconds since the epoch, only to be read by people.

    Raises:
        UsageError: a living run holds it; names its process, machine and beginning.
        HastenError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(folder) / NAME
        self.works = True
        self._descriptor: int | None = None
        while self._descriptor is None:  # again if its holder removed the file as we opened it
            self._take(clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def in_place(self) -> bool:
        """Whether what is locked is still what is there: a folder may be removed under its run."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def release(self) -> None:
        """Give the folder free; again is harmless."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        if descriptor not in _open:
            return  # in a forked child, which has closed it, and where its number is another's
        with contextlib.suppress(OSError):  # left over, it means nothing
            if _is_at(descriptor, self.path):
                self.path.unlink()
        _open.discard(descriptor)
        os.close(descriptor)

    def _take(self, clock: Callable[[], float]) -> None:
        descriptor = _opened(self.path)
        try:
            self.works = _lock(descriptor)
            if not _is_at(descriptor, self.path):
                return
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": clock()}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(who).encode())
            self._descriptor = descriptor
            _open.add(descriptor)
            _close_in_children()
        except BlockingIOError:
            raise UsageError(_refusal(self.path, descriptor)) from None
        except OSError as error:
            raise _failure(self.path, error) from error
        finally:
            if self._descriptor is None:
                os.close(descriptor)


def refuse_living(folder: Path) -> None:
    """Refuse a folder that a living run holds, before anything that takes long.

    Raises:
        UsageError: one does.
    """
    path = Path(folder) / NAME
    if not path.exists():
        return
    descriptor = _opened(path)
    try:
        _lock(descriptor)
    except BlockingIOError:
        raise UsageError(_refusal(path, descriptor)) from None
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # a link could lead out
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise _failure(path, error) from error


def _lock(descriptor: int) -> bool:
    """Lock a file; False where its file system has no locks.

    Raises:
        BlockingIOError: it is locked.
    """
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, _LIMIT_BYTES, os.SEEK_SET)  # what is locked cannot be read there
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno in _HELD:
            raise BlockingIOError from error
        raise
    return True


def _refusal(path: Path, descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        who = json.loads(os.read(descriptor, _LIMIT_BYTES))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(who["since"])))
        holder = f"process {int(who['pid'])} on {who['host']!s:.64}, since {since}"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError):
        holder = "another process"  # it has the lock and has not written yet who it is
    return (
        f"a run is under way in {path.parent} ({holder}): two would spoil each other's files;"
        " wait for it, stop it, or give another name"
    )


def _failure(path: Path, error: OSError) -> HastenError:
    reason = error.strerror or str(error)
    if error.errno == errno.ELOOP:
        reason = "it is a link, which could lead out of the folder"
    return HastenError(
        f"cannot lock the run's folder by {path}: {reason}; a run needs a folder that can be"
        " written"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        here, there = os.fstat(descriptor), os.lstat(path)
    except OSError:  # gone, or no longer to be reached
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _close_in_children() -> None:
    """Let forked children close what is locked: with them the lock would outlive its process."""
    if _watching or not hasattr(os, "register_at_fork"):
        return
    _watching.append(True)

    def close() -> None:
        for descriptor in _open:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _open.clear()

    os.register_at_fork(after_in_child=close)
