"""Copies ahead of the loop: ordering and lifetimes, on a device made of queues that run late.

The fake device runs a queued operation only when something waits for it, and then the loop's
stream as late as it can: a copy whose source has gone, or a computation on a batch that has not
arrived or whose memory is used again, reads something else than it should.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hasten.feed import Plan
from hasten.feed.place import Ahead

DEVICE = torch.device("cpu")  # of the fake: its tensors are host tensors with a name of their own
GONE = -1.0


class FakeTensor(torch.Tensor):
    """A tensor of the fake device; remembers the streams that it was recorded on."""

    streams: list[FakeStream]

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[tuple[Callable[[], None], FakeEvent | None]] = deque()

    def add(self, operation: Callable[[], None], event: FakeEvent | None = None) -> None:
        self.queue.append((operation, event))

    def run_until(self, event: FakeEvent | None) -> None:
        while self.queue:
            operation, marker = self.queue.popleft()
            operation()
            if marker is not None and marker is event:
                return

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event.synchronize)


class FakeEvent:
    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.done = False

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.add(self._finish, self)

    def _finish(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if not self.done and self.stream is not None:
            self.stream.run_until(self)


class FakeRuntime:
    """What `hasten.devices.runtime` offers, for the fake device."""

    def __init__(self) -> None:
        self.main = FakeStream("main")
        self.side = FakeStream("side")
        self.current = self.main
        self.blocking = 0

    def can_overlap(self, device: torch.device) -> bool:
        return True

    def stream(self, device: torch.device) -> FakeStream:
        return self.side

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self, device: torch.device) -> FakeEvent:
        return FakeEvent()

    def move(self, batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
        moved = []
        for source in batch:
            target = torch.full_like(source, GONE).as_subclass(FakeTensor)
            target.streams = []
            memory = _memory[source.data_ptr()]  # not the tensor: a copy keeps nothing alive
            values = target.numpy()

            def copy(values: Any = values, memory: Any = memory) -> None:
                values[:] = memory

            if non_blocking:
                self.current.add(copy)
            else:
                self.blocking += 1
                copy()
            moved.append(target)
        return moved


_memory: dict[int, Any] = {}


def host_batch(value: float) -> list[torch.Tensor]:
    """A batch whose memory is given to somebody else once nobody holds it."""
    memory = np.full(4, value, dtype=np.float32)
    tensor = torch.from_numpy(memory)
    _memory[tensor.data_ptr()] = memory
    weakref.finalize(tensor, memory.fill, GONE)
    return [tensor]


def host_items(count: int, made: list[int]) -> Iterator[Any]:
    for number in range(count):
        made.append(number)
        yield number, host_batch(float(number)), [number]


PLAN = Plan(name="gather", reason="", ahead_batches=2)


def consume(on: FakeRuntime, items: Iterator[Any], seen: list[float]) -> Iterator[Any]:
    """A loop whose computation on each batch is queued, and reads it when it runs."""
    for item in items:
        (batch,) = item[1]

        def compute(batch: Any = batch) -> None:
            seen.append(float(batch.mean()))

        on.main.add(compute)
        yield item


@pytest.fixture
def on() -> FakeRuntime:
    _memory.clear()
    return FakeRuntime()


@pytest.mark.parametrize("late", [False, True])
def test_each_computation_finds_its_batch_whenever_it_runs(on: FakeRuntime, late: bool) -> None:
    seen: list[float] = []
    ahead = Ahead(DEVICE, on=on, move=on.move)
    given = []
    for item in consume(on, ahead.place(host_items(30, []), PLAN), seen):
        given.append(item[0])
        if not late:  # even then, the loop's stream must wait for the copy
            on.main.run_until(None)
    on.main.run_until(None)
    assert given == list(range(30))
    assert seen == [float(number) for number in range(30)]


class InPlace:
    """A batch whose `to` puts the device's tensors in the place of the host's."""

    def __init__(self, x: list[torch.Tensor]) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        raise NotImplementedError


def test_what_moves_in_place_is_held_until_its_copy_has_run(on: FakeRuntime) -> None:
    def move(batch: InPlace, device: torch.device, *, non_blocking: bool) -> InPlace:
        batch.x = on.move(batch.x, device, non_blocking=non_blocking)
        return batch

    given = ((number, InPlace(host_batch(float(number))), [number]) for number in range(9))
    seen: list[float] = []
    for _, batch, _ in Ahead(DEVICE, on=on, move=move).place(given, PLAN):
        on.main.add(lambda x=batch.x[0]: seen.append(float(x.mean())))
    on.main.run_until(None)
    assert seen == [float(number) for number in range(9)]


def test_two_batches_are_on_their_way_while_one_is_computed(on: FakeRuntime) -> None:
    made: list[int] = []
    batches = Ahead(DEVICE, on=on, move=on.move).place(host_items(9, made), PLAN)
    assert made == []
    next(batches)
    assert made == [0, 1]
    next(batches)
    assert made == [0, 1, 2]
    assert len(on.side.queue) > 0, "the host has not waited for copies"
    batches.close()
    assert not on.side.queue, "closing lets copies under way finish before their source goes"


def test_the_loop_s_stream_is_told_of_and_recorded(on: FakeRuntime) -> None:
    batches = Ahead(DEVICE, on=on, move=on.move).place(host_items(3, []), PLAN)
    for _, (batch,), _ in batches:
        assert batch.streams == [on.main]
        waits = [operation for operation, _ in on.main.queue]
        assert waits, "the loop's stream waits for the copy"
        on.main.queue.clear()


def test_bytes_bound_the_batches_ahead(on: FakeRuntime) -> None:
    plan = replace(PLAN, ahead_bytes=16)
    made: list[int] = []
    batches = Ahead(DEVICE, on=on, move=on.move).place(host_items(9, made), plan)
    next(batches)
    assert made == [0], "a batch of 16 bytes fills it"
    batches.close()


@pytest.mark.parametrize(("bytes_", "ahead"), [(31, 1), (32, 2), (1 << 30, 2)])
def test_bytes_bound_them_before_they_are_exceeded(
    on: FakeRuntime, bytes_: int, ahead: int
) -> None:
    plan = replace(PLAN, ahead_bytes=bytes_)
    made: list[int] = []
    batches = Ahead(DEVICE, on=on, move=on.move).place(host_items(9, made), plan)
    for number in range(4):
        next(batches)
        assert len(made) == number + ahead, "each has 16 bytes"
    batches.close()


@pytest.mark.parametrize(("batches", "behind"), [(6, 6), (3, 3), (1, 2), (0.5, 2), (1000, 40)])
def test_batches_that_the_device_still_computes_with_are_bounded_too(
    on: FakeRuntime, batches: float, behind: int
) -> None:
    """Their memory goes to nobody else until it is done with them, and the host may be far ahead:
    this device computes only where something waits for it."""
    seen: list[float] = []
    most = 0
    plan = replace(PLAN, ahead_bytes=int(16 * batches))
    placed = Ahead(DEVICE, on=on, move=on.move).place(host_items(40, []), plan)
    for given, _ in enumerate(consume(on, placed, seen), 1):
        most = max(most, given - len(seen))
    assert most == behind
    on.main.run_until(None)
    assert seen == [float(number) for number in range(40)]


def test_small_batches_are_marked_seldom(on: FakeRuntime) -> None:
    """Each mark costs the host some microseconds, and many of them are in a GiB."""
    marks: list[FakeEvent] = []

    class Counted(FakeEvent):
        def record(self, stream: FakeStream) -> None:
            super().record(stream)
            if stream is on.main:
                marks.append(self)

    on.event = lambda device: Counted()  # type: ignore[method-assign]
    plan = replace(PLAN, ahead_bytes=16 * 160)
    for _ in Ahead(DEVICE, on=on, move=on.move).place(host_items(40, []), plan):
        pass
    assert len(marks) == 4, "of ten batches each, a sixteenth of what is allowed"


def test_host_batches_held_are_few(on: FakeRuntime) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def items() -> Iterator[Any]:
        for number in range(30):
            batch = host_batch(float(number))
            alive.append(weakref.ref(batch[0]))
            yield number, batch, [number]
            del batch

    most = 0
    for _ in Ahead(DEVICE, on=on, move=on.move).place(items(), PLAN):
        most = max(most, sum(ref() is not None for ref in alive))
    assert most <= 6


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_the_feed_raises_comes_through(on: FakeRuntime, error: type[BaseException]) -> None:
    def items() -> Iterator[Any]:
        yield from host_items(2, [])
        raise error

    found = []
    with pytest.raises(error):
        for item in Ahead(DEVICE, on=on, move=on.move).place(items(), PLAN):
            found.append(item[0])
    assert not on.side.queue


def test_a_device_that_cannot_overlap_gets_blocking_copies(on: FakeRuntime) -> None:
    plan = Plan(name="gather", reason="")
    for number, (batch,), _ in Ahead(DEVICE, on=on, move=on.move).place(host_items(4, []), plan):
        assert batch.mean() == number
    assert on.blocking == 4
    assert not on.side.queue


def test_copying_is_timed_and_making_batches_is_not(on: FakeRuntime) -> None:
    now = [0.0]

    def items() -> Iterator[Any]:
        for item in host_items(3, []):
            now[0] += 100
            yield item

    def move(*arguments: Any, **options: Any) -> Any:
        now[0] += 2
        return on.move(*arguments, **options)

    for plan in (PLAN, Plan(name="gather", reason="")):
        ahead = Ahead(DEVICE, on=on, move=move, clock=lambda: now[0])
        for _ in ahead.place(items(), plan):
            now[0] += 50
        assert ahead.copy_seconds == 6
