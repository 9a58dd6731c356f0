"""Signals that ask a run to stop: noted at once, obeyed when the step is done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# SIGHUP: the terminal or the connection was closed. SIGUSR1: SLURM's notice that the time is
# nearly up (--signal=USR1@120). Windows has neither.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_WATCHED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")

SAME_S = 2.0
"""So long after the first signal another one is the same: a launcher passes on what its processes
were sent as well, and the second must not cut the saving short."""


class StopSignals:
    """While entered, the first Ctrl-C or SIGTERM sets :attr:`received`; a second one acts at once.

    It acts as it did before: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process. What comes
    within :data:`SAME_S` of the first counts as the first, but for a Ctrl-C where no launcher is.

    Handlers can only be set in the main thread of the main interpreter; elsewhere (a notebook's
    worker, a test's thread) nothing is watched and Python's own behaviour stays.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: int | None = None
        self._clock = clock
        self._noted_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                # A signal that was ignored when we began (nohup) stays ignored, and a handler that
                # Python did not set (None) could not be put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        self.received = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if self.received is None:
            self.received, self._noted_s = number, now
            return
        by_hand = number == signal.SIGINT and not any(name in os.environ for name in _LAUNCHERS)
        if not by_hand and now - self._noted_s < SAME_S:
            return
        self._restore()  # the second signal does what it did before hasten came
        signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
