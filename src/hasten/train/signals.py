"""Signals that ask a run to stop: noted at once, obeyed when the step is done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# SIGHUP: the terminal or the connection was closed. Windows has none.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_WATCHED = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class StopSignals:
    """While entered, the first Ctrl-C or SIGTERM sets :attr:`received`; a second one acts at once.

    It acts as it did before: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process.

    Handlers can only be set in the main thread of the main interpreter; elsewhere (a notebook's
    worker, a test's thread) nothing is watched and Python's own behaviour stays.
    """

    def __init__(self) -> None:
        self.received: int | None = None
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
        self.received = number
        self._restore()  # the second signal does what it did before hasten came

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
