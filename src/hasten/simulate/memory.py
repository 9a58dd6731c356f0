"""The memory of one simulated device: what is allocated, its peak, and running out of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from hasten.simulate.records import MemoryFigures

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 512  # CUDA's caching allocator rounds to this
_MIB = 1 << 20


class Memory:
    """Counts the bytes of the live tensors of one device."""

    def __init__(self, index: int, total_bytes: int) -> None:
        self.index = index
        self.total_bytes = total_bytes
        self.allocated = 0
        self.reserved = 0
        self.peak = 0
        self.peak_reserved = 0
        self.allocations = 0
        self.limit_bytes = total_bytes
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def take(self, host: torch.Tensor) -> None:
        """Account for the memory of a host tensor for as long as it lives.

        Raises:
            torch.OutOfMemoryError: there is not so much left; in CUDA's words.
        """
        nbytes = host.untyped_storage().nbytes()
        if not nbytes:
            return
        nbytes = -(-nbytes // _BLOCK) * _BLOCK
        if self.allocated + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError(self._full(nbytes))
        self.allocations += 1
        self.allocated += nbytes
        if self.allocated > self.peak:
            self.peak = self.allocated
        if self.allocated > self.reserved:
            self.reserved = -(-self.allocated // (2 * _MIB)) * 2 * _MIB
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        key = id(host)
        self._live[key] = (weakref.ref(host, self._forget(key)), nbytes)

    def _forget(self, key: int) -> Callable[[weakref.ref[torch.Tensor]], None]:
        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            entry = self._live.get(key)
            if entry is not None and entry[0] is gone:
                del self._live[key]
                self.allocated -= entry[1]

        return forget

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
        self.reserved = -(-self.allocated // (2 * _MIB)) * 2 * _MIB

    def reset_peak(self) -> None:
        """Let the peaks begin at what is allocated now."""
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def figures(self) -> MemoryFigures:
        """The figures as a record."""
        return MemoryFigures(
            allocated_bytes=self.allocated,
            peak_bytes=self.peak,
            total_bytes=self.total_bytes,
            reserved_bytes=self.reserved,
            peak_reserved_bytes=self.peak_reserved,
        )

    def _full(self, nbytes: int) -> str:
        free = self.total_bytes - self.allocated
        idle = max(self.reserved - self.allocated, 0)
        return (
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {self.index} has a total "
            f"capacity of {_size(self.total_bytes)} of which {_size(max(free, 0))} is free. Of the "
            f"allocated memory {_size(self.allocated)} is allocated by PyTorch, and {_size(idle)} "
            "is reserved by PyTorch but unallocated."
        )


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    if nbytes >= _MIB:
        return f"{nbytes / _MIB:.2f} MiB"
    return f"{nbytes / 1024:.2f} KiB"
