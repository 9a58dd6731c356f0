"""Named devices: what the virtual clock and the memory use, from makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device's figures. They order and count; they never stand for a measured speed."""

    name: str
    """As ``torch.cuda.get_device_name`` gives it."""
    memory_bytes: int
    flops_per_s: float
    """Dense float32 operations (multiply and add are two)."""
    memory_bytes_per_s: float
    host_copy_bytes_per_s: float
    """Between host and device, from pinned memory. From pageable memory: half of it."""
    launch_s: float = 5e-6
    """What a launch costs the host."""
    capability: tuple[int, int] = (8, 0)
    processors: int = 108

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "flops_per_s", "memory_bytes_per_s", "host_copy_bytes_per_s"):
            if getattr(self, field) <= 0:
                raise UsageError(f"a device's {field} must be above 0, got {getattr(self, field)}")
        if self.launch_s < 0:
            raise UsageError(f"a device's launch_s must not be negative, got {self.launch_s}")


SPECS = {
    "t4": DeviceSpec(
        name="Tesla T4", memory_bytes=15 * GIB, flops_per_s=8.1e12, memory_bytes_per_s=320e9,
        host_copy_bytes_per_s=12e9, capability=(7, 5), processors=40,
    ),
    "rtx4090": DeviceSpec(
        name="NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB, flops_per_s=82.6e12,
        memory_bytes_per_s=1.01e12, host_copy_bytes_per_s=25e9, capability=(8, 9), processors=128,
    ),
    "a100": DeviceSpec(
        name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB, flops_per_s=19.5e12,
        memory_bytes_per_s=2.04e12, host_copy_bytes_per_s=25e9, capability=(8, 0), processors=108,
    ),
    "h100": DeviceSpec(
        name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, flops_per_s=67e12,
        memory_bytes_per_s=3.35e12, host_copy_bytes_per_s=50e9, capability=(9, 0), processors=132,
    ),
}  # fmt: skip


def spec_of(spec: str | DeviceSpec) -> DeviceSpec:
    """The figures of a named device; a `DeviceSpec` is returned as it is.

    Raises:
        UsageError: no device of that name is known.
    """
    if isinstance(spec, DeviceSpec):
        return spec
    if spec not in SPECS:
        raise UsageError(f"no simulated device {spec!r}; there are {', '.join(sorted(SPECS))}")
    return SPECS[spec]
