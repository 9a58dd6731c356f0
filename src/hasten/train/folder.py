"""A run's folder: its settings, log and checkpoints, written so that nothing is ever half there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hasten.errors import CheckpointError, HastenError, UsageError
from hasten.observe.log import RunLog
from hasten.train import atomic, checkpoint
from hasten.train.settings import RunSettings

CONFIG = "config.json"


class RunFolder:
    """An open run folder.

    Args:
        path: made if it is not there.
        settings: of the run; ``resume`` decides whether a run that is there already is gone on
            with or refused.
        ours: whether the run that is there is this very one, opened before.

    Raises:
        UsageError: the folder holds a run and ``resume`` is not set, or the path is a file.
        HastenError: the folder cannot be made or written.
    """

    def __init__(self, path: Path, settings: RunSettings, *, ours: bool = False) -> None:
        self.path = path
        self.checkpoints = path / checkpoint.FOLDER
        self.last_saved: Path | None = None
        self._settings = settings
        if not (settings.resume or ours):
            refuse_run(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HastenError(f"cannot make the run's folder {path}: {error.strerror}") from error
        self.log = RunLog(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.log.close()

    def write_config(self, content: dict[str, Any]) -> None:
        """Write ``config.json``.

        Raises:
            HastenError: it cannot be written.
        """
        write_json(self.path / CONFIG, content)

    def newest(self, say: Callable[[str], None]) -> checkpoint.Saved | None:
        """The newest whole checkpoint, loaded to the host; None where there is nothing to resume.

        Raises:
            CheckpointError: there are checkpoints, but none is whole.
        """
        if not self._settings.resume:
            return None
        found, passed_over = checkpoint.newest(self.checkpoints)
        for path, why in passed_over:
            say(f"Passed over {path}: {why}")
        if found is None:
            if passed_over:
                raise CheckpointError(f"{self.path} holds no whole checkpoint to resume from")
            return None
        self.last_saved = found
        return checkpoint.load(found, map_location="cpu")

    def save(
        self, model: dict[str, Any], training: dict[str, Any], meta: dict[str, Any], *, best: bool
    ) -> Path:
        """Write a checkpoint, mark it if it is the best, and remove those no longer kept.

        Raises:
            CheckpointError: it cannot be written; earlier ones are as they were.
        """
        path = self.checkpoints / checkpoint.name_of(meta["step"])
        checkpoint.save(path, model=model, training=training, meta=meta)
        self.last_saved = path
        if best:
            self.mark_best(path)
        checkpoint.prune(self.checkpoints, self._settings.keep)
        return path

    def mark_best(self, path: Path) -> None:
        """Mark a checkpoint as the best of the run.

        Raises:
            CheckpointError: the mark cannot be written.
        """
        checkpoint.mark_best(self.checkpoints, path)


def refuse_run(path: Path) -> None:
    """Refuse a folder that a new run cannot be made in.

    Raises:
        UsageError: it is a file, or holds a run already.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; a run needs a folder: give another name")
    if holds_run(path):
        raise UsageError(f"{path} holds a run already; go on with it (resume) or give another name")


def holds_run(path: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (path / CONFIG).exists() or (path / checkpoint.FOLDER).is_dir()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        HastenError: it cannot be written; names the file and says why.
    """
    try:
        with atomic.new_file(path) as temporary:
            # ASCII: a path may hold bytes that are no text, which UTF-8 cannot write.
            text = json.dumps(content, indent=1, default=str) + "\n"
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HastenError(f"cannot write {path}: {error.strerror}; nothing else is lost") from error
