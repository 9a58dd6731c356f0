"""Threads that can be waited for while signals come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Awaited(threading.Thread):
    """A thread whose `join` may be left by what a signal handler raises, and called again.

    Python's own (up to 3.12) then takes the thread for ended, while it works on: nobody waits for
    it any more, neither who joins it again nor the interpreter as it ends, which kills it amid a
    file or C++ code (github.com/python/cpython/issues/90882).
    """

    def __init__(
        self, work: Callable[..., Any], *given: Any, name: str | None = None, daemon: bool = True
    ) -> None:
        super().__init__(target=work, args=given, name=name, daemon=daemon)
        self._left = threading.Event()

    def run(self) -> None:
        """The work."""
        try:
            super().run()
        finally:
            self._left.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for so many seconds."""
        if not self.is_alive() or self._left.wait(timeout):  # in a fork it is not alive
            super().join(timeout)


def in_spite_of_signals(end: Callable[[], None]) -> None:
    """End something; where a signal handler raises meanwhile (Ctrl-C), begin that anew before its
    error goes on, so that no thread is left for having been the second to be waited for.

    The next signal does leave it: what is waited for may take long.
    """
    try:
        end()
    except BaseException:
        end()
        raise
