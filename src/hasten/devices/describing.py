"""What is here: each device's figures and what this PyTorch is, as plain records."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hasten.devices import hardware, host, runtime
from hasten.devices.dtypes import Support


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One device. ``to_json`` is stable: it holds plain values and each key is always there."""

    device: str
    """What ``hasten.device`` takes: ``cuda:0``, ``cpu``."""
    name: str
    """What its maker calls it."""
    type: str
    """PyTorch's type: ``cuda`` (NVIDIA and AMD), ``xpu``, ``mps``, ``cpu``, …."""
    index: int | None
    """Among those of its type; None for the CPU."""
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    """For the CPU: what can be had without swapping, within the container's limit."""
    capability: str | None
    """Compute capability (``9.0``) or AMD's architecture (``gfx942``); None where there is none."""
    multiprocessors: int | None
    """Streaming multiprocessors, compute units or the like; None where nothing says."""
    cores: int | None
    """For the CPU: cores that this process may use."""
    threads: int | None
    """For the CPU: threads that one operation of PyTorch uses."""
    dtypes: dict[str, Support] = field(default_factory=dict)
    """``fast``, ``works`` or ``no`` for ``float16``, ``bfloat16``, ``float8`` and ``tf32``."""
    problem: str | None = None
    """Why the device does not work, if it failed its trial."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, sizes in bytes."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> DeviceInfo:
        """The record that ``to_json`` gave.

        Raises:
            TypeError: a field is missing, or unknown.
        """
        return cls(**content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The PyTorch that all devices are used through."""

    torch: str
    """Its version."""
    build: str
    """What it is built for: ``cpu``, ``cuda 13.0``, ``rocm 6.4``, ``xpu`` or ``mps``."""
    driver: str | None
    """Version of NVIDIA's driver; None where there is none."""
    driver_cuda: str | None
    """Newest CUDA version that the driver runs."""
    python: str
    system: str
    """Operating system and processor, such as ``Linux x86_64``."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)


def describe() -> list[DeviceInfo]:
    """Every device that PyTorch reports: accelerators first, best first, the CPU last.

    A device that fails its trial is listed with its ``problem``. Nothing is measured.
    """
    return [_describe(device) for device in [*runtime.devices(), torch.device("cpu")]]


def environment() -> Environment:
    """The PyTorch, the driver and the system that the devices are used through."""
    driver = hardware.nvidia_driver()
    newest = driver.cuda if driver is not None else None
    return Environment(
        torch=str(torch.__version__),
        build=runtime.build(),
        driver=driver.version if driver is not None else None,
        driver_cuda=f"{newest[0]}.{newest[1]}" if newest is not None else None,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
    )


def _describe(device: torch.device) -> DeviceInfo:
    on_host = runtime.is_host(device)
    problem = None if on_host else runtime.trial(device)
    memory = runtime.memory(device) if problem is None else None
    return DeviceInfo(
        device=str(device),
        name=runtime.name(device),
        type=device.type,
        index=None if on_host else device.index,
        memory_total_bytes=memory.total_bytes if memory else None,
        memory_free_bytes=memory.free_bytes if memory else None,
        capability=runtime.capability(device),
        multiprocessors=runtime.multiprocessors(device),
        cores=host.cores() if on_host else None,
        threads=torch.get_num_threads() if on_host else None,
        dtypes=runtime.dtype_support(device),
        problem=problem,
    )
