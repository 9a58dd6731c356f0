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


class Pool:
    """The blocks up to a MiB, or those above: how many, how many bytes, the most, and all told."""

    __slots__ = ("bytes", "bytes_peak", "bytes_total", "count", "count_peak", "count_total")

    def __init__(self) -> None:
        self.count = self.count_peak = self.count_total = 0
        self.bytes = self.bytes_peak = self.bytes_total = 0

    def take(self, nbytes: int) -> None:
        """Count a block."""
        self.count += 1
        self.count_total += 1
        self.bytes += nbytes
        self.bytes_total += nbytes
        if self.count > self.count_peak:
            self.count_peak = self.count
        if self.bytes > self.bytes_peak:
            self.bytes_peak = self.bytes


class Memory:
    """Counts the bytes of the live tensors of one device."""

    block = 2 * _MIB
    """What is reserved at once."""

    def __init__(self, index: int, total_bytes: int) -> None:
        self.index = index
        self.total_bytes = total_bytes
        self.allocated = 0
        self.reserved = 0
        self.peak = 0
        self.peak_reserved = 0
        self.reserved_total = 0
        self.pools = (Pool(), Pool())
        self.count_peak = 0
        self.retries = 0
        self.refusals = 0
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
            raise self.refusal(nbytes)
        pool = self.pools[nbytes > _MIB]
        pool.take(nbytes)
        self.allocated += nbytes
        if self.allocated > self.peak:
            self.peak = self.allocated
        if pool.count == pool.count_peak:
            self.count_peak = max(self.count_peak, self.pools[0].count + self.pools[1].count)
        if self.allocated > self.reserved:
            self._reserve(self.allocated)
        key = id(host)
        self._live[key] = (weakref.ref(host, self._forget(key)), nbytes)

    def _forget(self, key: int) -> Callable[[weakref.ref[torch.Tensor]], None]:
        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            entry = self._live.get(key)
            if entry is not None and entry[0] is gone:
                del self._live[key]
                self.allocated -= entry[1]
                pool = self.pools[entry[1] > _MIB]
                pool.count -= 1
                pool.bytes -= entry[1]

        return forget

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
        self.reserved = -(-self.allocated // self.block) * self.block

    def reset_peak(self) -> None:
        """Let the peaks begin at what is allocated now."""
        self.peak, self.peak_reserved = self.allocated, self.reserved
        for pool in self.pools:
            pool.count_peak, pool.bytes_peak = pool.count, pool.bytes
        self.count_peak = self.pools[0].count + self.pools[1].count

    def reset_accumulated(self) -> None:
        """Let the totals begin at what is allocated now."""
        self.reserved_total = self.reserved
        self.retries = self.refusals = 0
        for pool in self.pools:
            pool.count_total, pool.bytes_total = pool.count, pool.bytes

    def refusal(self, nbytes: int) -> torch.OutOfMemoryError:
        """The error for so many bytes more than there are, in CUDA's words."""
        self.refusals += 1
        self.retries += 1
        self.empty_cache()  # as PyTorch does before it gives up
        return torch.OutOfMemoryError(self._full(nbytes))

    def _reserve(self, nbytes: int) -> None:
        wanted = -(-nbytes // self.block) * self.block
        self.reserved_total += wanted - self.reserved
        self.reserved = wanted
        self.peak_reserved = max(self.peak_reserved, wanted)

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
        free = max(self.total_bytes - self.reserved, 0)
        idle = max(self.reserved - self.allocated, 0)
        limit = (
            "" if self.limit_bytes == self.total_bytes else f"{_size(self.limit_bytes)} allowed; "
        )
        return (
            f"CUDA out of memory. Tried to allocate {_size(nbytes)}. GPU {self.index} has a total "
            f"capacity of {_size(self.total_bytes)} of which {_size(free)} is free. {limit}"
            f"Including non-PyTorch memory, this process has {_size(self.reserved)} memory in use. "
            f"Of the allocated memory {_size(self.allocated)} is allocated by PyTorch, and "
            f"{_size(idle)} is reserved by PyTorch but unallocated. If reserved but unallocated "
            "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management  "
            "(https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-alloc-conf)"
        )


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    if nbytes >= _MIB:
        return f"{nbytes / _MIB:.2f} MiB"
    if nbytes >= 1024:
        return f"{nbytes / 1024:.2f} KiB"
    return f"{nbytes} bytes"
