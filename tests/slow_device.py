"""A simulated device so slow that copies and steps take a good part of a millisecond."""

from hasten.simulate import DeviceSpec

SLOW = DeviceSpec(
    name="Slow",
    memory_bytes=1 << 30,
    flops_per_s=1e8,
    memory_bytes_per_s=1e7,
    host_copy_bytes_per_s=1e7,
    launch_s=1e-6,
)
"""A copy of a batch of 4 kB takes 0.4 ms, and a step on it some 2 ms."""
