"""What ``torch.cuda.get_device_properties`` returns."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """A device's figures under the names that CUDA gives them."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: str
    pci_bus_id: int
    L2_cache_size: int
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 << 10
    shared_memory_per_block_optin: int = 99 << 10
    shared_memory_per_multiprocessor: int = 100 << 10
    warp_size: int = 32
    clock_rate: int = 1_500_000
    memory_clock_rate: int = 1_500_000
    memory_bus_width: int = 384
    gcnArchName: str = ""  # noqa: N815 - ROCm's name

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // _MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // _MIB}MB)"
        )
