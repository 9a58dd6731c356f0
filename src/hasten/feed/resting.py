"""PyTorch's threads while the loop waits for batches: let go, so that the workers have their cores.

At the end of a parallel region the threads of GNU OpenMP wait for the next one by spinning, for
some 7 ms (docs/notes/001). When the loop waits for worker processes or threads that are as many as
the cores, one of those waits for the spinning to end: of 16 ms for a batch, that was 7.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from hasten.devices import runtime

Clock = Callable[[], float]
Release = Callable[[], None]
_T = TypeVar("_T")

_LONG_S = 0.004  # starting threads anew takes some 0.1 to 0.3 ms, at the next parallel region
_SOFT = 1  # omp_pause_soft
_POLICIES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # who has set them has decided


class Rest:
    """For one who waits, again and again, for `workers` processes or threads to do something."""

    def __init__(
        self, workers: int, release: Release | None = None, clock: Clock = time.perf_counter
    ) -> None:
        """`release` lets the threads go; found here if None."""
        self._workers = workers
        self._release = release
        self._sought = release is not None
        self._clock = clock
        self._usual_s = 0.0

    def during(self, wait: Callable[[], _T]) -> _T:
        """Wait for what is not there yet; without PyTorch's threads, if they stand in the way and
        such waits have been long.
        """
        if self._usual_s > _LONG_S:
            if not self._sought:
                self._sought, self._release = True, _release_for(self._workers)
            if self._release is not None:
                self._release()
        begin = self._clock()
        try:
            return wait()
        finally:
            self._usual_s = (self._usual_s + self._clock() - begin) / 2


def _release_for(workers: int) -> Release | None:
    """How to let this thread's OpenMP threads go; None where that gives the workers nothing."""
    spinning = torch.get_num_threads() - 1
    if not spinning or workers + spinning <= runtime.cores():
        return None
    return releasing()


@cache
def releasing() -> Release | None:
    """Ends the OpenMP threads of the thread that calls it: the next region starts others.

    None where nobody spins: another OpenMP, or a policy of the user's.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _POLICIES):
        return None
    home = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        (path,) = {line[line.index("/") :] for line in lines if home in line and "libgomp" in line}
        pause = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, ValueError, AttributeError):  # none, several, or one of before GCC 9
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int

    def release() -> None:
        pause(_SOFT)

    return release
