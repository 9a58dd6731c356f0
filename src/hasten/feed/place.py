"""From host batches to batches on a device: ahead of the loop, beside its computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
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
        copy_seconds: host time spent pinning, copying and queueing, in total.
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
        try:
            yield from self._queued(items, plan, side, held)
        finally:
            for event, _ in held:  # the copies' source must outlive them
                event.synchronize()

    def _queued(
        self, items: Iterator[Item], plan: Plan, side: Any, held: deque[tuple[Any, Any]]
    ) -> Generator[Item, None, None]:
        ready: deque[tuple[Item, Any, int]] = deque()
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
                begin = self._clock()
                number, host, indices = item
                with self._on.on_stream(side):
                    batch = self._move(host, self._device, non_blocking=True)
                    event = self._on.event(self._device)
                    event.record(side)
                size = sum(t.numel() * t.element_size() for t in tensors(batch))
                ready.append(((number, batch, indices), event, size))
                waiting_bytes += size
                held.append((event, host))
                self._let_go(held)
                self.copy_seconds += self._clock() - begin
            if not ready:
                return
            item, event, size = ready.popleft()
            waiting_bytes -= size
            current = self._on.current_stream(self._device)
            current.wait_event(event)
            for tensor in tensors(item[1]):
                if tensor.device == self._device:
                    tensor.record_stream(current)
            yield item
            del item, event  # else the loop's batch lives on while the next one is made

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
