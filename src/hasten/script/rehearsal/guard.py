"""What keeps a rehearsal from hanging: a limit of wall clock, prompts and downloads named."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hasten.script.rehearsal.places import Territory

_PROMPT_S = 10.0
_NETWORK_S = 20.0
_GRACE_S = 3.0  # for the script's own `finally` after it was told to stop
_LOOK_S = 0.1
_NETWORK = (
    "/socket.py",
    "/ssl.py",
    "/http/client.py",
    "/urllib/request.py",
    "/selectors.py",
)


class Stop(BaseException):
    """Ends the script from inside: the rehearsal has seen enough, or waited too long."""


class Guard:
    """A thread that watches the script's main thread."""

    def __init__(
        self,
        timeout_s: float,
        territory: Territory,
        finish: Callable[[], None],
        abandon: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._territory, self._finish = timeout_s, territory, finish
        self._clock, self._abandon = clock, abandon
        self._main = threading.main_thread().ident or 0
        self._prompted: float | None = None
        self._done = threading.Event()
        self.reason = ""  # why the script was stopped
        self.hung = False  # whether the limit, not a prompt or a download, stopped it

    def start(self) -> None:
        """Begin to watch."""
        plain = builtins.input
        plain_read = sys.stdin.readline if sys.stdin is not None else None

        def watched(function: Any) -> Any:
            def reading(*args: Any, **kwargs: Any) -> Any:
                self._prompted = self._clock()
                try:
                    return function(*args, **kwargs)
                finally:
                    self._prompted = None

            return reading

        builtins.input = watched(plain)
        if plain_read is not None:
            sys.stdin = _Watched(sys.stdin, watched)
        threading.Thread(target=self._watch, name="hasten-rehearsal", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._done.set()

    def _watch(self) -> None:
        began, parent = self._clock(), os.getppid()
        network: float | None = None
        while not self._done.wait(_LOOK_S):
            if os.getppid() != parent:  # nobody waits for the report any more
                self._abandon()
            now = self._clock()
            frame = sys._current_frames().get(self._main)
            network = (network or now) if self._on_network(frame) else None
            if self._prompted is not None and now - self._prompted > _PROMPT_S:
                return self._stop(
                    f"the script waited for input{self._at(frame)} and was stopped: give the "
                    "answer as an argument, or pipe it in"
                )
            if network is not None and now - network > _NETWORK_S:
                return self._stop(
                    f"the script waited {_NETWORK_S:.0f} s for the network{self._at(frame)} and "
                    "was stopped: download the data before the check"
                )
            if now - began > self._limit_s:
                self.hung = True
                return self._stop(
                    f"the limit of {self._limit_s:g} s passed{self._at(frame)}; what was found "
                    "until then is reported (--timeout-s gives more time)"
                )
        return None

    def _on_network(self, frame: FrameType | None) -> bool:
        for _ in range(6):
            if frame is None:
                return False
            if frame.f_code.co_filename.endswith(_NETWORK):
                return True
            frame = frame.f_back
        return False

    def _at(self, frame: FrameType | None) -> str:
        stack = self._territory.stack(frame) if frame is not None else ()
        return f" at {os.path.relpath(stack[0].file)}:{stack[0].line}" if stack else ""

    def _stop(self, reason: str) -> None:
        import ctypes

        self.reason = reason
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._main), ctypes.py_object(Stop)
        )
        if not self._done.wait(_GRACE_S):
            self._finish()  # the main thread is stuck outside Python: it writes no report itself


class _Watched:
    """Standard input whose reads are known to wait."""

    def __init__(self, stream: Any, watched: Any) -> None:
        self._stream = stream
        for name in ("read", "readline", "readlines"):
            setattr(self, name, watched(getattr(stream, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self.readline, "")

    def readline(self, *args: Any) -> Any:  # replaced by the watched one
        """Read a line."""
        return self._stream.readline(*args)
