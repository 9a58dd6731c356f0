"""Trials of chaos.py: a run in processes of its own, to be struck at a moment, and what is seen."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One thread: sums in one order are the same bits, and a fork has no threads to miss.
EPOCHS = 2
_WORDS = (
    f"--device cpu --precision float32 --channels-last off --num-workers 0 --epochs {EPOCHS}"
    " --batch-size 16 --progress plain --model lesson --image-size 16 --val-fraction 0.5"
    " --log-every 5"
)
SETTINGS = tuple(_WORDS.split())
_LONGEST_S = 120.0
_RESUMED = re.compile(r"^Resumed from \S*step-(\d+) ", re.MULTILINE)
_STARTED = "Using device: "


class Lost(Exception):
    """Something was lost."""


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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How many processes train, and by which strategy."""

    name: str
    words: tuple[str, ...]
    launch: Callable[[tuple[str, ...], Path, Callable[[], None]], Child]


@dataclass(kw_only=True)
class Trial:
    """What a fault is given."""

    number: int
    chance: random.Random
    place: Path
    """Of the trial; on a small disk of its own if the fault needs one."""
    setup: Setup
    words: tuple[str, ...] = ("--checkpoint-every", "4 steps")
    seconds: float = 0.0
    """That a run takes from its beginning to the end of its training."""
    sabotage: Callable[[], None] = lambda: None
    """Done in each process of the run, to see whether the trial finds it."""
    floor: int = -1
    """The newest step that was seen in a whole checkpoint: from now on nothing before it may be
    the newest, and no run may begin before it."""
    log_name: str = "log.txt"
    _heard: int = field(default=0)
    _floor_then: int = field(default=-1)

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.place / "run"

    @property
    def log(self) -> Path:
        return self.place.parent / self.log_name

    def start(self, *words: str, before: Callable[[], None] = lambda: None) -> Child:
        def both() -> None:
            before()
            self.sabotage()

        words = (*words, *self.setup.words, "--runs", str(self.place))
        return self.setup.launch(words, self.log, both)

    def begin(self, before: Callable[[], None] = lambda: None, *words: str) -> Child:
        """Start the run, and wait until it is in its folder."""
        self._heard, self._floor_then = len(self.heard()), self.floor
        child = self.start(*SETTINGS, *self.words, *words, "--name", "run", before=before)
        until(child, lambda: (self.folder / "config.json").exists())
        return child

    def resume(self) -> Child:
        self._heard, self._floor_then = len(self.heard()), self.floor
        return self.start("--resume", str(self.folder), "--progress", "plain")

    def moment(self, child: Child) -> None:
        """Let a part of the run pass; now and then all of it."""
        end = time.monotonic() + self.chance.uniform(0.0, 1.1 * self.seconds)
        while time.monotonic() < end and not child.ended():
            time.sleep(0.001)

    def note(self) -> None:
        """See what is saved, just before the run is struck."""
        self.floor = max(self.floor, newest_step(self.folder))

    def check_floor(self) -> None:
        found = newest_step(self.folder)
        if found < self.floor:
            raise Lost(f"step {self.floor} was saved, and the newest is {found}")
        self.floor = found

    def forget(self) -> None:
        """What is saved has been taken away."""
        self.floor = newest_step(self.folder)

    def heard(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def check_beginning(self, *, anew: bool) -> None:
        """Whether runs that were started since have gone on from where they could.

        Args:
            anew: whether the first of them began the run.
        """
        said = self.heard()[self._heard :]
        for number, start in enumerate(said.split(_STARTED)[1:]):
            steps = [int(step) for step in _RESUMED.findall(start)]
            # The first one began before what was seen since; the launcher started the rest later.
            floor = self._floor_then if number == 0 else self.floor
            if steps and steps[0] < floor:
                raise Lost(f"step {floor} was saved, and it went on from step {steps[0]}")
            first = anew and number == 0
            if not steps and not first and floor >= 0 and "Epoch [" in start:
                raise Lost(f"step {floor} was saved, and it began anew")


def until(child: Child, true: Callable[[], bool]) -> None:
    while not true() and not child.ended():
        time.sleep(0.0005)


def alone(words: tuple[str, ...], log: Path, before: Callable[[], None]) -> Child:
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


ONE = Setup(name="one process", words=("--strategy", "single"), launch=alone)


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


# --- what is on the disk -----------------------------------------------------------------------


def sound(path: Path) -> bool:
    from hasten.errors import CheckpointError
    from hasten.train import checkpoint

    try:
        checkpoint.load(path, map_location="cpu")
    except CheckpointError:
        return False
    return True


def newest(folder: Path) -> Any:
    """The newest whole checkpoint, loaded; None where there is none."""
    from hasten.errors import CheckpointError
    from hasten.train import checkpoint

    for _ in range(20):  # a run that is under way may remove it in between
        found, _ = checkpoint.newest(folder / checkpoint.FOLDER)
        if found is None:
            return None
        try:
            return checkpoint.load(found, map_location="cpu")
        except CheckpointError:
            time.sleep(0.001)
    raise Lost("the newest checkpoint cannot be loaded")


def newest_step(folder: Path) -> int:
    found = newest(folder)
    return -1 if found is None else int(found.meta["step"])


def epochs_saved(folder: Path) -> int | None:
    """By the newest checkpoint; None where there is none."""
    found = newest(folder)
    return None if found is None else int(found.meta["epoch"])


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint says of a run, without what time it took."""

    step: int
    model: str
    optimizer: str
    generators: str
    position: str
    history: list[tuple[Any, ...]]
    best: str

    def differs(self, other: State) -> str:
        """Names what does."""
        names = [name for name in self.__dataclass_fields__ if name != "history"]
        wrong = [name for name in names if getattr(self, name) != getattr(other, name)]
        if self.history != other.history:
            wrong.append(f"history ({self.history} and not {other.history})")
        return ", ".join(wrong)


def state_of(saved: Any) -> State:
    """Positions without whether epochs had the same loader: a resumed run sees that later."""
    training, meta = saved.training, saved.meta
    kept = ("epoch", "step", "loss", "val_loss", "val_accuracy", "learning_rate")
    return State(
        step=meta["step"],
        model=fingerprint(dict(saved.model)),
        optimizer=fingerprint([training["optimizers"], training["schedulers"]]),
        generators=fingerprint([training["rng"], training["rng_of_ranks"]]),
        position=fingerprint([one | {"same": None} for one in training["sources"]]),
        history=[tuple(record[name] for name in kept) for record in meta["history"]],
        best=repr(meta["best"]),
    )


def fingerprint(nest: Any) -> str:
    """Of dicts, lists, tensors and plain values, to the bit."""
    import torch

    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(f"{item.dtype}{list(item.shape)}".encode())
            found.update(item.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                found.update(repr(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            found.update(f"{len(item)}[".encode())
            for each in item:
                add(each)
        else:
            found.update(repr(item).encode())

    add(nest)
    return found.hexdigest()
