"""Memory that one stream gives back while another still works on it: who gets it next, and when.

PyTorch's allocator keeps the memory of each stream apart. What is freed goes to the next tensor of
the stream that it was taken on, at once, unless `Tensor.record_stream` told of another user.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hasten.simulate.clock import Clock, Queue
from hasten.simulate.frames import Location, locate
from hasten.simulate.records import Hazard


class _Block:
    __slots__ = ("address", "host_s", "nbytes", "queue", "recorded", "ref", "uses")

    def __init__(self, address: int, nbytes: int, queue: Queue) -> None:
        self.address = address
        self.nbytes = nbytes
        self.queue = queue
        self.uses: dict[Queue, tuple[float, Location | None]] = {}
        self.recorded: set[Queue] = set()
        self.host_s = 0.0
        self.ref: Any = None

    def last(self) -> tuple[float, Location | None]:
        """When the last of other streams is done with it, and where that was queued."""
        return max(self.uses.values(), key=lambda use: use[0])

    def __lt__(self, other: _Block) -> bool:
        return self.address < other.address


class Lifetimes:
    """Watches the memory that is taken once there are several streams.

    Attributes:
        active: there are; until then nothing is watched, which costs nothing.
    """

    def __init__(self, record: Callable[[Hazard], None], clock: Clock) -> None:
        self.active = False
        self._record = record
        self._clock = clock
        self._lock = threading.RLock()
        self._blocks: list[_Block] = []  # by address
        self._gone: deque[_Block] = deque()  # freed at any moment, by any thread
        self._given_back: list[_Block] = []  # with work of others on them

    def taken(self, host: torch.Tensor, queue: Queue) -> None:
        """New memory of a stream, for as long as this host tensor lives."""
        memory = host.untyped_storage()
        if not memory.nbytes():
            return
        block = _Block(memory.data_ptr(), memory.nbytes(), queue)
        with self._lock:
            self._settle()
            now = self._clock.host_s
            self._given_back = [b for b in self._given_back if b.last()[0] > now]
            for given_back in self._given_back:
                if given_back.queue is queue and block.nbytes <= given_back.nbytes:
                    self._reuse(given_back)
                    break
            insort(self._blocks, block)
        block.ref = weakref.ref(host, lambda _: self._freed(block))

    def used(self, tensors: Iterable[Any], queue: Queue) -> None:
        """Work on these tensors (and lists of them) was queued; it is the queue's last so far."""
        with self._lock:
            self._settle()
            for tensor in tensors:
                if isinstance(tensor, list | tuple):
                    self.used(tensor, queue)
                    continue
                block = self._of(tensor) if isinstance(tensor, torch.Tensor) else None
                if block is not None and block.queue is not queue:
                    block.uses[queue] = queue.done_s, locate()

    def recorded(self, tensor: torch.Tensor, queue: Queue) -> None:
        """`Tensor.record_stream`."""
        with self._lock:
            self._settle()
            block = self._of(tensor)
            if block is not None:
                block.recorded.add(queue)

    def _of(self, tensor: torch.Tensor) -> _Block | None:
        if tensor.layout is not torch.strided:
            return None
        address = tensor.data_ptr()
        place = bisect_right(self._blocks, address, key=lambda block: block.address) - 1
        if place < 0:
            return None
        block = self._blocks[place]
        return block if address < block.address + block.nbytes else None

    def _freed(self, block: _Block) -> None:
        block.host_s = self._clock.host_s
        self._gone.append(block)

    def _settle(self) -> None:
        while self._gone:
            block = self._gone.popleft()
            self._blocks.remove(block)
            for queue in block.recorded:
                block.uses.pop(queue, None)
            if any(done_s > block.host_s for done_s, _ in block.uses.values()):
                self._given_back.append(block)

    def _reuse(self, block: _Block) -> None:
        self._given_back.remove(block)
        # Of an operator's result this is when it is made, which is later than it is begun with.
        begin_s = max(self._clock.host_s, block.queue.done_s)
        done_s, location = block.last()
        if begin_s < done_s:
            self._record(Hazard(kind="reused", location=location, noticed=locate()))
