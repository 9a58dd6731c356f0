"""Copies of a run's tensors in host memory, in buffers that are used again for the next copy."""

from __future__ import annotations

from typing import Any

import torch

from hasten.devices import runtime


class HostBuffers:
    """Memory of the host that a checkpoint's tensors are copied into before they are written.

    Training goes on, and changes its tensors, while the copies are written. The memory stays for
    the next checkpoint: touching new memory takes several times as long as the copy itself.

    From a device whose copies can overlap, they are only queued: what the device does next comes
    after them, and :meth:`wait` waits for them, in whatever thread it is called.
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[torch.Tensor]] = {}
        self._used: dict[Any, list[torch.Tensor]] = {}
        self._devices: set[torch.device] = set()
        self._events: list[torch.Event] = []

    @property
    def held_bytes(self) -> int:
        """Memory that is kept."""
        return sum(
            t.nbytes for pool in (self._free, self._used) for ts in pool.values() for t in ts
        )

    def begin(self) -> None:
        """Take the memory of the copies made before back: they are of no more use."""
        for key, tensors in self._used.items():
            self._free.setdefault(key, []).extend(tensors)
        self._used, self._events = {}, []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a strided tensor on the host, with its layout where that has no gaps.

        Raises:
            RuntimeError: there is no memory for it.
        """
        device = tensor.device
        pinned = runtime.can_pin(device)
        key = (tensor.size(), tensor.stride(), tensor.dtype, pinned)
        free = self._free.get(key)
        if free:
            host = free.pop()
        else:
            host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        self._used.setdefault(key, []).append(host)
        host.copy_(tensor, non_blocking=runtime.can_overlap(device))
        if not runtime.is_host(device):
            self._devices.add(device)
        return host

    def end(self) -> None:
        """Give back the memory that was not needed this time; from here :meth:`wait` can wait."""
        self._free = {}
        for device in self._devices:
            event = runtime.event(device) if runtime.can_overlap(device) else None
            if event is None:
                runtime.synchronize(device)
            else:
                event.record(runtime.current_stream(device))
                self._events.append(event)
        self._devices = set()

    def wait(self) -> None:
        """Wait until the copies are made."""
        for event in self._events:
            event.synchronize()

    def release(self) -> None:
        """Give all memory back."""
        self.begin()
        self._free = {}
