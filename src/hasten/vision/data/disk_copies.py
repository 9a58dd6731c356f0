"""Copies of pictures on the disk, shared by processes without locks, checked as they are read.

A copy is one file, written beside its place and renamed into it: whole or not there. Its name is a
hash of what it was made from, so a changed picture has another. Layout: magic, a checksum of the
rest, the copy's height, width and channels, the picture's height, width and orientation (each of
8 bytes), the pixels.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hasten.errors import UsageError
from hasten.train.remembered import folder as cache_folder
from hasten.vision.cutting import UPRIGHT, Copy
from hasten.vision.file_names import show

from .copies import Key, gigabytes

_MAGIC = int.from_bytes(b"hastenc1", "little")
_HEADER_WORDS = 8
_SHARE_OF_DISK = 0.5  # of what is free, by default
_PARTS = 4  # of what is free, divided by the writers: after one of them, look what others wrote
_TEMPORARY = ".part-"
_ABANDONED_S = 3600.0  # the age of a half-written file whose writer is taken to be dead
_UNUSED_S = 7 * 86400.0  # a copy not read for so long gives way to others
_TOUCH_S = 86400.0  # a copy's time of use is exact to this


class OnDisk:
    """Copies in a folder. What cannot be kept or read is made anew: training goes on.

    Args:
        folder: made if it is not there; other processes may use it at the same time.
        limit_bytes: that all copies in it take at most; None is half of the disk that is free.
        say: told, once, when the folder takes no more, and why.
        clock: seconds since 1970, as files' times are.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int | None = None,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._written: list[tuple[Path, int]] = []  # since the last count
        self._mine = 0  # bytes of those
        self._counted = 0
        self._writers = 4.0  # by what all wrote and what this one did; at first a guess
        self.limit_bytes = 0 if limit_bytes is None else limit_bytes
        self.used_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.scandir(folder).close()  # who may not look into it cannot stay within a limit
            self._counted = self.used_bytes = self._count()
            if limit_bytes is None:
                free = shutil.disk_usage(folder).free
                self.limit_bytes = self.used_bytes + int(free * _SHARE_OF_DISK)
        except OSError as error:
            self._close(f"cannot be used: {error.strerror or error}")

    def get(self, key: Key) -> Copy | None:
        """The copy, or None where it is not there, is broken, or cannot be read."""
        path = self._path(key)
        try:
            content = np.fromfile(path, dtype=np.uint8)
        except OSError:  # not there, which is usual; or unreadable, and writing it will tell
            return None
        copy = _unpacked(content)
        if copy is None:
            _remove(path)
            return None
        self._touch(path)
        return copy

    def put(self, key: Key, copy: Copy) -> None:
        """Keep a copy, if there is room."""
        size = 8 * _HEADER_WORDS + copy.content.nbytes
        path = self._path(key)
        beside = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        with self._lock:
            if self._closed or not self._has_room(size):
                return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("xb") as file:
                    file.write(_header(copy).tobytes())
                    file.write(np.ascontiguousarray(copy.content).data)
                beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        except FileNotFoundError:
            return  # somebody is removing what is in the folder
        except OSError as error:
            with self._lock:
                self._close(f"takes no more ({error.strerror or error})")
            return
        with self._lock:
            self.used_bytes += size
            self._written.append((path, size))
            self._mine += size
            if self._allowance < size:  # the last ones, which others may have written too
                self._recount()

    def describe(self) -> str:
        """See `Store`."""
        if self._closed:
            return ""
        return (
            f"decoded copies in {show(self.folder)}, {gigabytes(self.used_bytes)} of at most "
            f"{gigabytes(self.limit_bytes)} there"
        )

    def _has_room(self, size: int) -> bool:
        if self._mine + size > self._allowance:
            before, mine = self._counted, self._mine
            self._recount()
            if mine:
                self._writers = max(1.0, (self._counted - before) / mine)
        if self.used_bytes + size > self.limit_bytes:
            self._recount(unused_go=True)
        if self.used_bytes + size <= self.limit_bytes:
            return True
        self._close(
            f"is full: {gigabytes(self.used_bytes)} of at most {gigabytes(self.limit_bytes)}"
        )
        return False

    @property
    def _allowance(self) -> float:
        """Bytes that may be written before it is looked again what others have."""
        return (self.limit_bytes - self._counted) / (_PARTS * self._writers)

    def _recount(self, *, unused_go: bool = False) -> None:
        """Look what is there. Where it is too much, what was written here last goes again."""
        found = self._count(unused_go=unused_go)
        while found > self.limit_bytes and self._written:
            path, size = self._written.pop()
            if _remove(path):
                found -= size
        self._written.clear()
        self._mine = 0
        self._counted = self.used_bytes = found

    def _close(self, why: str) -> None:
        if not self._closed:
            self._closed = True
            self._say(
                f"cache: {show(self.folder)} {why}; training goes on, pictures that are not in it "
                "are decoded each time. Delete what is in it, or give another folder by "
                "HASTEN_CACHE_DIR"
            )

    def _count(self, *, unused_go: bool = False) -> int:
        """Bytes of all copies; removes what dead writers left and, if asked, what is unused."""
        total, now = 0, self._clock()
        for shard in _entries(self.folder):
            for entry in _entries(shard.path):
                try:
                    status = entry.stat(follow_symlinks=False)
                    age = now - status.st_mtime
                except OSError:  # another process was faster, or the disk cannot tell
                    continue
                dead = entry.name.startswith(_TEMPORARY) and age > _ABANDONED_S
                goes = dead or (unused_go and age > _UNUSED_S)
                if not (goes and _remove(Path(entry.path))):
                    total += status.st_size
        return total

    def _touch(self, path: Path) -> None:
        """Note that a copy is in use, for those who look for what is not."""
        try:
            if self._clock() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)
        except OSError:  # removed meanwhile, or a read-only folder: it is read all the same
            return

    def _path(self, key: Key) -> Path:
        facts = "\0".join([str(_MAGIC), *(str(fact) for fact in key[1:])]).encode()
        name = hashlib.blake2b(facts + b"\0" + os.fsencode(key[0]), digest_size=20).hexdigest()
        return self.folder / name[:2] / name[2:]

    def __getstate__(self) -> dict[str, object]:
        # A worker process tells nobody: the first one would have, had it not been a worker.
        return {"folder": self.folder, "limit_bytes": self.limit_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(state["folder"], state["limit_bytes"], say=_say_nothing)  # type: ignore


def default_folder() -> Path:
    """Where copies are kept: ``copies`` in hasten's cache folder.

    Raises:
        UsageError: ``HASTEN_CACHE_DIR`` is ``off``.
    """
    folder = cache_folder()
    if folder is None:
        raise UsageError(
            "--cache disk needs a folder, and HASTEN_CACHE_DIR is off; give a folder there, or "
            "--cache ram"
        )
    return folder / "copies"


def _header(copy: Copy) -> NDArray[np.uint64]:
    words = [_MAGIC, 0, *copy.content.shape, copy.height, copy.width, copy.orientation]
    header = np.array(words, dtype=np.uint64)
    header[1] = _checksum(header, np.ascontiguousarray(copy.content).reshape(-1))
    return header


def _unpacked(content: NDArray[np.uint8]) -> Copy | None:
    """The copy in a file; None where it is cut short, changed or something else."""
    if content.size < 8 * _HEADER_WORDS:
        return None
    header, pixels = content[: 8 * _HEADER_WORDS].view(np.uint64), content[8 * _HEADER_WORDS :]
    if header[0] != _MAGIC or header[1] != _checksum(header, pixels):
        return None
    *sides, height, width, orientation = (int(word) for word in header[2:])
    if math.prod(sides) != len(pixels) or orientation not in UPRIGHT:
        return None
    return Copy(pixels.reshape(sides), height, width, orientation)


def _checksum(header: NDArray[np.uint64], pixels: NDArray[np.uint8]) -> np.uint64:
    """Sums of words, by place: some 30 µs for a picture, where a CRC would take as long as JPEG."""
    whole = pixels[: len(pixels) // 8 * 8].view(np.uint64)
    rest = np.zeros(8, dtype=np.uint8)
    rest[: len(pixels) % 8] = pixels[len(whole) * 8 :]
    parts = [header[2:], whole[0::2], whole[1::2], rest.view(np.uint64)]
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in parts:
            total = total * np.uint64(0x9E3779B97F4A7C15) + np.add.reduce(part)
    return np.uint64(total)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # somebody has removed it; it is a file; it is another user's
        return []


def _remove(path: Path) -> bool:
    """Whether a file is gone; one of another user, or on a disk that is read only, stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _say_nothing(line: str) -> None:
    pass
