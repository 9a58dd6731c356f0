"""What a person should do about accelerators that are here while PyTorch cannot use them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hasten.devices import hardware, runtime
from hasten.devices.hardware import Card, Driver

BUILDS = "https://pytorch.org/get-started/locally"
"""The page that names PyTorch's builds and the command that installs each."""

_HIDING = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
"""Environment variables that hide devices from a process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that advice is drawn from; ``gather`` asks this machine for it."""

    cards: tuple[Card, ...] = ()
    seen: frozenset[str] = frozenset()
    """Types of device that PyTorch can use now, such as ``cuda``."""
    build: str = "cpu"
    """What this PyTorch is built for: ``cpu``, ``cuda 13.0``, ``rocm 6.4``, ``xpu`` or ``mps``."""
    torch_version: str = ""
    driver: Driver | None = None
    amd_driver: bool = False
    container: bool = False
    apple_silicon: bool = False
    python_machine: str = "x86_64"
    failure: str = ""
    """What the accelerator's own initialisation says, where the build has one."""
    environ: Mapping[str, str] = field(default_factory=dict)


def advice() -> list[str]:
    """One line for each kind of accelerator that is in the machine while PyTorch cannot use it.

    Each line says what is here, why it cannot be used (a build of PyTorch for the CPU or for
    another maker's GPUs, no driver, a driver too old, a variable that hides it), and what to do.
    Empty where nothing is left unused.
    """
    return advise(gather())


def gather() -> Facts:
    """Ask this machine."""
    seen = frozenset(device.type for device in runtime.devices())
    found = hardware.cards()
    nvidia = any(card.vendor == "NVIDIA" for card in found)
    return Facts(
        cards=tuple(found),
        seen=seen,
        build=runtime.build(),
        torch_version=torch.__version__,
        driver=hardware.nvidia_driver() if nvidia and "cuda" not in seen else None,
        amd_driver=hardware.amd_driver(),
        container=hardware.in_container(),
        apple_silicon=hardware.is_apple_silicon(),
        python_machine=platform.machine(),
        failure=runtime.failure() or "",
        environ={name: os.environ[name] for name in _HIDING if name in os.environ},
    )


def advise(facts: Facts) -> list[str]:
    """The advice that follows from the facts; asks nothing of the machine."""
    lines = [_nvidia(facts), _amd(facts), _intel(facts), _apple(facts)]
    return [line for line in lines if line]


def _nvidia(facts: Facts) -> str:
    here = _named(facts, "NVIDIA")
    if not here or ("cuda" in facts.seen and facts.build.startswith("cuda")):
        return ""
    driver = facts.driver
    if driver is None:
        remedy = "install NVIDIA's driver and restart the machine"
        if facts.container:
            remedy = "start the container with its GPUs (docker run --gpus all …)"
        also = f"; then {_install_cuda(None)}" if not facts.build.startswith("cuda") else ""
        return f"{here} is in the machine but no driver of it is to be seen: {remedy}{also}"
    if not facts.build.startswith("cuda"):
        return _wrong_build(facts, here, _install_cuda(driver))
    built = _version(facts.build)
    if driver.cuda is not None and built and driver.cuda[0] < built[0]:
        return (
            f"{here} has a driver ({driver.version}, for CUDA {driver.cuda[0]}) that is too old "
            f"for this PyTorch ({facts.build}): update NVIDIA's driver, or {_install_cuda(driver)}"
        )
    if hidden := _hidden(facts, "CUDA_VISIBLE_DEVICES"):
        return f"{here} is hidden by {hidden}"
    return _unknown(facts, here, "nvidia-smi")


def _amd(facts: Facts) -> str:
    here = _named(facts, "AMD")
    if not here or ("cuda" in facts.seen and facts.build.startswith("rocm")):
        return ""
    if not facts.build.startswith("rocm"):
        return _wrong_build(facts, here, f"install the ROCm build of PyTorch ({BUILDS})")
    if not facts.amd_driver:
        remedy = "load the amdgpu driver"
        if facts.container:
            remedy = "start the container with --device /dev/kfd --device /dev/dri"
        return f"{here} is in the machine but /dev/kfd is absent: {remedy}"
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if hidden := _hidden(facts, variable):
            return f"{here} is hidden by {hidden}"
    return _unknown(facts, here, "rocminfo (you may have to join the group render)")


def _intel(facts: Facts) -> str:
    here = _named(facts, "Intel")
    if not here or "xpu" in facts.seen:
        return ""
    if facts.build != "xpu":
        return _wrong_build(facts, here, f"install the XPU build with the command on {BUILDS}")
    for variable in ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"):
        if hidden := _hidden(facts, variable):
            return f"{here} is hidden by {hidden}"
    return _unknown(facts, here, "sycl-ls")


def _apple(facts: Facts) -> str:
    if not facts.apple_silicon or "mps" in facts.seen:
        return ""
    here = "this Mac's GPU"
    if facts.python_machine != "arm64":
        return f"{here} needs a native Python; this one is for Intel: install an arm64 Python"
    if facts.build != "mps":
        return _wrong_build(facts, here, "pip install --force-reinstall torch")
    return f"{here} cannot be used by this PyTorch: update macOS (14 or later)"


def _named(facts: Facts, vendor: str) -> str:
    names = [str(card) for card in facts.cards if card.vendor == vendor]
    kinds = dict.fromkeys(names)
    counted = [f"{names.count(kind)} × {kind}" if names.count(kind) > 1 else kind for kind in kinds]
    return ", ".join(counted)


def _wrong_build(facts: Facts, here: str, remedy: str) -> str:
    build = "for the CPU alone" if facts.build == "cpu" else f"for {facts.build}"
    return (
        f"{here} is in the machine but this PyTorch ({facts.torch_version}) is built {build}: "
        f"{remedy}"
    )


def _install_cuda(driver: Driver | None) -> str:
    newest = (13, 0) if driver is None or driver.cuda is None else driver.cuda
    if newest < (12, 0):
        return "update NVIDIA's driver (525 or later), then install a CUDA build of PyTorch"
    build = "cu130" if newest >= (13, 0) else "cu126"  # 12.6 runs on every driver for CUDA 12
    return (
        f"install a CUDA build, {build} suits the driver: pip install --force-reinstall torch "
        f"with the index that {BUILDS} gives for it"
    )


def _hidden(facts: Facts, variable: str) -> str:
    """The variable as it is set, if it leaves no device to be seen."""
    value = facts.environ.get(variable)
    if value is None:
        return ""
    first = value.split(",")[0].strip()
    # What follows an entry that is no device is ignored; a UUID or a filter is taken as it is.
    if first.isdecimal() and int(first) < len(facts.cards):
        return ""
    return f"the environment variable {variable}={value!r}: unset it, or name devices that exist"


def _unknown(facts: Facts, here: str, tool: str) -> str:
    reason = f" ({facts.failure})" if facts.failure else ""
    return (
        f"{here} is in the machine but PyTorch ({facts.build}) does not see it{reason}: see {tool}"
    )


def _version(build: str) -> tuple[int, int] | None:
    words = build.split()
    numbers = words[1].split(".") if len(words) == 2 else []
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers[:2]):
        return None
    return (int(numbers[0]), int(numbers[1]))


def mend(reason: str) -> str:
    """What to do about a device that failed its trial for ``reason``; empty if nobody knows."""
    text = reason.lower()
    if "no kernel image" in text or "not compatible with the current pytorch" in text:
        kernels = ", ".join(runtime.architectures()) or "others"
        return f"this build of PyTorch has kernels for {kernels} only: install another ({BUILDS})"
    if "out of memory" in text:
        return "another process holds its memory: stop that one, or choose another device"
    if "exclusive" in text or "busy or unavailable" in text:
        return "another process has it to itself: stop that one, or choose another device"
    if "forked subprocess" in text:
        return "start worker processes with the method 'spawn' or 'forkserver'"
    if "driver" in text and "insufficient" in text:
        return f"its driver is too old for this PyTorch ({runtime.build()}): update the driver"
    return ""
