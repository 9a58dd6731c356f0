"""What PyTorch's C++ code answers about the memory of a simulated device: the figures of its cache.

`torch.cuda.memory` is Python over these functions; it runs unchanged, so its checks, its
flattened figures and its table are PyTorch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.simulate import current
from hasten.simulate.wording import missing

if TYPE_CHECKING:
    from hasten.simulate.memory import Memory, Pool

_COUNTS = ("allocation", "active")
_BYTES = ("allocated_bytes", "active_bytes", "requested_bytes")
_UNUSED = ("inactive_split", "inactive_split_bytes")
_POOLS = ("all", "small_pool", "large_pool")


def _memory(device: int) -> Memory:
    found: Memory = current.require().memories[device]
    return found


def _stat(now: int, peak: int, total: int) -> dict[str, int]:
    return {"current": now, "peak": peak, "allocated": total, "freed": total - now}


def _count(pool: Pool) -> dict[str, int]:
    return _stat(pool.count, pool.count_peak, pool.count_total)


def _bytes(pool: Pool) -> dict[str, int]:
    return _stat(pool.bytes, pool.bytes_peak, pool.bytes_total)


def _three(all_of: dict[str, int], small: dict[str, int], large: dict[str, int]) -> dict[str, Any]:
    return dict(zip(_POOLS, (all_of, small, large), strict=True))


def memory_stats(device: int) -> dict[str, Any]:
    """The nested figures of the caching allocator."""
    memory = _memory(device)
    small, large = memory.pools
    count = _stat(
        small.count + large.count, memory.count_peak, small.count_total + large.count_total
    )
    nbytes = _stat(memory.allocated, memory.peak, small.bytes_total + large.bytes_total)
    none = _stat(0, 0, 0)
    found: dict[str, Any] = {name: _three(count, _count(small), _count(large)) for name in _COUNTS}
    found |= {name: _three(nbytes, _bytes(small), _bytes(large)) for name in _BYTES}
    found |= {name: _three(none, none, none) for name in _UNUSED}
    kept = _stat(memory.reserved, memory.peak_reserved, memory.reserved_total)
    blocks = {name: value // memory.block for name, value in kept.items()}
    found["reserved_bytes"] = _three(kept, none, kept)
    found["segment"] = _three(blocks, none, blocks)
    found["oversize_allocations"] = found["oversize_segments"] = none
    return found | {
        "num_alloc_retries": memory.retries,
        "num_ooms": memory.refusals,
        "num_sync_all_streams": memory.retries,
        "num_device_alloc": blocks["allocated"],
        "num_device_free": blocks["freed"],
        "max_split_size": -1,
    }


def _host_stats() -> dict[str, Any]:
    none = _stat(0, 0, 0)
    time = {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0}
    return {
        "allocations": none,
        "segments": none,
        "allocated_bytes": none,
        "reserved_bytes": none,
        "active_requests": none,
        "active_bytes": none,
        "host_alloc_time": time,
        "host_free_time": time,
        "num_host_alloc": 0,
        "num_host_free": 0,
    }


def _set_fraction(fraction: float, device: int) -> None:
    memory = _memory(device)
    memory.limit_bytes = int(memory.total_bytes * fraction)


def _get_fraction(device: int) -> float:
    memory = _memory(device)
    return memory.limit_bytes / memory.total_bytes


def empty_cache() -> None:
    """Give back what every device keeps and does not use."""
    for memory in current.require().memories:
        memory.empty_cache()


def reset_peak(device: int) -> None:
    """Let the peaks of a device begin at what is allocated now."""
    _memory(device).reset_peak()


def reset_accumulated(device: int) -> None:
    """Let the totals of a device begin at nothing."""
    _memory(device).reset_accumulated()


def _snapshot(*_: Any) -> dict[str, Any]:
    return {
        "segments": [],
        "device_traces": [],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _no_raw_memory(*_: Any) -> int:
    raise missing("memory without a tensor")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def functions() -> dict[str, Any]:
    """The functions of `torch._C` that a build for CUDA has and one for the CPU has not."""
    return {
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_hostMemoryStats": _host_stats,
        "_cuda_resetPeakHostMemoryStats": _nothing,
        "_cuda_resetAccumulatedHostMemoryStats": _nothing,
        "_cuda_setMemoryFraction": _set_fraction,
        "_cuda_getMemoryFraction": _get_fraction,
        "_cuda_emptyCache": empty_cache,
        "_cuda_memorySnapshot": _snapshot,
        "_cuda_record_memory_history": _nothing,
        "_cuda_record_memory_history_legacy": _nothing,
        "_cuda_cudaCachingAllocator_raw_alloc": _no_raw_memory,
        "_cuda_cudaCachingAllocator_raw_delete": _no_raw_memory,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_getCurrentSolverHandle": lambda: 1,
    }
