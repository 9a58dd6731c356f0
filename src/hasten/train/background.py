"""Work that is done beside training: one piece at a time, and never lost on the way out."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hasten.feed.awaited import Awaited


class Background:
    """Does one piece of work after another in a thread of its own.

    There is a thread only while there is work. It is none that the interpreter kills at its exit:
    a process that ends, for whatever reason short of a kill, ends after it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, when the one before is done."""
        self.wait()
        self._thread = Awaited(self._do, work, name=self._name, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the work under way. A Ctrl-C ends the waiting, not the work."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def fail(self, error: BaseException) -> None:
        """Let an error that came before the work count as the work's."""
        self.wait()
        self._error = error

    def take_error(self) -> BaseException | None:
        """What the last piece of work failed with, told once; None while it is under way."""
        if self.busy:
            return None
        error, self._error = self._error, None
        return error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (it is raised where it can be told)
            self._error = error
