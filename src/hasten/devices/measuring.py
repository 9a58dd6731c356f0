"""Measuring a device: how fast it multiplies, convolves, copies, and takes data from the host."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from hasten.devices import runtime
from hasten.devices.rates import (
    ConvolutionRate,
    MatmulRate,
    Rates,
    TransferRate,
    crossover,
    ratio,
)

Clock = Callable[[], float]

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Rows and columns of the square matrices, small to large."""

SAMPLES = 7
"""Repetitions whose median counts."""

_SAMPLE_S = 2e-3  # a sample lasts at least this long: calls are queued, as in training
_MOST_CALLS = 1000
_IMAGES, _CHANNELS, _SIDE = 16, 64, 56
_COPY_BYTES, _TRANSFER_BYTES = 64 * 2**20, 32 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def measure(
    device: torch.device | str,
    *,
    cpu: Rates | None = None,
    budget_s: float = 20.0,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Measured rates of a device: matrix products, a convolution, copies, transfers.

    Everything is warmed up, repeated, and timed from before the first call to after a
    synchronisation; medians are reported. What would not fit into the time or the memory is left
    out and named. Small sizes come first, so that a short budget costs the large ones.

    Args:
        device: what to measure; an accelerator or the CPU.
        cpu: the CPU's rates to compare with. None measures the CPU too, in half of the budget,
            unless the CPU is what is measured.
        budget_s: seconds that all may take; one operation that has begun is finished.
        clock: seconds, monotonic.

    Raises:
        RuntimeError: the device fails.
    """
    target = runtime.with_index(torch.device(device))
    if cpu is None and not runtime.is_host(target):
        cpu = measure("cpu", budget_s=budget_s / 2, clock=clock)
        budget_s /= 2
    return _Measurement(target, cpu, budget_s, clock).all()


def median_seconds(
    call: Callable[[], object], *, synchronize: Callable[[], None], clock: Clock, until: float
) -> float:
    """Median seconds of one call among many that are queued before a synchronisation.

    Args:
        call: queues some work; called at least twice.
        synchronize: waits until the work is done.
        clock: seconds, monotonic.
        until: reading of the clock after which no further sample is begun.
    """
    call()  # the first one compiles, chooses algorithms and allocates
    synchronize()
    before = clock()
    call()
    synchronize()
    once = _positive(clock() - before)
    if clock() > until:
        return once
    calls = min(_MOST_CALLS, math.ceil(_SAMPLE_S / once))
    samples: list[float] = []
    while len(samples) < SAMPLES and not (samples and clock() > until):
        before = clock()
        for _ in range(calls):
            call()
        synchronize()
        samples.append((clock() - before) / calls)
    return _positive(statistics.median(samples))


class _Measurement:
    """One device being measured within a budget of time."""

    def __init__(
        self, device: torch.device, cpu: Rates | None, budget_s: float, clock: Clock
    ) -> None:
        self.device, self.cpu, self.budget_s, self.clock = device, cpu, budget_s, clock
        self.started = clock()
        self.deadline = self.started
        self.left_out: list[str] = []

    def all(self) -> Rates:
        with torch.inference_mode():
            matmul = self.matmul(share=0.6)
            convolution = self.convolution(share=0.75)
            copied = self.copy(share=0.85)
            transfers = self.transfers(share=1.0)
        cpu = self.cpu
        return Rates(
            device=str(self.device),
            name=runtime.name(self.device),
            matmul=matmul,
            convolution=convolution,
            copy_gb_per_s=copied,
            copy_ratio=ratio(copied, cpu.copy_gb_per_s) if cpu and copied else None,
            transfers=transfers,
            crossover_size=crossover(matmul, cpu.matmul) if cpu else None,
            seconds=self.clock() - self.started,
            left_out=tuple(self.left_out),
        )

    def matmul(self, *, share: float) -> tuple[MatmulRate, ...]:
        """Square products in each dtype; each dtype has an equal part of the time."""
        self.deadline = self.started + share * self.budget_s
        found: list[MatmulRate] = []
        names = [*_DTYPES]
        if runtime.has_tf32(self.device):
            names.insert(1, "tf32")
        if runtime.has_float8(self.device):
            names.append("float8")
        for place, name in enumerate(names):
            left = self.deadline - self.clock()
            found += self.matmul_in(name, until=self.clock() + left / (len(names) - place))
        return tuple(self.compared(rate) for rate in found)

    def matmul_in(self, name: str, *, until: float) -> list[MatmulRate]:
        found: list[MatmulRate] = []
        for size in SIZES:
            what = f"{name} matrices of {size}×{size}"
            # The warm-up, one timed product, and two for a median.
            expected = 4 * found[-1].seconds * _growth(found) if found else 0.0
            if self.clock() + expected > until:
                self.left_out.append(f"{what} and larger: no time left")
                break
            if not self.has_room(3 * size * size * 4):
                self.left_out.append(f"{what} and larger: no memory left")
                break
            with runtime.float32_products(self.device, tf32=name == "tf32"):
                seconds = self.attempt(what, partial(self.product, name, size), until)
            if seconds is None:
                break
            tflop = 2 * size**3 / 1e12
            found.append(
                MatmulRate(dtype=name, size=size, seconds=seconds, tflop_per_s=tflop / seconds)
            )
        return found

    def product(self, name: str, size: int) -> Callable[[], object]:
        ones = torch.rand(size, size, device=self.device) - 0.5
        if name == "float8":
            return runtime.float8_product(ones)
        left = ones.to(_DTYPES.get(name, torch.float32))
        right, out = left.clone(), torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def compared(self, rate: MatmulRate) -> MatmulRate:
        if self.cpu is None:
            return rate
        # The CPU has no TF32; what TF32 replaces there is float32.
        dtype = "float32" if rate.dtype == "tf32" else rate.dtype
        same = [r for r in self.cpu.matmul if r.dtype == dtype and r.size == rate.size]
        return replace(rate, ratio=ratio(rate.tflop_per_s, same[0].tflop_per_s if same else None))

    def convolution(self, *, share: float) -> tuple[ConvolutionRate, ...]:
        self.deadline = self.started + share * self.budget_s
        found = []
        fast = runtime.fast_dtypes(self.device)
        for name in [n for n, dtype in _DTYPES.items() if n == "float32" or dtype in fast]:
            what = f"convolution in {name}"
            with runtime.float32_products(self.device, tf32=False):
                seconds = self.attempt(what, partial(self.convolve, name), self.deadline)
            if seconds is None:
                continue
            gflop = 2 * _IMAGES * _SIDE**2 * _CHANNELS**2 * 9 / 1e9
            same = [c for c in self.cpu.convolution if c.dtype == name] if self.cpu else []
            found.append(
                ConvolutionRate(
                    dtype=name,
                    images=_IMAGES,
                    seconds=seconds,
                    images_per_s=_IMAGES / seconds,
                    gflop_per_s=gflop / seconds,
                    ratio=same[0].seconds / seconds if same else None,
                )
            )
        return tuple(found)

    def convolve(self, name: str) -> Callable[[], object]:
        dtype = _DTYPES[name]
        images = torch.rand(_IMAGES, _CHANNELS, _SIDE, _SIDE, device=self.device, dtype=dtype)
        kernel = torch.rand(_CHANNELS, _CHANNELS, 3, 3, device=self.device, dtype=dtype)
        images = images.contiguous(memory_format=torch.channels_last)
        kernel = kernel.contiguous(memory_format=torch.channels_last)
        return lambda: functional.conv2d(images, kernel, padding=1)

    def copy(self, *, share: float) -> float | None:
        """GB/s of a copy within the device's memory, read and written."""
        self.deadline = self.started + share * self.budget_s
        if not self.has_room(2 * _COPY_BYTES):
            self.left_out.append("copy within the device: no memory left")
            return None

        def build() -> Callable[[], object]:
            source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        seconds = self.attempt("copy within the device", build, self.deadline)
        return None if seconds is None else 2 * _COPY_BYTES / seconds / 1e9

    def transfers(self, *, share: float) -> tuple[TransferRate, ...]:
        """Each way of bringing a batch to the device, by memory and by blocking."""
        self.deadline = self.started + share * self.budget_s
        if runtime.is_host(self.device):
            return ()
        pageable = torch.ones(_TRANSFER_BYTES, dtype=torch.uint8, device="cpu")
        ways: list[tuple[str, Callable[[], torch.Tensor]]] = [("pageable", lambda: pageable)]
        if runtime.can_pin(self.device):
            pinned = pageable.pin_memory()
            ways += [("pinned", lambda: pinned), ("pin-then-copy", pageable.pin_memory)]
        else:
            self.left_out.append(
                "transfers from pinned memory: it cannot be pinned for this device"
            )
        found = []
        for source, batch in ways:
            for non_blocking in (False, True) if runtime.can_overlap(self.device) else (False,):
                found.append(self.transfer(source, batch, non_blocking))
        return tuple(rate for rate in found if rate is not None)

    def transfer(
        self, source: str, batch: Callable[[], torch.Tensor], non_blocking: bool
    ) -> TransferRate | None:
        target = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, device=self.device)
        whole, host = [], []
        for repetition in range(SAMPLES + 1):
            if repetition > 1 and self.clock() > self.deadline:
                break
            runtime.synchronize(self.device)
            before = self.clock()
            target.copy_(batch(), non_blocking=non_blocking)
            returned = self.clock()
            runtime.synchronize(self.device)
            if repetition:  # the first one warms up
                whole.append(self.clock() - before)
                host.append(returned - before)
        seconds = _positive(statistics.median(whole))
        return TransferRate(
            source=source,
            non_blocking=non_blocking,
            bytes=_TRANSFER_BYTES,
            seconds=seconds,
            host_seconds=statistics.median(host),
            gb_per_s=_TRANSFER_BYTES / seconds / 1e9,
        )

    def attempt(
        self, what: str, build: Callable[[], Callable[[], object]], until: float
    ) -> float | None:
        """Seconds of one call; None, and named as left out, where the device refuses it."""
        if self.clock() > until:
            self.left_out.append(f"{what}: no time left")
            return None
        try:
            return median_seconds(
                build(),
                synchronize=partial(runtime.synchronize, self.device),
                clock=self.clock,
                until=until,
            )
        except RuntimeError as error:
            if runtime.is_out_of_memory(error):
                self.left_out.append(f"{what}: no memory left")
                runtime.empty_cache(self.device)
                return None
            if isinstance(error, NotImplementedError) or "not implemented" in str(error):
                self.left_out.append(f"{what}: the device does not do it")
                return None
            raise

    def has_room(self, needed_bytes: int) -> bool:
        memory = runtime.memory(self.device)
        return memory is None or needed_bytes < memory.free_bytes / 2


def _growth(found: list[MatmulRate]) -> float:
    """How much longer than the last product the next larger one will take, from 2 to 8 times.

    Eight times the work takes eight times as long only where work is what takes the time: small
    products take about the same, whatever their size.
    """
    if len(found) < 2:
        return 2.0
    return min(8.0, max(2.0, found[-1].seconds / found[-2].seconds))


def _positive(seconds: float) -> float:
    """A clock that did not move between two readings counts as its smallest step."""
    return max(seconds, 1e-9)
