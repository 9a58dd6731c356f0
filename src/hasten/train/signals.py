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
    within :data:`SAME_S` of the first counts as the first, but for a Ctrl-C where no launcher is;
    also when the run has saved and ended by then, so that its exit status still says so.

    Handlers can only be set in the main thread of the main interpreter; elsewhere (a notebook's
    worker, a test's thread) nothing is watched and Python's own behaviour stays.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._received: int | None = None
        self._clock = clock
        self._noted_s = 0.0
        self._over = False
        self._before: dict[int, Any] = {}

    @property
    def received(self) -> int | None:
        """The number of the signal that asks to stop: one that came here, or that another process
        has told of (which counts as the first, too: a launcher's own may follow)."""
        return self._received

    @received.setter
    def received(self, number: int | None) -> None:
        if number is not None and self._received is None:
            self._noted_s = self._clock()
        self._received = number

    def __enter__(self) -> StopSignals:
        self._restore()  # what the end of the last time left
        self._received, self._over = None, False
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
        number, self._received = self._received, None
        self._over = number is not None and not _by_hand(number)
        # Else the handlers stay for the signal's repetitions, and give way to what comes later.
        self._restore(lambda number: not self._over or _by_hand(number))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None and not self._over:
            self.received = number
            return
        if not _by_hand(number) and self._clock() - self._noted_s < SAME_S:
            return
        self._restore()  # the second signal does what it did before hasten came
        if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
            # What it does, but for the tracebacks of what was being closed down.
            raise KeyboardInterrupt from None
        signal.raise_signal(number)

    def _restore(self, which: Callable[[int], bool] = lambda number: True) -> None:
        for number in [number for number in self._before if which(number)]:
            signal.signal(number, self._before.pop(number))


def _by_hand(number: int) -> bool:
    return number == signal.SIGINT and not any(name in os.environ for name in _LAUNCHERS)
