"""A run that hangs is told: at which step, in which process, where each of its threads stands."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
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
from hasten.feed.awaited import Awaited
from hasten.train import stacks

FOLDER = ".ranks"
_LOOKS = 8  # in the time after which a run counts as hanging
_LONGEST_LOOK_S = 10.0
_LOOKS_MISSED = 3  # after which a process that gives no sign is stopped or gone
_LIMIT_BYTES = 65536
_DEBUGGERS = ("/bdb.py", "/pydevd.py")
_DEBUGGERS_FOLDER = "/_pydevd_bundle/"
_COMPILERS = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/async_compile.py")
_COMPILES = ("/torch/_inductor/compile_fx.py", "compile_fx")
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/nn/functional.py")
_BACKWARD = "torch/autograd/graph.py"


@dataclass(kw_only=True)
class Watchdog:
    """Looks, in a thread of its own, at whether batches are still being finished.

    When none was for :attr:`after_s`, it writes once what it sees: the step, the collective that
    the process waits in, the stacks of all threads. Of several processes each leaves a sign of
    life in ``RUN/.ranks``, so that the first can name those that have not come or have stopped
    altogether, and the others the first.

    Time in which this process did not run (stopped, or its machine asleep) does not count, and no
    clock that can be set is asked. What takes long and is no hang puts it off or at least ends
    nothing: a checkpoint being written, the compiler at work, a debugger.

    Add to :attr:`beats` with each batch, of training and of validation.
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
    progress: Callable[[], int] = lambda: 0
    """What grows as long as something else than batches goes on: the bytes of checkpoints."""
    stream: TextIO | None = None
    """Standard error by default, as it is when it is written to."""
    clock: Callable[[], float] = time.monotonic
    beats: int = 0
    _seen: tuple[tuple[int, int, int], float] = ((-1, 0, 0), 0.0)
    _told_s: float | None = None
    _asleep_s: float = 0.0
    _given: int = 0  # signs of life of this process
    _signs: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    _changed_s: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _watched: int = 0

    def __enter__(self) -> Watchdog:
        self._watched = threading.get_ident()
        self._end.clear()
        self._signs, self._changed_s, self._counts = {}, {}, {}
        self._seen, self._told_s = (self._state, self._now), None
        if self.after_s > 0:
            self._thread = Awaited(self._watch, name="hasten-watchdog")
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
        now = self._now
        self._read_signs(now)
        if self._state != self._seen[0]:
            self._seen = (self._state, now)
            if self._told_s is not None:
                self._told_s = None
                return f"{self._who()} goes on, {self.where()}"
            return None
        frames = list(_frames(self._watched))
        if _is_debugged(frames):  # a person stands there, and knows
            self._seen = (self._state, now)
        if self._told_s is not None or now - self._seen[1] < self.after_s:
            return None
        self._told_s = now
        lines = [
            f"{self._who()} hangs: no batch has been finished for {now - self._seen[1]:,.0f} s,"
            f" {self.where()}.",
            f"  {_waits(frames)}",
        ]
        lines += [f"  {line}" for line in self._others(now)]
        lines.append("The stacks of all its threads, the innermost call first:")
        return "\n".join([*lines, _stacks()])

    @property
    def to_end(self) -> bool:
        """Whether the process is to be ended: a hang was told a while ago, so that all processes
        have had the time to tell theirs, and nothing excuses it."""
        if not self.exits or self._told_s is None:
            return False
        return self._now - self._told_s >= 2 * self._pause_s and not self._is_excused

    @property
    def _now(self) -> float:
        return self.clock() - self._asleep_s

    @property
    def _state(self) -> tuple[int, int, int]:
        """What changes while something goes on, in this process or in those that it knows of."""
        return self.beats, self.progress(), sum(self._counts.values())

    @property
    def _pause_s(self) -> float:
        return min(self.after_s / _LOOKS, _LONGEST_LOOK_S)

    @property
    def _is_excused(self) -> bool:
        signs = [sign for sign in self._signs.values() if sign is not None]
        return _excuse() or any(sign["excused"] for sign in signs)

    def _watch(self) -> None:
        before = self.clock()
        while not self._end.wait(self._pause_s):
            late = self.clock() - before - self._pause_s
            if late > self._pause_s:  # it was stopped, and the run with it
                self._asleep_s += late
            self._give_sign()
            text = self.look()
            if text is not None:
                stream = sys.stderr if self.stream is None else self.stream
                with contextlib.suppress(OSError, ValueError):  # nobody is there to be told
                    stream.write(text + "\n")
                    stream.flush()
            if self.to_end:
                os._exit(REQUEUE_STATUS)
            before = self.clock()

    def _who(self) -> str:
        host = f" on {socket.gethostname()}" if self.size > 1 else ""
        name = f"Rank {self.rank} of {self.size}" if self.size > 1 else "The run"
        return f"{name} (process {os.getpid()}{host})"

    @property
    def _sign(self) -> Path | None:
        return None if self.folder is None or self.size == 1 else self._sign_of(self.rank)

    def _sign_of(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / FOLDER / f"{rank:05d}.json"

    def _give_sign(self) -> None:
        path = self._sign
        if path is None:
            return
        self._given += 1
        frames = list(_frames(self._watched))
        beats, progress, others = self._state
        sign = {
            "life": f"{os.getpid()}-{self._given}",  # it differs from the one before
            "beats": beats,
            "progress": progress + (others if self.rank == 0 else 0),  # the first has seen all
            "where": self.where(),
            "waits": _collective(frames) is not None,
            "does": _waits(frames),
            "who": self._who(),
            "excused": self._is_excused if self.rank == 0 else _excuse(),
        }
        with contextlib.suppress(OSError):  # the folder may be gone, and the run tells of that
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(sign))
            temporary.replace(path)

    def _read_signs(self, now: float) -> None:
        """Those of the others in the first process, that of the first in the others."""
        if self._sign is None:
            return
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            before, sign = self._signs.get(rank), self._read(rank)
            if sign is None or before is None or sign["life"] != before["life"]:
                self._changed_s[rank] = now
            self._signs[rank] = sign
            if sign is not None:  # one that has gone leaves what it had done
                self._counts[rank] = sign["beats"] + sign["progress"]

    def _others(self, now: float) -> list[str]:
        """What the first of several processes can tell of the rest, and they of the first."""
        if self.size == 1:
            return []
        if self.folder is None:
            return ["Without a folder of the run nothing is known of the other ranks."]
        known = [sign for sign in self._signs.values() if sign is not None]
        most = max([self.beats, *(sign["beats"] for sign in known)])
        lines = []
        for rank, sign in self._signs.items():
            if sign is None:
                lines.append(f"Rank {rank} has left no sign of life in {self.folder / FOLDER}.")
            elif now - self._changed_s[rank] > _LOOKS_MISSED * self._pause_s:
                lines.append(
                    f"{sign['who']} gives no sign of life any more: it is stopped or gone. It was"
                    f" {sign['where']}. {sign['does']}"
                )
            elif sign["beats"] < most or not sign["waits"]:
                lines.append(f"{sign['who']} has not come: it is {sign['where']}. {sign['does']}")
        return lines or (["All other ranks wait, too."] if self.rank == 0 else [])

    def _read(self, rank: int) -> dict[str, Any] | None:
        try:
            with self._sign_of(rank).open("rb") as file:
                sign = json.loads(file.read(_LIMIT_BYTES))
            return {
                "beats": int(sign["beats"]),
                "progress": int(sign["progress"]),
                "waits": bool(sign["waits"]),
                "excused": bool(sign["excused"]),
                **{name: str(sign[name]) for name in ("life", "where", "does", "who")},
            }
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
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
        file = _file(frame)
        if file.endswith(_COLLECTIVES):
            name = frame.f_code.co_name
        elif name is None and file.endswith(_BACKWARD) and _several():
            name = "the sum of gradients in backward"
        elif name is not None and stacks.TORCH not in file:
            return name, frame
    return None if name is None else (name, None)


def _is_debugged(frames: list[FrameType]) -> bool:
    """Whether a debugger holds the thread; pdb's frames, or those of debugpy and PyCharm."""
    files = [_file(frame) for frame in frames]
    return any(file.endswith(_DEBUGGERS) or _DEBUGGERS_FOLDER in file for file in files)


def _excuse() -> bool:
    """Whether a debugger or the compiler is at work in one of the threads."""
    for thread in list(sys._current_frames()):
        frames = _frames(thread)
        if _is_debugged(frames):
            return True
        for frame in frames:
            file = _file(frame)
            if file.endswith(_COMPILERS) or (
                file.endswith(_COMPILES[0]) and _COMPILES[1] in frame.f_code.co_name
            ):
                return True
    return False


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace(os.sep, "/")


def _several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _waits(frames: list[FrameType]) -> str:
    found = _collective(frames)
    own = next((frame for frame in frames if not stacks.is_library(frame)), None)
    at = f" at {stacks.place(own)}" if own is not None else ""
    if found is not None:
        return f"It waits for the other ranks in {found[0]}{at}."
    return f"It is{at}." if at else "It is in no code of yours."


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").rstrip()
