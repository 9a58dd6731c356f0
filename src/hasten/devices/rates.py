"""Measured rates of a device as plain records, and what follows from them. No torch, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulRate:
    """Product of two square matrices, queued many times in a row."""

    dtype: str
    """``float32``, ``tf32``, ``bfloat16``, ``float16`` or ``float8``."""
    size: int
    """Rows and columns of each matrix."""
    seconds: float
    """For one product, median."""
    tflop_per_s: float
    ratio: float | None = None
    """This rate over the CPU's for the same dtype and size; None if that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionRate:
    """Forward pass of one 3×3 convolution, 64 to 64 channels, over 56×56 images."""

    dtype: str
    images: int
    """In a batch."""
    seconds: float
    """For one batch, median."""
    images_per_s: float
    gflop_per_s: float
    ratio: float | None = None
    """This rate over the CPU's for the same dtype; None if that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRate:
    """One way to bring a batch from host memory to the device."""

    source: str
    """``pageable``, ``pinned``, or ``pin-then-copy`` (pageable, pinned within the time)."""
    non_blocking: bool
    bytes: int
    seconds: float
    """Until the batch is on the device, median."""
    host_seconds: float
    """Until the call returns and the host can go on, median."""
    gb_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured on one device. ``to_json`` is stable."""

    device: str
    name: str
    matmul: tuple[MatmulRate, ...] = ()
    convolution: tuple[ConvolutionRate, ...] = ()
    copy_gb_per_s: float | None = None
    """Copying within the device's memory; bytes read and written both count."""
    copy_ratio: float | None = None
    """``copy_gb_per_s`` over the CPU's."""
    transfers: tuple[TransferRate, ...] = ()
    """From host memory to the device; empty for the CPU, which works in host memory."""
    crossover_size: int | None = None
    """From this size of float32 matrices on the device beats the CPU; None if nowhere."""
    seconds: float = 0.0
    """That measuring took."""
    left_out: tuple[str, ...] = ()
    """What was not measured, and why: no time or memory left, or refused by the device."""

    @property
    def host_to_device_gb_per_s(self) -> dict[str, float | None]:
        """Rates of blocking copies to the device, by kind of host memory."""
        found = {t.source: t.gb_per_s for t in self.transfers if not t.non_blocking}
        return {"pageable": found.get("pageable"), "pinned": found.get("pinned")}

    def best(self, dtype: str) -> MatmulRate | None:
        """The fastest product in a dtype; None if it was not measured."""
        found = [rate for rate in self.matmul if rate.dtype == dtype]
        return max(found, key=lambda rate: rate.tflop_per_s, default=None)

    def dtypes(self) -> list[str]:
        """Dtypes that were measured, in the order of measuring."""
        return list(dict.fromkeys(rate.dtype for rate in self.matmul))

    def to_json(self) -> dict[str, Any]:
        """The record as plain values, with the host-to-device rates beside the whole grid."""
        content = asdict(self)
        content["host_to_device_gb_per_s"] = self.host_to_device_gb_per_s
        content["summary"] = summary(self)
        return content


def crossover(device: Iterable[MatmulRate], cpu: Iterable[MatmulRate]) -> int | None:
    """Smallest float32 size from which on the device is faster at every size that both measured."""
    own = {rate.size: rate.seconds for rate in device if rate.dtype == "float32"}
    other = {rate.size: rate.seconds for rate in cpu if rate.dtype == "float32"}
    found = None
    for size in sorted(own.keys() & other.keys(), reverse=True):
        if own[size] >= other[size]:
            break
        found = size
    return found


def ratio(value: float, reference: float | None) -> float | None:
    """``value / reference``, None where there is no reference."""
    return value / reference if reference else None


def summary(rates: Rates) -> list[str]:
    """What a person should take from the rates: a sentence each."""
    lines = []
    compared = [rate for rate in rates.matmul if rate.dtype == "float32" and rate.ratio is not None]
    if compared:
        lines.append(_beats(rates, compared))
    lines += _dtype_gains(rates)
    lines += _transfer_advice(rates)
    return lines


def _beats(rates: Rates, compared: list[MatmulRate]) -> str:
    smallest, largest = compared[0], compared[-1]
    if rates.crossover_size is None:
        return f"{rates.device} is slower than the CPU at every size measured."
    gain = f"{largest.ratio:.3g} times as fast at {largest.size}"
    if rates.crossover_size == smallest.size:
        return f"{rates.device} beats the CPU at every size from {smallest.size} on: {gain}."
    slower = 1 / smallest.ratio if smallest.ratio else float("inf")
    return (
        f"A small job is slower on {rates.device}: {smallest.size}×{smallest.size} matrices take "
        f"{slower:.2g} times as long as on the CPU. It wins from {rates.crossover_size} on: {gain}."
    )


def _dtype_gains(rates: Rates) -> list[str]:
    """Each dtype against float32, at the largest size that both were measured at."""
    full = {rate.size: rate for rate in rates.matmul if rate.dtype == "float32"}
    gains = []
    for dtype in rates.dtypes():
        same = [rate for rate in rates.matmul if rate.dtype == dtype and rate.size in full]
        if same and dtype != "float32":
            largest = max(same, key=lambda rate: rate.size)
            gain = full[largest.size].seconds / largest.seconds
            gains.append(f"{dtype} {gain:.2g}× at {largest.size}")
    return [f"Speed against float32 on {rates.device}: {', '.join(gains)}."] if gains else []


def _transfer_advice(rates: Rates) -> list[str]:
    found = {(t.source, t.non_blocking): t for t in rates.transfers}
    pageable, pinned = found.get(("pageable", False)), found.get(("pinned", True))
    if pageable is None or pinned is None:
        return []
    gain = pageable.seconds / pinned.seconds
    lines = [
        f"From pinned memory without blocking a batch arrives {gain:.2g} times as fast as from "
        f"pageable memory, and the host goes on after "
        f"{pinned.host_seconds * 1e6:.0f} µs."
    ]
    late = found.get(("pin-then-copy", True))
    if late is not None and late.seconds > pageable.seconds:
        lines.append(
            "Pinning a batch just before its copy is slower than not pinning it: fill buffers "
            "that are pinned already."
        )
    return lines
