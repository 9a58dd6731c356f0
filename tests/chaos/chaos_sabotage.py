"""Ways to break hasten on purpose, each in the processes of a run: chaos.py must find them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def no_checksums() -> None:
    """Damaged files are believed."""
    from hasten.train import manifest

    def opened(path: Path, sha256: str) -> Any:
        return manifest.open_regular(path)

    manifest.open_verified = opened
    manifest.verify = lambda path, status, sha256, digest: None
    manifest.is_whole = lambda raw: True
    manifest._check_size = lambda path, size: None


def no_flush() -> None:
    """Nothing is flushed to the disk."""
    os.fsync = lambda descriptor: None


def in_place() -> None:
    """A checkpoint is written where it belongs, over the one before."""
    from hasten.train import atomic

    @contextlib.contextmanager
    def new_folder(path: Path) -> Iterator[Path]:
        for older in path.parent.glob("step-*"):
            shutil.rmtree(older, ignore_errors=True)
        path.mkdir()
        yield path

    atomic.new_folder = new_folder


def removed_too_early() -> None:
    """What is no longer kept is removed before the next one is there."""
    from hasten.train import checkpoint

    whole = checkpoint.write

    def write(folder: Path, prepared: Any) -> None:
        for older in Path(folder).parent.glob("step-*"):
            shutil.rmtree(older, ignore_errors=True)
        whole(folder, prepared)

    checkpoint.write = write


def begun_anew() -> None:
    """A run that is resumed finds no checkpoint, and does not say so."""
    from hasten.train.saving import Saver

    Saver._newest = lambda self: None


def no_position() -> None:
    """A resumed epoch is read from its beginning."""
    from hasten.train import source

    whole = source.Source.restore

    def restore(self: Any, position: dict[str, Any]) -> None:
        loader = position["loader"]
        whole(self, position | {"batches": 0, "loader": loader and loader | {"batch": 0}})

    source.Source.restore = restore


def no_optimizer() -> None:
    """The optimizer's state is not put back."""
    from hasten.train import state

    state._load_optimizer = lambda optimizer, saved, source: None


def no_lock() -> None:
    """A folder is open to all."""
    from hasten.train import lock

    lock._lock = lambda descriptor: True


def no_watch() -> None:
    """Nobody looks whether the run hangs; it ends after a while without a word."""
    from hasten.errors import REQUEUE_STATUS
    from hasten.train.watchdog import Watchdog

    def watch(self: Any) -> None:
        if not self._end.wait(2 * self.after_s):
            os._exit(REQUEUE_STATUS)

    Watchdog._watch = watch


ALL: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "no checksums": no_checksums,
    "no flush": no_flush,
    "in place": in_place,
    "removed too early": removed_too_early,
    "begun anew": begun_anew,
    "no position": no_position,
    "no optimizer": no_optimizer,
    "no lock": no_lock,
    "no watch": no_watch,
}
