"""Trials of chaos.py: a run in a process of its own, to be struck at a moment."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# One thread: sums in one order are the same bits, and a fork has no threads to miss.
EPOCHS = 2
_WORDS = (
    f"--device cpu --precision float32 --channels-last off --num-workers 0 --epochs {EPOCHS}"
    " --batch-size 32 --progress plain --model lesson --image-size 16 --val-fraction 0.5"
)
SETTINGS = (*_WORDS.split(), "--checkpoint-every", "4 steps", "--log-every", "5")
_LONGEST_S = 120.0


@dataclass
class Child:
    """A run in a process of its own."""

    pid: int
    log: Path
    status: int | None = None

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self) -> int:
        until = time.monotonic() + _LONGEST_S
        while not self.ended():
            if time.monotonic() > until:
                self.send(signal.SIGKILL)
                raise Lost(f"it did not end within {_LONGEST_S:.0f} s")
            time.sleep(0.005)
        assert self.status is not None
        return self.status

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)


class Lost(Exception):
    """Something was lost."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a fault is given."""

    number: int
    chance: random.Random
    place: Path
    """Of the trial; on a small disk of its own if the fault needs one."""
    folder: Path
    """Of the run."""
    seconds: float
    """That a run takes from its beginning to its end."""

    launcher: Callable[[tuple[str, ...], Path, Callable[[], None]], Child] | None = None
    """Starts the run; in one process by default."""

    def start(self, *words: str, before: Callable[[], None] = lambda: None) -> Child:
        launch = self.launcher or start
        return launch((*words, "--runs", str(self.place)), self.place.parent / "log.txt", before)

    def begin(self, before: Callable[[], None] = lambda: None) -> Child:
        """Start the run, and wait until it is in its folder."""
        child = self.start(*SETTINGS, "--name", self.folder.name, before=before)
        until(child, lambda: (self.folder / "config.json").exists())
        return child

    def moment(self, child: Child) -> None:
        """Let a part of the run pass."""
        end = time.monotonic() + self.chance.uniform(0.0, self.seconds)
        while time.monotonic() < end and not child.ended():
            time.sleep(0.001)


def until(child: Child, true: Callable[[], bool]) -> None:
    while not true() and not child.ended():
        time.sleep(0.0005)


def start(words: tuple[str, ...], log: Path, before: Callable[[], None]) -> Child:
    """Run `hasten train` in a fork of this process."""
    pid = os.fork()
    if pid:
        return Child(pid, log)
    status = 70
    try:
        write_to(log)
        before()
        status = train(words)
    except BaseException:  # noqa: BLE001  (of a process that ends here, whatever it is)
        traceback.print_exc()
    finally:
        os._exit(status)


def write_to(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def train(words: tuple[str, ...]) -> int:
    """The exit status of the command."""
    from hasten.cli.app import main

    status = 0
    try:
        main(["train", *words])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    sys.stdout.flush()
    sys.stderr.flush()
    return status
