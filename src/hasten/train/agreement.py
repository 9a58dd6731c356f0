"""What the processes of a run agree on while it trains, and where all but the first one speak."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from hasten.errors import HastenError
from hasten.train.world import World

FOLDER = "ranks"
_EVERY_S = 0.5
_MOST_BATCHES = 10_000


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

    Without a folder it goes nowhere: the first process says the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._file: TextIO | None = None
        self._waiting: list[str] = []

    def write(self, text: str) -> int:
        """Keep the text for the file, or write it there."""
        if self._file is None:
            self._waiting.append(text)
        else:
            self._file.write(text)
            self._file.flush()
        return len(text)

    def open(self, folder: Path) -> None:
        """Write from now on to ``ranks/rank-N.log`` of a run's folder, at its end.

        Raises:
            HastenError: it cannot be written.
        """
        path = folder / FOLDER / f"rank-{self._rank}.log"
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise HastenError(f"cannot write {path}: {error.strerror}") from error
        waiting, self._waiting = self._waiting, []
        self.write("".join(waiting))

    def shut(self) -> None:
        """Close the file; what is said later is kept for another."""
        if self._file is not None:
            self._file.close()
            self._file = None
