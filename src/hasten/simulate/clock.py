"""The virtual clock: when the host is, and when each queue of each device will be done.

Seconds here follow from a device's data sheet and the sizes of the tensors. They order events
and tell whether the host waited; they are never a measured speed.
"""

from __future__ import annotations

import threading


class Queue:
    """A stream of one device: work in order, done at a known virtual time."""

    __slots__ = ("done_s", "index", "number", "priority")

    def __init__(self, index: int, number: int, priority: int = 0) -> None:
        self.index = index
        self.number = number
        self.priority = priority
        self.done_s = 0.0


class Clock:
    """Virtual seconds since the simulation began."""

    def __init__(self) -> None:
        self.host_s = 0.0
        """Where the host is."""
        self.launches = 0
        """Operators launched on any device so far."""
        self.lock = threading.Lock()

    def launch(self, queue: Queue, launch_s: float, work_s: float) -> float:
        """Let the host launch work on a queue; return when the work will be done."""
        self.launches += 1
        self.host_s += launch_s
        start = self.host_s if self.host_s > queue.done_s else queue.done_s
        queue.done_s = start + work_s
        return queue.done_s

    def wait(self, until_s: float) -> float:
        """Let the host wait; return for how long it did."""
        waited = until_s - self.host_s
        if waited <= 0:
            return 0.0
        self.host_s = until_s
        return waited
