"""What the processes of a run agree on while it trains, and where all but the first one speak."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hasten.errors import HastenError
from hasten.train.world import World

FOLDER = "ranks"
_EVERY_S = 0.5
_MOST_BATCHES = 10_000
_MOST_WAITING = 10_000  # lines of a log


class Agreed(NamedTuple):
    """What holds for all processes."""

    signal: int
    """The number of the signal that one of them received; 0 where none did."""
    save: bool
    """Whether a checkpoint is due."""
    bad: bool
    """Whether one of them has found a loss that is not finite."""


_NOTHING = Agreed(0, False, False)


class Agreement:
    """Agreements at batches that are the same in all processes, about twice a second.

    A clock tells each process when, but no two clocks agree: so the number of batches until the
    next time is a part of each agreement.
    """

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world, self._clock = world, clock
        self._batches = self._last = 0
        self._at = 1
        self._last_s = clock()
        self._agreed = _NOTHING

    def due(self) -> bool:
        """Count a batch; whether the processes agree after it."""
        self._batches += 1
        return self._batches >= self._at

    def reach(self, *, signal: int, save: bool = False, bad: bool = False) -> Agreed:
        """Agree: what one of them says holds for all."""
        now = self._clock()
        batch_s = (now - self._last_s) / max(1, self._batches - self._last)
        wanted = max(1, min(_MOST_BATCHES, int(_EVERY_S / max(batch_s, 1e-9))))
        found = self._world.most([signal, int(save), int(bad), wanted])
        self._last, self._last_s = self._batches, now
        self._at = self._batches + found[3]
        self._agreed = Agreed(found[0], bool(found[1]), bool(found[2]))
        return self._agreed

    def take(self) -> Agreed:
        """What was agreed and not acted on yet."""
        agreed, self._agreed = self._agreed, _NOTHING
        return agreed


class RankLog(io.TextIOBase):
    """What a process says that is not the first: a file of the run's folder, once there is one.

    Without a folder it goes nowhere: the first process says the same. What cannot be written, of a
    full disk say, waits and ends nothing.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._path: Path | None = None
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    def write(self, text: str) -> int:
        """Keep the text for the file, and write there what is kept."""
        self._waiting.append(text)
        if self._path is not None:
            self._write_out(self._path)
        return len(text)

    def _write_out(self, path: Path) -> None:
        try:
            # Opened anew: the folder may have been removed and made again, a file been cut short.
            with _opened(path) as file:
                while self._waiting:
                    file.write(self._waiting[0].encode(errors="backslashreplace"))
                    file.flush()
                    self._waiting.popleft()
        except OSError:
            return  # it waits; the first process says the same, and what is wrong with the disk

    def open(self, folder: Path) -> None:
        """Write from now on to ``ranks/rank-N.log`` of a run's folder, at its end.

        Raises:
            HastenError: it cannot be written.
        """
        path = folder / FOLDER / f"rank-{self._rank}.log"
        try:
            path.parent.mkdir(exist_ok=True)
            _opened(path).close()
        except OSError as error:
            raise HastenError(f"cannot write {path}: {error.strerror}") from error
        self._path = path
        self._write_out(path)

    def shut(self) -> None:
        """Leave the file; what is said later is kept for another."""
        self._path = None


def _opened(path: Path) -> BinaryIO:
    """A file to write on at its end; a link could lead out of the run's folder."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "ab")
