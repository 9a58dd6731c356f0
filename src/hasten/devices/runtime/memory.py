"""Memory of a device: how much there is, how much is used, and errors that say it ran out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hasten.devices import host
from hasten.devices.runtime.backend import HOST_TYPES, ask, is_current_type, module
from hasten.devices.runtime.presence import properties

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "alloc_failed",
    "out_of_device_memory",
    "out_of_host_memory",
    "out_of_resources",
)
"""Parts of the messages of backends that raise a plain RuntimeError."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device, in bytes."""

    free_bytes: int
    total_bytes: int


def memory(device: torch.device) -> Memory | None:
    """Free and total memory of the device (host memory for the CPU), None if nothing says."""
    if device.type in HOST_TYPES:
        found = host.memory()
    elif device.type == "mps":
        total = int(ask(0, torch.mps.recommended_max_memory))
        used = int(ask(0, torch.mps.driver_allocated_memory))
        found = (max(0, total - used), total) if total else None
    else:
        own = module(device.type)
        found = ask(None, getattr(own, "mem_get_info", None), device)
        if found is None and is_current_type(device):
            found = ask(None, getattr(torch.accelerator, "get_memory_info", None), device)
        total_only = getattr(properties(device), "total_memory", None) if found is None else None
        if total_only:
            found = (int(total_only), int(total_only))
    return None if found is None else Memory(int(found[0]), int(found[1]))


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes that tensors of this process hold on the device now; None on the host."""
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return _memory_figure(device, "memory_allocated")


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors held since the last ``reset_peak``; None where nothing counts."""
    return _memory_figure(device, "max_memory_allocated")


def reset_peak(device: torch.device) -> None:
    """Start counting ``peak_bytes`` anew; does nothing where nothing counts."""
    if device.type in HOST_TYPES or device.type == "mps":
        return
    own = module(device.type)
    if hasattr(own, "reset_peak_memory_stats"):
        ask(None, own.reset_peak_memory_stats, device)
    elif is_current_type(device):
        ask(None, torch.accelerator.reset_peak_memory_stats, device)


def empty_cache(device: torch.device) -> None:
    """Give memory that the allocator keeps in reserve back to the device's driver."""
    if device.type in HOST_TYPES:
        return
    own = module(device.type)
    if hasattr(own, "empty_cache"):
        ask(None, own.empty_cache)
    elif is_current_type(device):
        ask(None, torch.accelerator.empty_cache)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or the error it came from, says that memory ran out.

    Backends say it in different ways: ``torch.OutOfMemoryError``, a RuntimeError with a message
    (CPU, MPS, XPU, cuBLAS), NumPy's MemoryError.
    """
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        if isinstance(here, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(here, RuntimeError):
            text = str(here).lower()
            if any(sign in text for sign in _SIGNS):
                return True
        here = here.__cause__
    return False


def _memory_figure(device: torch.device, what: str) -> int | None:
    if device.type in HOST_TYPES or device.type == "mps":
        return None
    function = getattr(module(device.type), what, None)
    if function is None and is_current_type(device):
        function = getattr(torch.accelerator, what, None)
    found = ask(None, function, device)
    return None if found is None else int(found)
