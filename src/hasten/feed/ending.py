"""As the program ends: what is closed while all works yet, and loops in threads that go on."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Generator
from typing import Protocol, TypeVar

_T = TypeVar("_T")

_PATIENCE_S = 1.0  # with a batch that a daemon thread is making


class Closable(Protocol):
    """Has threads or processes."""

    def close(self) -> None:
        """End them. Called by another thread than theirs, and perhaps not for the first time."""


_closables: weakref.WeakSet[Closable] = weakref.WeakSet()
_making: dict[object, threading.Thread] = {}
_lock = threading.Lock()
_ends = False


def close_at_end(thing: Closable) -> None:
    """Have it closed as the program ends, if it is there still."""
    with _lock:
        _closables.add(thing)


def until_the_end(items: Generator[_T, None, None]) -> Generator[_T, None, None]:
    """The same. A daemon thread gets none any more once the program ends.

    Whoever computes then in a thread may be stopped by the interpreter amid C++ code, which ends
    the process with an error.

    Raises:
        SystemExit: it ends; threads say nothing of that.
    """
    while True:
        # Each time: an iterator may be begun in one thread and gone on with in another.
        main = threading.current_thread() is threading.main_thread()
        item = next(items, None) if main else _next_beside(items)
        if item is None:
            return
        yield item
        del item


def _next_beside(items: Generator[_T, None, None]) -> _T | None:
    """The next one, which the program's end waits for."""
    making = object()
    with _lock:
        _making[making] = threading.current_thread()
    item = None
    try:
        item = None if _ends else next(items, None)
    except Exception:
        if not _ends:  # else of what was closed meanwhile
            raise
    finally:
        if not _ends:  # else it is waited for until it has left all that it is in
            _making.pop(making, None)
    if _ends:
        raise SystemExit("the program ends")
    return item


@atexit.register
def _end() -> None:
    global _ends
    with _lock:
        _ends = True
        closables = list(_closables)
        making = list(_making.values())
    for thing in closables:
        thing.close()
    limit = time.monotonic() + _PATIENCE_S
    for thread in making:
        thread.join(max(0.0, limit - time.monotonic()))


def _in_child() -> None:
    """Other threads are not there, and one of them may have had the lock."""
    global _lock
    _lock = threading.Lock()
    _making.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
