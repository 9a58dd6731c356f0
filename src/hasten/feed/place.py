"""From host batches to batches on a device: ahead of the loop, beside its computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.devices import move, runtime
from hasten.devices.holding import held as held_in
from hasten.devices.pinning import pin
from hasten.feed.plan import Plan
from hasten.feed.sources import Item

Clock = Callable[[], float]

_HELD = 4  # host batches kept alive for copies under way, before the host waits for one
_MARKS = 16  # events of the loop's stream, at most, for the bytes that a plan allows


@dataclass(slots=True)
class _Copied:
    """A batch whose copy is queued, with its tensors there and the copy's event; or one that is
    not copied yet, as it is `unseen` what it holds."""

    batch: Any
    unseen: str
    tensors: Sequence[torch.Tensor] = ()
    event: Any = None


def _given(copied: list[_Copied]) -> _Copied:
    return copied.pop()  # held by nobody else then


class _InUse:
    """Batches that the loop has had, and the device may not be done with: it computes late, and
    until then the allocator gives the memory of none of them to another.

    Without a bound they would be as many as the steps that the host is ahead of the device. They
    are marked by events of the loop's stream, one for each part of the bytes that are allowed.
    """

    def __init__(self, on: Any, device: torch.device, most_bytes: int) -> None:
        self._on = on
        self._device = device
        self._most_bytes = most_bytes
        self._marks: deque[tuple[Any, int]] = deque()
        self._bytes = 0  # of all that are marked
        self._unmarked_bytes = 0

    def add(self, size: int) -> None:
        """A batch of so many bytes, for which the loop has queued what it does with it."""
        self._unmarked_bytes += size
        if self._unmarked_bytes * _MARKS < self._most_bytes:
            return
        event = self._on.event(self._device)
        event.record(self._on.current_stream(self._device))
        self._marks.append((event, self._unmarked_bytes))
        self._bytes += self._unmarked_bytes
        self._unmarked_bytes = 0

    def make_room(self, more_bytes: int) -> None:
        """Have the host wait for the device until there is room for so many more bytes.

        Not for the last mark: the device is to have a batch to compute with while one is copied.
        """
        while self._marks:
            event, size = self._marks[0]
            if not event.query():
                wanted = self._bytes + self._unmarked_bytes + more_bytes
                if wanted <= self._most_bytes or len(self._marks) == 1:
                    return
                event.synchronize()
            self._marks.popleft()
            self._bytes -= size


class Ahead:
    """Copies batches to a device on a stream of their own while the loop computes.

    Depth is bounded in batches (`plan.ahead_batches`) and bytes, with those in it that the loop has
    had and the device still computes with. Each batch has an event: the loop's stream waits for it,
    the host does not (but for the device to be done with a batch, where it is so far behind that
    there would be more bytes). The memory of a batch is used by two streams,
    so each tensor is recorded on the loop's (the allocator keeps it until that is done with it),
    and the host's tensors are held until their copy has run. A batch that is moved by a `to` of
    its own and cannot be looked into has neither: it is copied when the loop asks for it, on the
    loop's stream.

    Attributes:
        unseen: the type of such a batch, once there was one; else "".
        unpinned: some of the first batch's tensors were to be pinned and are not.
        copy_seconds: host time of the loop's thread spent pinning, copying and queueing, or
            waiting for the thread that does, in total.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        on: Any = runtime,
        move: Callable[..., Any] = move,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`on` is the device's runtime; tests give one that writes down what it is asked."""
        self._device = device
        self._on = on
        self._move = move
        self._clock = clock
        self.copy_seconds = 0.0
        self.unseen = ""
        self.unpinned = False
        self._look = False  # at the next batch, whether it is pinned

    @property
    def notes(self) -> list[str]:
        """What is to be said of the batches that were copied so far."""
        said = []
        if self.unseen:
            said.append(
                f"batches hold a {self.unseen}, which cannot be looked into: they are copied when "
                "the loop asks for them, on its own stream"
            )
        if self.unpinned:
            said.append(
                "batches hold tensors that are not page-locked, in an object with no pin_memory() "
                "of its own: their copies hold up the host"
            )
        return said

    def pin(self, items: Iterator[Item]) -> Generator[Item, None, None]:
        """The same batches in page-locked memory, which PyTorch keeps for use again."""
        for number, batch, indices in items:
            begin = self._clock()
            batch = pin(batch)
            self.copy_seconds += self._clock() - begin
            yield number, batch, indices
            del batch

    def place(self, items: Iterator[Item], plan: Plan) -> Generator[Item, None, None]:
        """The same batches on the device, in the same order."""
        if plan.ahead_batches:
            return self._overlapped(items, plan)
        return self._blocking(items)

    def _blocking(self, items: Iterator[Item]) -> Generator[Item, None, None]:
        for number, batch, indices in items:
            begin = self._clock()
            placed = self._move(batch, self._device, non_blocking=False)
            self.copy_seconds += self._clock() - begin
            yield number, placed, indices

    def _overlapped(self, items: Iterator[Item], plan: Plan) -> Generator[Item, None, None]:
        side = self._on.stream(self._device)
        held: deque[tuple[Any, Any]] = deque()
        self._look = plan.pinned
        # In a thread of its own where batches are pinned on the way: that copies every byte.
        thread = self._thread() if plan.pins_beside else None
        try:
            yield from self._queued(items, plan, side, held, thread)
        finally:
            if thread is not None:
                thread.shutdown(cancel_futures=True)
            for event, _ in held:  # the copies' source must outlive them
                event.synchronize()

    def _thread(self) -> ThreadPoolExecutor:
        def begin() -> None:
            torch.set_num_threads(1)  # of this thread alone
            self._on.make_current(self._device)

        return ThreadPoolExecutor(1, thread_name_prefix="hasten-feed-pin", initializer=begin)

    def _queued(
        self,
        items: Iterator[Item],
        plan: Plan,
        side: Any,
        held: deque[tuple[Any, Any]],
        thread: ThreadPoolExecutor | None,
    ) -> Generator[Item, None, None]:
        ready: deque[tuple[int, Any, int, Callable[[], _Copied]]] = deque()
        in_use = _InUse(self._on, self._device, plan.ahead_bytes)
        waiting_bytes = largest = 0
        more = True
        while True:
            while more and len(ready) < plan.ahead_batches:
                if ready and waiting_bytes + largest > plan.ahead_bytes:
                    break
                item = next(items, None)
                if item is None:
                    more = False
                    break
                number, host, indices = item
                del item
                size = held_in(host).bytes
                largest = max(largest, size)
                in_use.make_room(waiting_bytes + size)
                copied: Callable[[], _Copied]
                if thread is None:
                    begin = self._clock()
                    copied = partial(_given, [self._copied(host, side, held)])
                    self.copy_seconds += self._clock() - begin
                else:
                    copied = thread.submit(self._pinned_and_copied, host, side, held).result
                del host
                ready.append((number, indices, size, copied))
                waiting_bytes += size
            if not ready:
                return
            number, indices, size, copied = ready.popleft()
            waiting_bytes -= size
            begin = self._clock()
            batch = self._for_the_loop(copied())
            self.copy_seconds += self._clock() - begin
            del copied
            yield number, batch, indices
            del batch  # else the loop's batch lives on while the next one is made
            in_use.add(size)

    def _pinned_and_copied(self, host: Any, side: Any, held: deque[tuple[Any, Any]]) -> _Copied:
        return self._copied(pin(host), side, held)

    def _copied(self, host: Any, side: Any, held: deque[tuple[Any, Any]]) -> _Copied:
        """The batch there, its copy queued; or here, where the loop's thread has to copy it."""
        source = held_in(host)
        if source.unseen:
            return _Copied(host, source.unseen)
        with self._on.on_stream(side):
            batch = self._move(host, self._device, non_blocking=True)
            event = self._on.event(self._device)
            event.record(side)
        held.append((event, (host, source)))  # its own `to` may have put others in their place
        self._let_go(held)
        there = held_in(batch)
        if there.unseen:  # only now
            with self._on.on_stream(side):
                back = self._move(batch, torch.device("cpu"), non_blocking=False)
            return _Copied(back, there.unseen)
        if self._look:
            self._look, stay = False, {id(tensor) for tensor in there.tensors}
            moved = (t for t in source.tensors if t.is_cpu and id(t) not in stay)
            self.unpinned = not all(tensor.is_pinned() for tensor in moved)
        return _Copied(batch, "", there.tensors, event)

    def _for_the_loop(self, copied: _Copied) -> Any:
        """The batch, which what the loop queues from here on may use, and nothing else will."""
        if copied.unseen:
            self.unseen = copied.unseen
            return self._move(copied.batch, self._device, non_blocking=False)
        current = self._on.current_stream(self._device)
        current.wait_event(copied.event)
        for tensor in copied.tensors:
            if tensor.device == self._device:
                tensor.record_stream(current)
        return copied.batch

    @staticmethod
    def _let_go(held: deque[tuple[Any, Any]]) -> None:
        while held and held[0][0].query():
            held.popleft()
        if len(held) > _HELD:
            held[0][0].synchronize()
            held.popleft()  # not before: this may be the last that holds the copy's source
