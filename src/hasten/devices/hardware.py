"""GPUs and drivers that the machine has, asked of the system itself, whatever PyTorch sees.

Nothing here imports torch. ``root`` is where the file system starts and ``ask`` runs a command,
so that a test can lay out a machine of its own.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

Ask = Callable[[list[str]], str | None]
"""Runs a command and gives its standard output; None where it is absent or fails."""

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_GRAPHICS = ("0x03", "0x12")
"""PCI classes: display controllers, and processing accelerators (AMD's largest are these)."""

# Intel's graphics that PyTorch's XPU build drives: Arc A and B, Data Center Max, Core Ultra.
_XPU_DEVICES = re.compile(r"0x(56|e2|0b[d6]|7d[4-6]|7dd|64[2ab]|b0[89a-f]|fd8)", re.IGNORECASE)

_ROCM_ARCHITECTURES = (
    *("gfx906", "gfx908", "gfx90a", "gfx94", "gfx95"),
    *("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx120"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One GPU in the machine."""

    vendor: str
    """``NVIDIA``, ``AMD`` or ``Intel``."""
    name: str = ""
    """What its maker calls it; empty where only its PCI numbers are known."""
    address: str = ""
    """On the PCI bus, such as ``0000:65:00.0``."""
    device_id: str = ""
    """PCI number of the model, such as ``0x2335``."""
    class_id: str = ""
    """PCI class, such as ``0x030200``."""

    def __str__(self) -> str:
        name = self.name or f"{self.vendor} GPU" + (f" {self.device_id}" if self.device_id else "")
        return name if self.vendor in name else f"{self.vendor} {name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """NVIDIA's driver."""

    version: str
    """Such as ``580.65.06``."""
    cuda: tuple[int, int] | None
    """Newest CUDA version that it runs."""


def ask(command: list[str]) -> str | None:
    """Run a command for ten seconds at most; its output, or None if it is absent or fails."""
    found = shutil.which(command[0])
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *command[1:]], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):  # a broken tool says nothing, like an absent one
        return None
    return done.stdout


def cards(*, root: Path = ROOT, ask: Ask = ask) -> list[Card]:
    """GPUs for computing that are in the machine; empty where there are none to be seen.

    The PCI bus is asked first, which needs no driver; then NVIDIA's tools, which find GPUs that
    a virtual machine or Windows shows without a bus. Displays that cannot compute (a server's
    console, Intel graphics that PyTorch does not drive) are left out.
    """
    found = [card for card in _pci_cards(root) if _computes(card, root)]
    if not any(card.vendor == "NVIDIA" for card in found):
        listing = ask(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]) or ""
        names = [line.strip() for line in listing.splitlines() if line.strip()]
        found += [Card(vendor="NVIDIA", name=name) for name in names if "fail" not in name.lower()]
    return found


def nvidia_driver(*, root: Path = ROOT, ask: Ask = ask) -> Driver | None:
    """NVIDIA's driver, as NVML, the kernel or ``nvidia-smi`` reports it; None if none is loaded."""
    if root == ROOT and (found := _nvml_driver()):
        return found
    text = _read(root / "proc/driver/nvidia/version")
    if match := re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text):
        return Driver(version=match[1], cuda=_cuda_of(match[1]))
    text = ask(["nvidia-smi"]) or ""
    if match := re.search(r"Driver Version:\s*([\d.]+)", text):
        newest = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
        cuda = (int(newest[1]), int(newest[2])) if newest else _cuda_of(match[1])
        return Driver(version=match[1], cuda=cuda)
    return None


def amd_driver(*, root: Path = ROOT) -> bool:
    """Whether AMD's compute driver is loaded (``/dev/kfd`` is what ROCm opens)."""
    return (root / "dev/kfd").exists()


def in_container(*, root: Path = ROOT) -> bool:
    """Whether this process runs in a container, which must be given its devices."""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(mark.exists() for mark in marks)


def is_apple_silicon(
    *, ask: Ask = ask, machine: str | None = None, system: str | None = None
) -> bool:
    """Whether this is a Mac with Apple's own chip, even where Python is an Intel build."""
    if (system or platform.system()) != "Darwin":
        return False
    if (machine or platform.machine()) == "arm64":
        return True
    return (ask(["sysctl", "-n", "sysctl.proc_translated"]) or "").strip() == "1"


def _computes(card: Card, root: Path) -> bool:
    if card.vendor == "Intel":
        return bool(_XPU_DEVICES.match(card.device_id))
    if card.vendor == "AMD":
        # A processor's built-in graphics are no reason to send anybody to install ROCm.
        architectures = _amd_architectures(root)
        if architectures:
            return any(name.startswith(_ROCM_ARCHITECTURES) for name in architectures)
        return in_container(root=root) or not card.class_id.startswith("0x0300")
    return True


def _amd_architectures(root: Path) -> list[str]:
    """Architectures of the GPUs that AMD's compute driver lists, such as ``gfx90a``."""
    names = []
    for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", _read(file), re.MULTILINE)
        if match and (number := int(match[1])):
            major, minor, step = number // 10000, number // 100 % 100, number % 100
            names.append(f"gfx{major}{minor:x}{step:x}")
    return names


def _pci_cards(root: Path) -> list[Card]:
    bus = root / "sys/bus/pci/devices"
    try:
        folders = sorted(bus.iterdir())
    except OSError:  # no such bus: macOS, Windows, some virtual machines
        return []
    found = []
    for folder in folders:
        vendor = _VENDORS.get(_read(folder / "vendor"))
        if vendor is None or not _read(folder / "class").startswith(_GRAPHICS):
            continue
        found.append(
            Card(
                vendor=vendor,
                name=_nvidia_name(root, folder.name) if vendor == "NVIDIA" else "",
                address=folder.name,
                device_id=_read(folder / "device"),
                class_id=_read(folder / "class"),
            )
        )
    return found


def _nvidia_name(root: Path, address: str) -> str:
    text = _read(root / f"proc/driver/nvidia/gpus/{address}/information")
    match = re.search(r"Model:\s*(.+)", text)
    return match[1].strip() if match else ""


def _nvml_driver() -> Driver | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not answer
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    text = version.decode() if isinstance(version, bytes) else str(version)
    return Driver(version=text, cuda=(cuda // 1000, cuda % 1000 // 10))


def _cuda_of(version: str) -> tuple[int, int] | None:
    """Newest CUDA that a driver runs, to the major version, by NVIDIA's compatibility table."""
    branch = int(version.split(".")[0])
    for first, cuda in ((580, 13), (525, 12), (450, 11), (410, 10)):
        if branch >= first:
            return (cuda, 0)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent, or not ours to read: this source says nothing
        return ""
