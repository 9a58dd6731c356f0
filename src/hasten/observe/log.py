"""The run's log, ``metrics.jsonl``: one record a line, written so that a kill loses one line."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hasten.errors import HastenError
from hasten.observe.records import AnyRecord, EpochRecord, StepRecord, from_line, to_line

NAME = "metrics.jsonl"
_SEAL = re.compile(r', "crc32": "([0-9a-f]{8})"\}$')


class RunLog:
    """Appends records to ``metrics.jsonl`` in a run's folder, which must exist.

    Each line reaches the operating system before :meth:`append` returns, so that what a killed
    process logged is there. A last line cut in half by such a kill is completed away at opening.

    Args:
        folder: the run's folder.

    Raises:
        HastenError: the file cannot be opened; the message names it and says why.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / NAME
        self._file: TextIOWrapper | None = None
        try:
            _drop_half_line(self.path)
        except OSError as error:
            _fail("open", self.path, error)
        self._file = self._open()

    def _open(self) -> TextIOWrapper:
        try:
            return _open_here(self.path)
        except OSError as error:
            _fail("open", self.path, error)

    def append(self, record: AnyRecord) -> None:
        """Write one record.

        Raises:
            HastenError: the disk is full, the folder was removed, or the log is closed; the
                message names the file and says what to do.
        """
        if self._file is None:
            raise HastenError(f"cannot write {self.path}: the log was closed; open a new RunLog")
        try:
            self._file.write(_sealed(to_line(record)) + "\n")
            if os.fstat(self._file.fileno()).st_nlink == 0:
                # A removed file takes writes without complaint and everything is lost.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as error:
            self._abandon()
            _fail("write", self.path, error)

    def write(self, record: AnyRecord) -> None:
        """The name that sinks for records share; see :meth:`append`."""
        self.append(record)

    def truncate_after(
        self, step: int, *, epochs: int | None = None, batches: int | None = None
    ) -> int:
        """Drop the lines of steps and epochs past a checkpoint, in one atomic replacement.

        Called at resume: what came after the checkpoint is about to be done again. Events stay,
        and so do lines of kinds that this version does not know. Lines that are damaged go.

        Args:
            step: optimizer steps done.
            epochs: epochs finished; the record of an epoch can be of the very step at which the
                checkpoint was made, and yet come after it.
            batches: done in the epoch after them; of several with one step, when gradients are
                accumulated, those past it go too.

        Returns:
            How many lines were damaged.

        Raises:
            HastenError: the file cannot be read or rewritten.
        """
        self.close()
        temporary = self.path.with_name(f".{NAME}.{os.getpid()}.tmp")
        try:
            lines = _lines(self.path)
            whole = [line for line in lines if line.strip() and not _is_damaged(line)]
            damaged = sum(1 for line in lines if line.strip()) - len(whole)
            kept = [line for line in whole if not _is_past(line, step, epochs, batches)]
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(line + "\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _fail("rewrite", self.path, error)
        self._file = self._open()
        return damaged

    def close(self) -> None:
        """Close the file; again is harmless."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _abandon(self) -> None:
        # Closing flushes what is buffered and fails again: the first failure is the one to tell.
        try:
            self.close()
        except OSError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(folder: Path, say: Callable[[str], None] | None = None) -> list[AnyRecord]:
    """The records of a run's folder in the order written; none if it has no log yet.

    A last line without its end is half written and is passed over; so are kinds of records that
    this version does not know.

    Args:
        folder: the run's.
        say: is told of lines that are damaged, which are then left out.

    Raises:
        HastenError: the file cannot be read, or a line in it is damaged or no record and nobody
            is to be told; the message names it.
    """
    path = Path(folder) / NAME
    records: list[AnyRecord] = []
    try:
        lines = _lines(path)
    except OSError as error:
        _fail("read", path, error)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if _is_damaged(line):
                raise ValueError("its checksum differs")
            record = from_line(line)
        except (ValueError, TypeError, RecursionError) as error:
            text = f"{path}, line {number}: not a record of a run ({error})"
            if say is None:
                raise HastenError(f"{text}; mend or remove that line") from error
            say(f"{text}: left out")
            continue
        if record is not None:
            records.append(record)
    return records


def _sealed(line: str) -> str:
    """A record's line with a checksum of it as its last value."""
    return f'{line[:-1]}, "crc32": "{zlib.crc32(line.encode()):08x}"}}'


def _is_damaged(line: str) -> bool:
    """Whether a line is not as it was written; one without a checksum has to be JSON."""
    found = _SEAL.search(line)
    if found is None:
        try:
            return not isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return True
    return zlib.crc32((line[: found.start()] + "}").encode()) != int(found[1], 16)


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; a last one without its end is left out."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return text.decode("utf-8", errors="replace").split("\n")[:-1]


def _is_past(line: str, step: int, epochs: int | None, batches: int | None) -> bool:
    try:
        record = from_line(line)
    except (ValueError, TypeError):
        return False  # of a form that this version does not know
    if isinstance(record, EpochRecord):
        return record.step > step or (epochs is not None and record.epoch > epochs)
    if not isinstance(record, StepRecord):
        return False
    if record.step > step:
        return True
    done = (epochs or 0) + 1, batches or 0
    return epochs is not None and (record.epoch, record.batch) > done


def _open_here(path: Path) -> TextIOWrapper:
    """Open a file for appending; no link in its place, which could lead anywhere."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(path, "a", encoding="utf-8", buffering=1, newline="\n", opener=opener)


def _drop_half_line(path: Path) -> None:
    """Cut off a last line without its end, which the next append would otherwise run into."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if not size:
                return
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
    except FileNotFoundError:
        return


_REMEDIES = {
    errno.ENOSPC: "free some disk space, then go on with --resume",
    errno.EDQUOT: "free some of your quota, then go on with --resume",
    errno.ENOENT: "the run's folder was removed or moved while in use; leave it in place",
    errno.EACCES: "give yourself the right to write there, or choose another folder",
    errno.EROFS: "that disk is read-only; choose another folder",
}


def _fail(verb: str, path: Path, error: OSError) -> NoReturn:
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and the folder, then go on")
    reason = error.strerror or str(error)
    raise HastenError(f"cannot {verb} {path}: {reason}; {remedy}") from error
