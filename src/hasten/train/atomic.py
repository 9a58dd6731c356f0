"""Writing files and folders so that nobody ever sees half of one, not even after a kill -9."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

STALE_AFTER_S = 24 * 3600.0
"""A leftover whose writer cannot be asked (another machine, a reused process number) is removed
when it is this old."""

_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<token>[0-9a-f]{12})"
)
_written = [0]
_active: set[str] = set()  # leftovers of this process that are no leftovers yet

Kind = Literal["tmp", "old", "gone"]


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty hidden folder beside ``path``; when the block ends well, it becomes ``path``.

    Files written in the block must be flushed to the disk by the caller (``fsync``); the folder
    and its parent are flushed here. A folder that is at ``path`` already is moved aside, replaced,
    then removed. When the block fails, the hidden folder is removed and ``path`` is as it was.

    Raises:
        OSError: the disk is full, the parent is absent or read-only, and the like.
    """
    with _hidden(path, "tmp") as temporary:
        temporary.mkdir()
        try:
            yield temporary
            sync_folder(temporary)
            _replace_folder(temporary, path)
        except BaseException:
            # The error under way is what matters; `clean` gets what cannot be removed now.
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give the path of a hidden file beside ``path`` to write; it becomes ``path`` at the end.

    Raises:
        OSError: the disk is full, the parent is absent or read-only, and the like.
    """
    with _hidden(path, "tmp") as temporary:
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # as above: the first error is the one to show
                temporary.unlink()
            raise


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder if it is not there, flushed to the disk with its name.

    What is in it is flushed by whoever writes it; without this a power cut could take the whole
    folder.

    Args:
        path: of the folder.
        parents: whether to make those above it, too.

    Raises:
        OSError: the parent is absent or read-only, and the like.
    """
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    path.mkdir(parents=parents, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder so that it is never seen half removed.

    Raises:
        OSError: the parent is read-only, and the like.
    """
    with _hidden(path, "gone") as doomed:
        path.rename(doomed)
        shutil.rmtree(doomed)


def leftovers(parent: Path) -> list[tuple[Path, str, Kind]]:
    """What killed (or still running) writers left in ``parent``: path, name it was for, kind."""
    found: list[tuple[Path, str, Kind]] = []
    for entry in sorted(parent.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match:
            found.append((entry, match["name"], match["kind"]))  # type: ignore[arg-type]
    return found


def meant_for(path: Path) -> str | None:
    """The name that a leftover was to have, or had; None when ``path`` is no leftover."""
    match = _LEFTOVER.fullmatch(path.name)
    return match["name"] if match else None


def clean(parent: Path, *, clock: Callable[[], float] = time.time) -> list[Path]:
    """Put back or remove what dead writers left in ``parent``; what cannot be removed stays.

    A folder that was moved aside and never replaced goes back to its place.

    Args:
        parent: the folder to clean.
        clock: seconds since the epoch, compared with the leftovers' modification times.

    Returns:
        The leftovers dealt with.
    """
    done: list[Path] = []
    for path, name, kind in leftovers(parent):
        if not _is_abandoned(path, clock):
            continue
        with contextlib.suppress(OSError):  # another cleaner may be faster; a leftover harms nobody
            if kind == "old" and not os.path.lexists(parent / name):
                path.rename(parent / name)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            done.append(path)
    return done


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk (nothing to do on Windows, which has no call)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HashingFile:
    """A file to write to that keeps count, SHA-256 and the first ``OSError``.

    The error is kept because ``torch.save`` turns it into a ``RuntimeError`` without the cause.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of ``data``; returns its length in bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._hash.update(data)
        size = memoryview(data).nbytes
        self.bytes += size
        _written[0] += size
        return size

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    @property
    def sha256(self) -> str:
        """SHA-256 of all that was written, in hexadecimal."""
        return self._hash.hexdigest()


def written_bytes() -> int:
    """Bytes that this process has written to files that are hashed: it grows while one is."""
    return _written[0]


@contextlib.contextmanager
def _hidden(path: Path, kind: Kind) -> Iterator[Path]:
    name = f".{path.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(6)}"
    _active.add(name)
    try:
        yield path.with_name(name)
    finally:
        _active.discard(name)


def _replace_folder(new: Path, path: Path) -> None:
    if not os.path.lexists(path):
        new.rename(path)
        sync_folder(path.parent)
        return
    # Between the two renames nothing is at `path`, but both whole folders are beside it, and the
    # one moved aside is recognised: `clean` puts it back and readers may use it where it is.
    with _hidden(path, "old") as aside:
        path.rename(aside)
        try:
            new.rename(path)
        except OSError:
            aside.rename(path)
            raise
        sync_folder(path.parent)
        shutil.rmtree(aside, ignore_errors=True)


@functools.cache
def _host() -> str:
    """Eight characters for the set of processes that one process number can be looked up in."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only: containers number their processes apart
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _is_abandoned(path: Path, clock: Callable[[], float]) -> bool:
    match = _LEFTOVER.fullmatch(path.name)
    if match is None or path.name in _active:
        return False
    pid = int(match["pid"])
    if match["host"] == _host() and (pid == os.getpid() or not _is_alive(pid)):
        return True
    try:
        newest_s = max(p.lstat().st_mtime for p in (path, *path.rglob("*")))
    except OSError:
        return False  # it is being written, moved or removed right now
    return clock() - newest_s > STALE_AFTER_S


def _is_alive(pid: int) -> bool:
    if os.name == "nt":
        return True  # os.kill would end the process there; its age decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
