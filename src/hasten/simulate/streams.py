"""Streams and events of the simulated device: queues of the virtual clock."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hasten.simulate import current
from hasten.simulate.clock import Queue
from hasten.simulate.naming import checked, index_of_name
from hasten.simulate.wording import cuda_error

_numbers = itertools.count(1)


def _reached(time_s: float) -> bool:
    """Whether the host is there; asking takes it a moment, so that who polls gets on."""
    session = current.require()
    if time_s <= session.clock.host_s:
        return True
    session.clock.host_s += session.spec.launch_s
    return False


class Stream:
    """Stands for `torch.cuda.Stream`: work in order, beside the work of other streams."""

    def __init__(self, device: Any = None, priority: int = 0, **given: Any) -> None:
        queue = given.get("queue")
        if queue is None:
            index = index_of_name(device)
            index = current.thread.device if index is None else index
            queue = Queue(index, next(_numbers), priority)
            if current.session is not None:
                current.session.lifetimes.active = True
        self._queue: Queue = queue
        self._before: list[tuple[int, Queue | None]] = []

    @property
    def device(self) -> torch.device:
        """The device it belongs to."""
        return torch.device("cuda", self._queue.index)

    @property
    def device_index(self) -> int:
        """The index of its device."""
        return self._queue.index

    @property
    def stream_id(self) -> int:
        """A number of its own; 0 for a device's default stream."""
        return self._queue.number

    cuda_stream = stream_id

    @property
    def priority(self) -> int:
        """The priority that it was made with."""
        return self._queue.priority

    @property
    def device_type(self) -> int:
        """The number of PyTorch's kind of device."""
        return 1

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -5

    def query(self) -> bool:
        """Whether all its work is done by now, in virtual time."""
        return _reached(self._queue.done_s)

    def is_capturing(self) -> bool:
        """Whether a graph is being captured: never."""
        return False

    def synchronize(self) -> None:
        """Let the host wait for its work."""
        session = current.require()
        session.warn_of_wait()
        session.wait_for(self._queue.done_s, "stream", self._queue.index)

    def wait_stream(self, stream: Stream) -> None:
        """Let later work here begin after all that the other has now."""
        self._queue.done_s = max(self._queue.done_s, stream._queue.done_s)

    def wait_event(self, event: Event) -> None:
        """Let later work here begin after an event."""
        if event.time_s is not None:
            self._queue.done_s = max(self._queue.done_s, event.time_s)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event behind the work so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._queue is self._queue

    def __hash__(self) -> int:
        return hash(id(self._queue))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"

    def __enter__(self) -> Stream:
        streams = current.thread.streams
        self._before.append((current.thread.device, streams.get(self._queue.index)))
        streams[self._queue.index] = self._queue
        current.thread.device = self._queue.index
        return self

    def __exit__(self, *_: object) -> None:
        device, queue = self._before.pop()
        current.thread.device = device
        if queue is None:
            current.thread.streams.pop(self._queue.index, None)
        else:
            current.thread.streams[self._queue.index] = queue


class StreamContext:
    """Stands for ``torch.cuda.stream(stream)``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


class Event:
    """Stands for `torch.cuda.Event`; its times are the virtual clock's, never measured."""

    def __init__(
        self,
        device: Any = None,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **_: Any,
    ) -> None:
        self.enable_timing = enable_timing
        self.time_s: float | None = None
        self._index = 0
        self._session: object = None

    def record(self, stream: Stream | None = None) -> None:
        """Record behind the work of a stream, the current one by default."""
        session = current.require()
        queue = session.queue(current.thread.device) if stream is None else stream._queue
        self._index, self._session = queue.index, session
        self.time_s = max(queue.done_s, session.clock.host_s)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of a stream begin after it."""
        target = current_stream() if stream is None else stream
        target.wait_event(self)

    def query(self) -> bool:
        """Whether it has been reached by now, in virtual time."""
        return self.time_s is None or _reached(self.time_s)

    def synchronize(self) -> None:
        """Let the host wait for it; nothing to wait for once its simulation has ended."""
        if self.time_s is not None and self._session is current.session is not None:
            current.require().wait_for(self.time_s, "event", self._index)

    def elapsed_time(self, end_event: Event) -> float:
        """Virtual milliseconds to another event.

        Raises:
            RuntimeError: one of them was made without timing, or not recorded.
            torch.AcceleratorError: one of them has not been reached.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.time_s is None or end_event.time_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise cuda_error("device not ready")
        return (end_event.time_s - self.time_s) * 1e3

    @property
    def cuda_event(self) -> int:
        """The handle: 0 before it is first recorded."""
        return 0 if self.time_s is None else id(self)

    def __repr__(self) -> str:
        if self.time_s is None:
            return "<torch.cuda.Event uninitialized>"
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


def current_stream(device: Any = None) -> Stream:
    """The calling thread's current stream of a device."""
    index = index_of_name(device)
    index = current.thread.device if index is None else checked(index)
    return Stream(queue=current.require().queue(index))


def default_stream(device: Any = None) -> Stream:
    """A device's default stream."""
    index = index_of_name(device)
    index = current.thread.device if index is None else checked(index)
    return Stream(queue=current.require().queues[index][0])


def set_stream(stream: Stream) -> None:
    """Make a stream the current one of its device, and its device the current one."""
    current.thread.streams[stream.device_index] = stream._queue
    current.thread.device = stream.device_index


def external(data_ptr: int, device: Any = None) -> Stream:
    """Stands for ``torch.cuda.get_stream_from_external``: a stream that another library made."""
    return Stream(device)
