"""Whether batches of a DataLoader without workers that are made ahead come sooner for it.

What a batch costs in the loop's thread is seen where some are made there too, to be compared; what
the loop does with them is not known before it does it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from typing import Any

_LATER = 1.05
_EPOCHS = 2  # one after the other: another program may have had the cores in one


class Worth:
    """Watches the epochs of one plan."""

    def __init__(self) -> None:
        self._later = 0
        self._made: list[float] = []

    def made(self, seconds: float) -> None:
        """A batch of the epoch was made in the loop's thread."""
        self._made.append(seconds)

    def timed(self, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The same batches of an epoch, which counts if it comes to its end."""
        self._made.clear()
        began, work_s, given = time.perf_counter(), 0.0, 0
        for item in items:
            given += 1
            before = time.perf_counter()
            yield item
            del item
            work_s += time.perf_counter() - before
        self.epoch(time.perf_counter() - began, work_s, given)

    def epoch(self, seconds: float, work_s: float, batches: int) -> None:
        """One took so long, of which the loop itself worked so long on its batches."""
        if not self._made:
            return
        alone_s = work_s + batches * statistics.median(self._made)
        self._later = self._later + 1 if seconds > _LATER * alone_s else 0

    @property
    def none(self) -> bool:
        """Whether epochs have taken longer than they would have without."""
        return self._later >= _EPOCHS
