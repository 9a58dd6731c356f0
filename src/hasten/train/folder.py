"""A run's folder: its settings, log and checkpoints, written so that nothing is ever half there."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hasten.devices import runtime
from hasten.errors import CheckpointError, HastenError, UsageError
from hasten.observe import log
from hasten.observe.log import RunLog
from hasten.observe.records import AnyRecord
from hasten.train import agreement, atomic, checkpoint, manifest, watchdog
from hasten.train.background import Background
from hasten.train.buffers import HostBuffers
from hasten.train.lock import FolderLock
from hasten.train.parts import Parts
from hasten.train.settings import RunSettings

CONFIG = "config.json"
_TRIES, _PAUSE_S = 10, 0.05


class RunFolder:
    """An open run folder, locked until :meth:`free`.

    What cannot be written does not end the training: a failed checkpoint is told and the next one
    tries again, lines of the log wait, and a folder that was removed is made again.

    Args:
        path: made if it is not there.
        settings: of the run; ``resume`` decides whether a run that is there already is gone on
            with or refused.
        say: tells a person.
        ours: whether the run that is there is this very one, opened before.

    Raises:
        UsageError: the folder holds a run and ``resume`` is not set, a run is under way in it, or
            the path is a file.
        HastenError: the folder cannot be made or written, or a link in it leads out of it.
    """

    def __init__(
        self, path: Path, settings: RunSettings, say: Callable[[str], None], *, ours: bool = False
    ) -> None:
        self.path = path
        self.checkpoints = path / checkpoint.FOLDER
        self.last_saved: Path | None = None
        self._settings, self._say = settings, say
        self._config: dict[str, Any] | None = None
        self._background = Background("hasten-checkpoint")
        self._buffers = HostBuffers()
        self._best_under_way = False
        self._unlogged: deque[AnyRecord] = deque()
        self._log_failed = False
        if not (settings.resume or ours):
            refuse_run(path)
        _make(path)
        self._lock = FolderLock(path)
        try:
            if not self._lock.works:
                say(f"{path} is on a file system without locks: let no second run into it")
            if not (settings.resume or ours):
                refuse_run(path)  # one may have come and gone before we had the lock
            _refuse_links(path)
            self.log = RunLog(path)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._background.wait()
            failed = self._background.take_error()
            if failed is not None:
                self._say(f"{failed}")
            self._write_log()
            if self._unlogged:
                self._say(f"{len(self._unlogged)} lines of {self.log.path} could not be written")
        finally:
            self.log.close()
            if not self._background.busy:  # a Ctrl-C may have ended the waiting: it still reads
                self._buffers.release()

    def free(self) -> None:
        """Let other runs into the folder; again is harmless."""
        self._lock.release()

    def write_config(self, content: dict[str, Any]) -> None:
        """Write ``config.json``.

        Raises:
            HastenError: it cannot be written.
        """
        self._config = content
        _write_text(self.path / CONFIG, manifest.sealed(content, default=str))

    def record(self, record: AnyRecord) -> None:
        """Put a record into the log; where that cannot be written it is told once, and waits."""
        self._unlogged.append(record)
        self._write_log()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._background.busy

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        self._background.wait()

    def take_failure(self) -> tuple[CheckpointError, bool] | None:
        """Why the last checkpoint could not be written, once, and whether it was the best.

        Raises:
            BaseException: what is no failure of a disk, and nobody expects.
        """
        error = self._background.take_error()
        if error is None:
            return None
        if not isinstance(error, CheckpointError):
            raise error
        return error, self._best_under_way

    def save(
        self,
        model: dict[str, Any],
        training: dict[str, Any],
        meta: dict[str, Any],
        *,
        best: bool,
        wait: bool,
        in_parts: Parts | None = None,
    ) -> Path:
        """Write a checkpoint, mark it if it is the best, and remove those no longer kept.

        The one before is waited for.

        Args:
            model: see :func:`hasten.train.checkpoint.save`.
            training: see there.
            meta: see there.
            best: whether to mark it.
            wait: False copies the tensors and writes them in the background;
                :meth:`take_failure` tells whether that failed.
            in_parts: see :func:`hasten.train.checkpoint.prepare`; the other processes follow it.

        Raises:
            CheckpointError: it cannot be written; earlier ones are as they were.
        """
        path = self.checkpoints / checkpoint.name_of(meta["step"])
        content = {"model": model, "training": training, "meta": meta, "in_parts": in_parts}
        try:
            self.settle()
            self._begin(path, content, best=best, wait=wait)
        except BaseException:
            if in_parts is not None:
                in_parts.dismiss()
            raise
        return path

    def _begin(self, path: Path, content: dict[str, Any], *, best: bool, wait: bool) -> None:
        try:
            self.be_there()
        except CheckpointError as error:
            if wait:
                raise
            if content["in_parts"] is not None:
                content["in_parts"].dismiss()
            self._best_under_way = best
            self._background.fail(error)
            return
        prepared = None if wait else self._copied(content)
        if prepared is None:
            try:
                self._write(path, checkpoint.prepare(**content), best)
            except CheckpointError as error:
                removed = isinstance(error.__cause__, FileNotFoundError)
                if not removed or content["in_parts"] is not None:
                    raise
                self.be_there()  # it was removed while this was written; there may be no next one
                self._write(path, checkpoint.prepare(**content), best)
        else:
            self._best_under_way = best
            self._background.start(partial(self._write, path, prepared, best))

    def mark_best(self, path: Path) -> None:
        """Mark a checkpoint as the best of the run.

        Raises:
            CheckpointError: the mark cannot be written.
        """
        checkpoint.mark_best(self.checkpoints, path)

    def _write(self, path: Path, prepared: checkpoint.Prepared, best: bool) -> None:
        checkpoint.write(path, prepared)
        self.last_saved = path
        if best:
            self.mark_best(path)
        checkpoint.prune(self.checkpoints, self._settings.keep)

    def _copied(self, content: dict[str, Any]) -> checkpoint.Prepared | None:
        """The checkpoint with its tensors copied; None where the host has no memory for that."""
        try:
            return checkpoint.prepare(**content, buffers=self._buffers)
        except (RuntimeError, MemoryError) as error:
            if not runtime.is_out_of_memory(error):
                raise
            self._buffers.release()
            return None

    def be_there(self) -> None:
        """Make the folder again if it was removed under the run.

        Raises:
            CheckpointError: that cannot be done.
            UsageError: another run has taken the folder.
        """
        if self._lock.in_place:
            return
        gone = not self.path.is_dir()
        try:
            self._lock.release()
            self._lock = _made_and_locked(self.path)
            if gone and self._config is not None:
                self._say(
                    f"{self.path} was removed under the run, with the checkpoints in it: it is"
                    " made again"
                )
                self.write_config(self._config)
        except UsageError:
            raise
        except HastenError as error:
            raise CheckpointError(str(error)) from error

    def _write_log(self) -> None:
        try:
            if self._log_failed:
                self.be_there()
                self.log.close()
                self.log = RunLog(self.path)
            while self._unlogged:
                self.log.append(self._unlogged[0])
                self._unlogged.popleft()
        except UsageError:
            raise
        except HastenError as error:
            if not self._log_failed:
                self._say(f"{error}. Training goes on, and the log's lines wait")
            self._log_failed = True
        else:
            self._log_failed = False


def refuse_run(path: Path) -> None:
    """Refuse a folder that a new run cannot be made in.

    Raises:
        UsageError: it is a file, or holds a run already.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; a run needs a folder: give another name")
    if holds_run(path):
        raise UsageError(f"{path} holds a run already; go on with it (resume) or give another name")


def _make(path: Path) -> None:
    try:
        atomic.make_folder(path, parents=True)
    except OSError as error:
        raise HastenError(f"cannot make the run's folder {path}: {error.strerror}") from error


def _made_and_locked(path: Path) -> FolderLock:
    """A folder made where it was, which whoever removes it may still be at."""
    for _ in range(_TRIES - 1):
        with suppress(HastenError):  # the last try tells why not
            _make(path)
            lock = FolderLock(path)
            if lock.in_place:
                return lock
            lock.release()
        time.sleep(_PAUSE_S)
    _make(path)
    return FolderLock(path)


def _refuse_links(path: Path) -> None:
    """Refuse links where a run writes: they could lead anywhere.

    Raises:
        HastenError: there is one; names it.
    """
    for name in (checkpoint.FOLDER, CONFIG, log.NAME, agreement.FOLDER, watchdog.FOLDER):
        if (path / name).is_symlink():
            raise HastenError(
                f"{path / name} is a symbolic link, and could lead out of the run's folder: put"
                " what it leads to in its place (the run's folder itself may be a link)"
            )


def holds_run(path: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (path / CONFIG).exists() or (path / checkpoint.FOLDER).is_dir()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        HastenError: it cannot be written; names the file and says why.
    """
    # ASCII: a path may hold bytes that are no text, which UTF-8 cannot write.
    _write_text(path, (json.dumps(content, indent=1, default=str) + "\n").encode())


def _write_text(path: Path, text: bytes) -> None:
    try:
        with atomic.new_file(path) as temporary:
            temporary.write_bytes(text)
    except OSError as error:
        raise HastenError(f"cannot write {path}: {error.strerror}; nothing else is lost") from error


def read_config(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What a run was told, from its ``config.json``; if that is damaged, from a checkpoint.

    Args:
        folder: the run's.
        say: is told of the damage.

    Returns:
        With the run's own ``config`` in it.

    Raises:
        CheckpointError: it is damaged, and no checkpoint is whole.
    """
    path = folder / CONFIG
    try:
        return _config_at(path)
    except CheckpointError as error:
        found, _ = checkpoint.newest(folder / checkpoint.FOLDER)
        if found is None:
            raise
        say(f"{error}. The settings are taken from {found}")
        return {"config": manifest.read(found).meta.get("config")}


def _config_at(path: Path) -> dict[str, Any]:
    try:
        with manifest.open_regular(path) as file:
            raw = file.read(manifest.LIMIT_BYTES)
    except OSError as error:
        raise manifest.failure("read", path, error) from error
    try:
        content = manifest.parse_json(raw)
    except ValueError as error:
        raise CheckpointError(
            f"cannot read the settings in {path}: {error}; mend the file, or start a new run"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise CheckpointError(
            f"cannot read the settings in {path}: not as hasten writes it; mend the file, or start"
            " a new run"
        )
    if "checksum" in content and not manifest.is_whole(raw):
        raise CheckpointError(f"{path} is altered (its checksum differs)")
    return content
