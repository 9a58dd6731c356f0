"""From host batches to batches on a device: ahead of the loop, beside its computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from hasten.devices import move, runtime
from hasten.feed.plan import Plan
from hasten.feed.samples import pinned
from hasten.feed.sources import Item

Clock = Callable[[], float]

_HELD = 4  # host batches kept alive for copies under way, before the host waits for one


class Ahead:
    """Copies batches to a device on a stream of their own while the loop computes.

    Depth is bounded in batches (`plan.ahead_batches`) and bytes. Each batch has an event: the
    loop's stream waits for it, the host does not. The memory of a batch is used by two streams,
    so each tensor is recorded on the loop's (the allocator keeps it until that is done with it),
    and the host batch is held until its copy has run.

    Attributes:
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

    def pin(self, items: Iterator[Item]) -> Generator[Item, None, None]:
        """The same batches in page-locked memory, which PyTorch keeps for use again."""
        for number, batch, indices in items:
            begin = self._clock()
            batch = pinned(batch)
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
        ready: deque[tuple[int, Any, int, Callable[[], Any]]] = deque()
        waiting_bytes = 0
        more = True
        while True:
            while more and len(ready) < plan.ahead_batches:
                if ready and waiting_bytes >= plan.ahead_bytes:
                    break
                item = next(items, None)
                if item is None:
                    more = False
                    break
                number, host, indices = item
                del item
                size = sum(t.numel() * t.element_size() for t in tensors(host))
                copied: Callable[[], Any]
                if thread is None:
                    begin = self._clock()
                    copied = partial(tuple, self._copied(host, side, held))
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
            batch, event = copied()
            self.copy_seconds += self._clock() - begin
            del copied
            current = self._on.current_stream(self._device)
            current.wait_event(event)
            for tensor in tensors(batch):
                if tensor.device == self._device:
                    tensor.record_stream(current)
            yield number, batch, indices
            del batch, event  # else the loop's batch lives on while the next one is made

    def _pinned_and_copied(
        self, host: Any, side: Any, held: deque[tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        return self._copied(pinned(host), side, held)

    def _copied(self, host: Any, side: Any, held: deque[tuple[Any, Any]]) -> tuple[Any, Any]:
        """The batch there, and the event of its copy, which is queued."""
        with self._on.on_stream(side):
            batch = self._move(host, self._device, non_blocking=True)
            event = self._on.event(self._device)
            event.record(side)
        held.append((event, host))
        self._let_go(held)
        return batch, event

    @staticmethod
    def _let_go(held: deque[tuple[Any, Any]]) -> None:
        while held and held[0][0].query():
            held.popleft()
        if len(held) > _HELD:
            held[0][0].synchronize()
            held.popleft()  # not before: this may be the last that holds the copy's source


def tensors(batch: Any) -> Iterable[torch.Tensor]:
    """The tensors in a batch of any nesting."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors(getattr(batch, field.name))
