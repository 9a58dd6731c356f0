"""How late a thread comes to what it waits for: a core, or the interpreter's lock."""

from __future__ import annotations

import os
import time

from hasten.feed.awaited import Awaited

_TICK_S = 0.0005
_LATE_S = 0.0001  # a thread that got the interpreter so late has waited for its lock
_IDLE_S = 0.006  # in which it is seen how late one comes anyway


class Queued:
    """How long this thread has waited for a core, where the system counts it (Linux)."""

    def __enter__(self) -> Queued:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def waited(self) -> float:
        """In seconds, so far; always 0 where nobody counts."""
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9


def queued_s() -> float:
    """For how long this thread has waited for a core so far (see `Queued`)."""
    with Queued() as queue:
        return queue.waited()


class Lock:
    """How often another thread gets the interpreter's lock at once: it asks every half ms.

    What it waits for a core is not counted, and how late it comes while nobody holds the lock is
    seen first. Samples that call PyTorch let go of the lock for moments, so that waiting is
    short; but it is waiting. (Two threads that make samples would tell nothing on a busy machine,
    where they wait for a core instead of for each other.)
    """

    def __init__(self) -> None:
        self._late: list[float] = []
        self._idle: list[float] = []
        self._over = False
        self._thread = Awaited(self._ask, name="hasten-feed-lock")

    def __enter__(self) -> Lock:
        try:
            self._thread.start()
        except RuntimeError:  # there can be no more threads: nothing is told then
            return self
        time.sleep(_IDLE_S)
        self._idle, self._late = self._late, []
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask no more: it takes the lock itself, if for moments."""
        self._over = True
        if self._thread.ident is not None:
            self._thread.join()

    @staticmethod
    def tells(each_s: float) -> bool:
        """Whether samples take long enough for anybody to be late."""
        return each_s >= 2 * _LATE_S

    def free(self, each_s: float) -> float | None:
        """Share of the time; None where samples are so short that nobody would be late."""
        if not self._late or not self.tells(each_s):
            return None
        # The least: while the thread is started, it may be late for other reasons.
        usual = min(self._idle, default=0.0)
        if each_s < 2 * usual:
            return None
        # By time, not by count: one that waits for long asks seldom.
        prompt = sum(_TICK_S + each for each in self._late if each < max(_LATE_S, 1.5 * usual))
        return prompt / sum(_TICK_S + each for each in self._late)

    def _ask(self) -> None:
        with Queued() as queue:
            while not self._over:
                before, queued = time.perf_counter(), queue.waited()
                time.sleep(_TICK_S)
                late = time.perf_counter() - before - _TICK_S - (queue.waited() - queued)
                self._late.append(late)
