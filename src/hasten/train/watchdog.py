"""A run that hangs is told: at which step, in which process, where each of its threads stands."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from hasten.errors import REQUEUE_STATUS

FOLDER = ".ranks"
_LOOKS = 8  # in the time after which a run counts as hanging
_LONGEST_LOOK_S = 10.0
_LIMIT_BYTES = 65536
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/nn/functional.py")
_BACKWARD = "torch/autograd/graph.py"
_LIBRARIES = tuple(
    str(Path(place).resolve()) for place in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


@dataclass(kw_only=True)
class Watchdog:
    """Looks, in a thread of its own, at whether batches are still being finished.

    When none was for :attr:`after_s`, it writes once what it sees: the step, the collective that
    the process waits in, the stacks of all threads. Of several processes each leaves a sign of
    life in ``RUN/.ranks``, so that the first can name those that have not come.

    Add to :attr:`beats` with each batch.
    """

    after_s: float
    """0 never looks."""
    where: Callable[[], str]
    """Tells where the run is, in a few words; called in another thread."""
    rank: int = 0
    size: int = 1
    folder: Path | None = None
    exits: bool = False
    """Whether a hang ends the process, for a launcher to start it anew."""
    stream: TextIO | None = None
    """Standard error by default, as it is when it is written to."""
    clock: Callable[[], float] = time.monotonic
    beats: int = 0
    _seen: tuple[int, float] = (-1, 0.0)
    _told: bool = False
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _watched: int = 0

    def __enter__(self) -> Watchdog:
        self._watched = threading.get_ident()
        self._end.clear()
        self._seen, self._told = (self.beats, self.clock()), False
        if self.after_s > 0:
            self._thread = threading.Thread(target=self._watch, name="hasten-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._sign is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more
                self._sign.unlink(missing_ok=True)
                self._sign.parent.rmdir()  # the last one out

    def look(self) -> str | None:
        """What is to be told now; None while all is well, and after it was told."""
        now = self.clock()
        if self.beats != self._seen[0]:
            self._seen = (self.beats, now)
            if self._told:
                self._told = False
                return f"{self._who()} goes on, {self.where()}"
            return None
        if self._told or now - self._seen[1] < self.after_s:
            return None
        self._told = True
        frames = list(_frames(self._watched))
        lines = [
            f"{self._who()} hangs: no batch has been finished for {now - self._seen[1]:,.0f} s,"
            f" {self.where()}.",
            f"  {_waits(frames)}",
        ]
        lines += [f"  {line}" for line in self._others(now)]
        lines.append("The stacks of all its threads, the innermost call first:")
        return "\n".join([*lines, _stacks()])

    def _watch(self) -> None:
        pause_s = min(self.after_s / _LOOKS, _LONGEST_LOOK_S)
        while not self._end.wait(pause_s):
            self._give_sign()
            text = self.look()
            if text is None:
                continue
            stream = sys.stderr if self.stream is None else self.stream
            with contextlib.suppress(OSError, ValueError):  # nobody is there to be told
                stream.write(text + "\n")
                stream.flush()
            if self.exits and self._told:
                os._exit(REQUEUE_STATUS)

    def _who(self) -> str:
        host = f" on {socket.gethostname()}" if self.size > 1 else ""
        name = f"Rank {self.rank} of {self.size}" if self.size > 1 else "The run"
        return f"{name} (process {os.getpid()}{host})"

    @property
    def _sign(self) -> Path | None:
        if self.folder is None or self.size == 1:
            return None
        return self.folder / FOLDER / f"{self.rank:05d}.json"

    def _give_sign(self) -> None:
        path = self._sign
        if path is None:
            return
        frames = list(_frames(self._watched))
        sign = {
            "time": time.time(),  # only so that it differs from the one before
            "beats": self.beats,
            "where": self.where(),
            "waits": _collective(frames) is not None,
            "does": _waits(frames),
            "who": self._who(),
        }
        with contextlib.suppress(OSError):  # the folder may be gone, and the run tells of that
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(sign))
            temporary.replace(path)

    def _others(self, now: float) -> list[str]:
        """What the first of several processes can tell of the rest."""
        if self.rank != 0 or self.size == 1:
            return []
        if self.folder is None:
            return ["Without a folder of the run nothing is known of the other ranks."]
        signs = {rank: self._read(self.folder, rank) for rank in range(1, self.size)}
        most = max([self.beats, *(int(s["beats"]) for s in signs.values() if s is not None)])
        lines = []
        for rank, sign in signs.items():
            if sign is None:
                lines.append(f"Rank {rank} has left no sign of life in {self.folder / FOLDER}.")
            elif sign["beats"] < most or not sign["waits"]:
                lines.append(f"{sign['who']} has not come: it is {sign['where']}. {sign['does']}")
        return lines or ["All other ranks wait, too."]

    def _read(self, folder: Path, rank: int) -> dict[str, Any] | None:
        try:
            with (folder / FOLDER / f"{rank:05d}.json").open("rb") as file:
                sign = json.loads(file.read(_LIMIT_BYTES))
            return {
                "beats": int(sign["beats"]),
                "waits": bool(sign["waits"]),
                **{name: str(sign[name]) for name in ("where", "does", "who")},
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _frames(thread: int) -> list[FrameType]:
    """The calls of a thread, the innermost first."""
    frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _collective(frames: list[FrameType]) -> tuple[str, FrameType | None] | None:
    """The collective that a thread waits in, and the call of it outside of torch."""
    name = None
    for frame in frames:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if file.endswith(_COLLECTIVES):
            name = frame.f_code.co_name
        elif name is None and file.endswith(_BACKWARD) and _several():
            name = "the sum of gradients in backward"
        elif name is not None and _LIBRARIES[0] not in file:
            return name, frame
    return None if name is None else (name, None)


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _waits(frames: list[FrameType]) -> str:
    found = _collective(frames)
    own = next((frame for frame in frames if not _is_library(frame)), None)
    at = f" at {_place(own)}" if own is not None else ""
    if found is not None:
        return f"It waits for the other ranks in {found[0]}{at}."
    return f"It is{at}." if at else "It is in no code of yours."


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, sysconfig.get_paths()["stdlib"], "<"))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()
