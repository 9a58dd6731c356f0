"""Work that a device does beside the host: waiting for it, streams, events, pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import torch

from hasten.devices.runtime.backend import HOST_TYPES, ask, is_current_type, module


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done; returns at once on the host.

    Raises:
        RuntimeError: an earlier asynchronous operation failed.
    """
    if device.type in HOST_TYPES:
        return
    own = module(device.type)
    if device.type == "mps":
        torch.mps.synchronize()
    elif hasattr(own, "synchronize"):
        own.synchronize(device)
    elif is_current_type(device):
        try:
            torch.accelerator.synchronize(device)
        except RuntimeError as error:
            # An out-of-tree device without queues has nothing to wait for; every other error is
            # that of an earlier operation.
            if "support synchronizing" not in str(error):
                raise


def stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device, or None where copies cannot run beside computation."""
    if not can_overlap(device):
        return None
    made: torch.Stream | None = ask(None, torch.Stream, device)
    return made


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that operations on the device are queued on now, None where there is none."""
    if device.type in HOST_TYPES or not is_current_type(device):
        return None
    made: torch.Stream | None = ask(None, torch.accelerator.current_stream, device)
    return made


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A context whose operations are queued on ``stream``; an empty one for None."""
    return contextlib.nullcontext() if stream is None else stream


def event(device: torch.device, *, timing: bool = False) -> torch.Event | None:
    """A new event: it can record, be queried, be waited for; ``elapsed_time(other)`` is in ms.

    None on the host, whose operations are done when they return.
    """
    if device.type in HOST_TYPES:
        return None
    made: torch.Event | None = ask(None, torch.Event, device, enable_timing=timing)
    return made


def can_overlap(device: torch.device) -> bool:
    """Whether ``non_blocking`` copies from pinned memory are safe and asynchronous.

    Not on the CPU, and not on Apple's GPUs, where a non-blocking copy may read memory that has
    changed already (pytorch/pytorch#83015).
    """
    return device.type not in HOST_TYPES and device.type not in {"mps", "meta"}


def can_pin(device: torch.device) -> bool:
    """Whether host memory can be pinned for the device, and copies from it profit."""
    if not can_overlap(device):
        return False
    return _pinning(device.type)


_ASYNC_ENGINES = 40  # CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT


def copy_engines(device: torch.device) -> int | None:
    """Engines that copy while the device computes; None where nobody tells, as all but CUDA.

    A slice of a GPU (MIG, a virtual one) may have been given none. PyTorch does not tell.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    library = _driver()
    found = ctypes.c_int(-1)
    if library is None:
        return None
    failed = library.cuDeviceGetAttribute(ctypes.byref(found), _ASYNC_ENGINES, device.index or 0)
    return None if failed or found.value < 0 else found.value


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


_pinnable: dict[str, bool] = {}


def _pinning(kind: str) -> bool:
    if not is_current_type(torch.device(kind)):
        return False  # pin_memory() pins for the current accelerator only
    if kind not in _pinnable:
        pinned = ask(None, torch.empty(1, device="cpu").pin_memory)
        _pinnable[kind] = pinned is not None and bool(pinned.is_pinned())
    return _pinnable[kind]


def make_current(device: torch.device) -> None:
    """Make the device the one that is used where none is named; nothing on the host."""
    if device.type not in HOST_TYPES and is_current_type(device):
        ask(None, torch.accelerator.set_device_index, device)


def collectives(device: torch.device) -> str | None:
    """The backend of ``torch.distributed`` for the device (``nccl``); None on the host."""
    if device.type in HOST_TYPES or not torch.distributed.is_available():
        return None
    found = ask(None, torch.distributed.get_default_backend_for_device, device.type)
    return None if found is None else str(found)
