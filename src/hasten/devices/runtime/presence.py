"""Which devices are here, whether they work, and what they are called."""

from __future__ import annotations

from typing import Any

import torch

from hasten.devices import host
from hasten.devices.runtime.backend import HOST_TYPES, ask, module
from hasten.devices.runtime.builds import first_line

ACCELERATOR_TYPES = ("cuda", "xpu", "mps", "mtia")


def accelerator() -> torch.device | None:
    """The current accelerator with its index, if PyTorch reports one as available, else None.

    It is not tried out; ``hasten.device()`` does that.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else with_index(found)


def devices() -> list[torch.device]:
    """Every accelerator that PyTorch reports as available, in order of preference.

    First those of the type that ``torch.accelerator`` names, the current one leading, then any
    of another type.
    """
    first = accelerator()
    found = [] if first is None else [first]
    kinds = [] if first is None else [first.type]
    kinds += [kind for kind in ACCELERATOR_TYPES if kind not in kinds]
    for kind in kinds:
        for index in range(count(kind)):
            device = torch.device(kind, index)
            if device not in found:
                found.append(device)
    return found


def compiled_for() -> str | None:
    """Type of accelerator that this build of PyTorch is made for, present or not; else None."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count(kind: str) -> int:
    """How many devices of a type are usable here: 1 for ``cpu``, 0 for a type that is absent."""
    if kind in HOST_TYPES:
        return 1
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None and found.type == kind:
        return int(torch.accelerator.device_count())
    own = module(kind)  # a second accelerator beside the one that torch.accelerator prefers
    if own is None or not ask(False, getattr(own, "is_available", lambda: False)):
        return 0
    return int(ask(1, getattr(own, "device_count", lambda: 1)))


def with_index(device: torch.device) -> torch.device:
    """The same device with an explicit index (``cuda`` becomes ``cuda:0``); ``cpu`` has none."""
    if device.type in HOST_TYPES or device.type == "meta":
        return torch.device(device.type)
    explicit: Any = device.index  # annotated as an int, None where the device has no index
    if explicit is not None:
        return device
    own = module(device.type)
    index = ask(0, getattr(own, "current_device", lambda: 0))
    return torch.device(device.type, index if isinstance(index, int) else 0)


def trial(device: torch.device) -> str | None:
    """Why the device cannot be used, or None: it allocates and multiplies two small matrices.

    A device can be reported and yet be of no use: its architecture is not in this build, its
    memory is full, its driver is broken, or another process holds it exclusively.
    """
    try:
        ones = torch.ones(8, 8, device=device)
        total = float((ones @ ones).sum().item())
    except (RuntimeError, AssertionError, OSError, ImportError, AttributeError, TypeError) as error:
        return first_line(error)
    return None if total == 512.0 else f"it multiplied matrices of ones to {total:g}, not 512"


def name(device: torch.device) -> str:
    """The device's name as its maker wrote it, or its type where nothing says."""
    if device.type in HOST_TYPES:
        return host.cpu_name()
    if device.type == "mps":
        return f"{host.cpu_name()} GPU"
    own = module(device.type)
    found = ask(None, getattr(own, "get_device_name", lambda _: None), device)
    return str(found) if found else str(device)


def properties(device: torch.device) -> Any:
    """What the backend's ``get_device_properties`` says, or None where it has none."""
    if device.type in HOST_TYPES:
        return None
    return ask(None, getattr(module(device.type), "get_device_properties", None), device)


def capability(device: torch.device) -> str | None:
    """Compute capability (``9.0``) or AMD's architecture (``gfx942``); None where there is none."""
    found = properties(device)
    architecture = str(getattr(found, "gcnArchName", "")) if torch.version.hip else ""
    if architecture:
        return architecture.split(":")[0]
    if hasattr(found, "major") and hasattr(found, "minor"):
        return f"{found.major}.{found.minor}"
    return None


def multiprocessors(device: torch.device) -> int | None:
    """How many processors run a kernel side by side; None where nothing says."""
    found = properties(device)
    for key in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        value = getattr(found, key, None)
        if isinstance(value, int):
            return value
    return None
