"""The one place that asks PyTorch about devices; everything else of hasten asks this module.

It evens out what differs between builds and backends: on a CPU build ``torch.accelerator`` has
no device and its calls raise; on a CUDA build without a GPU it names the compiled-for device
unless told to look; out-of-tree devices lack most functions; Apple's lacks indices. Here an
absent facility is None (or does nothing), never an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hasten.devices import dtypes, host

_HOST_TYPES = frozenset({"cpu"})
_ACCELERATOR_TYPES = ("cuda", "xpu", "mps", "mtia")
_UNSUPPORTED = (RuntimeError, AttributeError, AssertionError, ValueError)
"""How backends say that they lack a facility (NotImplementedError is a RuntimeError)."""

_MEMORY_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "alloc_failed",
    "out_of_device_memory",
    "out_of_host_memory",
    "out_of_resources",
)

cores = host.cores


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device, in bytes."""

    free_bytes: int
    total_bytes: int


def accelerator() -> torch.device | None:
    """The current accelerator with its index, if PyTorch reports one as available, else None.

    It is not tried out; ``hasten.device()`` does that.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else with_index(found)


def compiled_for() -> str | None:
    """Type of accelerator that this build of PyTorch is made for, present or not; else None."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count(kind: str) -> int:
    """How many devices of a type are usable here: 1 for ``cpu``, 0 for a type that is absent."""
    if kind in _HOST_TYPES:
        return 1
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == kind:
        return int(torch.accelerator.device_count())
    module = _module(kind)  # a second accelerator beside the one that torch.accelerator prefers
    if module is None or not _ask(False, getattr(module, "is_available", lambda: False)):
        return 0
    return int(_ask(1, getattr(module, "device_count", lambda: 1)))


def devices() -> list[torch.device]:
    """Every accelerator that PyTorch reports as available, in order of preference.

    First those of the type that ``torch.accelerator`` names, the current one leading, then any
    of another type.
    """
    first = accelerator()
    found = [] if first is None else [first]
    kinds = [] if first is None else [first.type]
    kinds += [kind for kind in _ACCELERATOR_TYPES if kind not in kinds]
    for kind in kinds:
        for index in range(count(kind)):
            device = torch.device(kind, index)
            if device not in found:
                found.append(device)
    return found


def with_index(device: torch.device) -> torch.device:
    """The same device with an explicit index (``cuda`` becomes ``cuda:0``); ``cpu`` has none."""
    if device.type in _HOST_TYPES:
        return torch.device(device.type)
    explicit: Any = device.index  # annotated as an int, None where the device has no index
    if explicit is not None:
        return device
    module = _module(device.type)
    index = _ask(0, getattr(module, "current_device", lambda: 0))
    return torch.device(device.type, index if isinstance(index, int) else 0)


def is_host(device: torch.device) -> bool:
    """Whether the device is the CPU, that is, computes in host memory."""
    return device.type in _HOST_TYPES


def trial(device: torch.device) -> str | None:
    """Why the device cannot be used, or None: it allocates and multiplies two small matrices.

    A device can be reported and yet be of no use: its architecture is not in this build, its
    memory is full, its driver is broken, or another process holds it exclusively.
    """
    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum().item())
    except (RuntimeError, AssertionError, OSError, ImportError, AttributeError, TypeError) as error:
        return _first_line(error)
    return None if total == 512.0 else f"it multiplied matrices of ones to {total:g}, not 512"


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done; returns at once on the host.

    Raises:
        RuntimeError: an earlier asynchronous operation failed.
    """
    if device.type in _HOST_TYPES:
        return
    module = _module(device.type)
    if device.type == "mps":
        torch.mps.synchronize()
    elif _is_current_type(device):
        torch.accelerator.synchronize(device)
    elif module is not None and hasattr(module, "synchronize"):
        module.synchronize(device)


def name(device: torch.device) -> str:
    """The device's name as its maker wrote it, or its type where nothing says."""
    if device.type in _HOST_TYPES:
        return host.cpu_name()
    if device.type == "mps":
        return f"{host.cpu_name()} GPU"
    module = _module(device.type)
    found = _ask(None, getattr(module, "get_device_name", lambda _: None), device)
    return str(found) if found else str(device)


def properties(device: torch.device) -> Any | None:
    """What the backend's ``get_device_properties`` says, or None where it has none."""
    if device.type in _HOST_TYPES:
        return None
    return _ask(None, getattr(_module(device.type), "get_device_properties", None), device)


def memory(device: torch.device) -> Memory | None:
    """Free and total memory of the device (host memory for the CPU), None if nothing says."""
    if device.type in _HOST_TYPES:
        found = host.memory()
    elif device.type == "mps":
        total = int(_ask(0, torch.mps.recommended_max_memory))
        used = int(_ask(0, torch.mps.driver_allocated_memory))
        found = (max(0, total - used), total) if total else None
    else:
        module = _module(device.type)
        found = _ask(None, getattr(module, "mem_get_info", None), device)
        if found is None and _is_current_type(device):
            found = _ask(None, getattr(torch.accelerator, "get_memory_info", None), device)
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
    if device.type in _HOST_TYPES or device.type == "mps":
        return
    module = _module(device.type)
    if hasattr(module, "reset_peak_memory_stats"):
        _ask(None, module.reset_peak_memory_stats, device)
    elif _is_current_type(device):
        _ask(None, torch.accelerator.reset_peak_memory_stats, device)


def empty_cache(device: torch.device) -> None:
    """Give memory that the allocator keeps in reserve back to the device's driver."""
    if device.type in _HOST_TYPES:
        return
    module = _module(device.type)
    if hasattr(module, "empty_cache"):
        _ask(None, module.empty_cache)
    elif _is_current_type(device):
        _ask(None, torch.accelerator.empty_cache)


def stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device, or None where copies cannot run beside computation."""
    if not can_overlap(device):
        return None
    made: torch.Stream | None = _ask(None, torch.Stream, device)
    return made


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that operations on the device are queued on now, None where there is none."""
    if device.type in _HOST_TYPES or not _is_current_type(device):
        return None
    made: torch.Stream | None = _ask(None, torch.accelerator.current_stream, device)
    return made


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A context whose operations are queued on ``stream``; an empty one for None."""
    return contextlib.nullcontext() if stream is None else stream


def event(device: torch.device, *, timing: bool = False) -> torch.Event | None:
    """A new event: it can record, be queried, be waited for; ``elapsed_time(other)`` is in ms.

    None on the host, whose operations are done when they return.
    """
    if device.type in _HOST_TYPES:
        return None
    made: torch.Event | None = _ask(None, torch.Event, device, enable_timing=timing)
    return made


def can_pin(device: torch.device) -> bool:
    """Whether host memory can be pinned for the device, and copies from it profit."""
    if not can_overlap(device):
        return False
    return _pinning(device.type)


def can_overlap(device: torch.device) -> bool:
    """Whether ``non_blocking`` copies from pinned memory are safe and asynchronous.

    Not on the CPU, and not on Apple's GPUs, where a non-blocking copy may read memory that has
    changed already (pytorch/pytorch#83015).
    """
    return device.type not in _HOST_TYPES and device.type not in {"mps", "meta"}


def manual_seed(device: torch.device, seed: int) -> None:
    """Seed the random generators of the device (of all devices of its type)."""
    if device.type in _HOST_TYPES:
        torch.default_generator.manual_seed(seed)
        return
    module = _module(device.type)
    seeding = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
    _ask(None, seeding, seed)


def rng_state(device: torch.device) -> torch.Tensor | None:
    """State of the device's random generator (uint8, on the CPU); None on the host."""
    if device.type in _HOST_TYPES:
        return None
    state: torch.Tensor | None = _ask(
        None, getattr(_module(device.type), "get_rng_state", None), device
    )
    return state


def set_rng_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Put back what ``rng_state`` gave; None does nothing.

    Raises:
        RuntimeError: the state is of another kind of device.
    """
    if state is not None and device.type not in _HOST_TYPES:
        module = _module(device.type)
        if module is not None and hasattr(module, "set_rng_state"):
            module.set_rng_state(state, device)


def autocast_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes that ``torch.autocast`` takes on the device, the safer bfloat16 first."""
    if not torch.amp.is_autocast_available(device.type):
        return ()
    module = _module(device.type)
    if device.type not in _HOST_TYPES and device.type not in {"cuda", "mps", "xpu"}:
        found = _ask((), getattr(module, "get_amp_supported_dtype", None))
        return tuple(d for d in (torch.bfloat16, torch.float16) if d in (found or ()))
    if device.type == "cuda" and not _ask(False, torch.cuda.is_bf16_supported):
        return (torch.float16,)
    return (torch.bfloat16, torch.float16)


def dtype_support(device: torch.device) -> dtypes.Formats:
    """How well the device multiplies ``float16``, ``bfloat16``, ``float8`` and ``tf32``."""
    if device.type in _HOST_TYPES:
        return dtypes.of_cpu(dtypes.cpu_capabilities())
    if device.type == "xpu":
        return dtypes.of_xpu()
    if device.type == "mps":
        return dtypes.of_mps()
    found = properties(device) if device.type == "cuda" else None
    if found is None:
        return dtypes.of_autocast(autocast_dtypes(device))
    if torch.version.hip:
        return dtypes.of_rocm(str(getattr(found, "gcnArchName", "")))
    return dtypes.of_cuda((int(found.major), int(found.minor)))


def fast_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Of the half-size dtypes, those that the device multiplies in hardware, bfloat16 first."""
    found = dtype_support(device)
    both = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    return tuple(dtype for key, dtype in both if found[key] == "fast")


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
            if any(sign in text for sign in _MEMORY_SIGNS):
                return True
        here = here.__cause__
    return False


def _module(kind: str) -> Any:
    """``torch.cuda``, ``torch.xpu``, …, or None where a type has no such module."""
    return _ask(None, torch.get_device_module, kind)


def _ask(default: Any, function: Callable[..., Any] | None, *args: Any, **named: Any) -> Any:
    """Call a backend's function; ``default`` where the backend lacks the facility."""
    if function is None:
        return default
    try:
        return function(*args, **named)
    except torch.OutOfMemoryError:
        raise
    except _UNSUPPORTED:
        return default


def _is_current_type(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type


def _memory_figure(device: torch.device, what: str) -> int | None:
    if device.type in _HOST_TYPES or device.type == "mps":
        return None
    function = getattr(_module(device.type), what, None)
    if function is None and _is_current_type(device):
        function = getattr(torch.accelerator, what, None)
    found = _ask(None, function, device)
    return None if found is None else int(found)


_pinnable: dict[str, bool] = {}


def _pinning(kind: str) -> bool:
    if kind not in _pinnable:
        if not _is_current_type(torch.device(kind)):
            return False  # pin_memory() pins for the current accelerator only
        pinned = _ask(None, torch.empty(1).pin_memory)
        _pinnable[kind] = pinned is not None and bool(pinned.is_pinned())
    return _pinnable[kind]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
