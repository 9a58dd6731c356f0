"""The largest batch that fits on a device, with accumulation to keep the effective batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hasten.devices import runtime
from hasten.errors import OutOfDeviceMemory


class BatchPlan(NamedTuple):
    """``micro`` samples at once, ``accumulate`` times before each optimizer step."""

    micro: int
    accumulate: int


def fitting(
    wanted: int,
    attempt: Callable[[int], None],
    device: torch.device,
    everywhere: Callable[[bool], bool] = bool,
) -> BatchPlan:
    """The largest of ``wanted``, half of it, a quarter, … that ``attempt`` runs with.

    Halving keeps the effective batch: ``micro * accumulate`` is ``wanted`` where that is even
    enough, and never less.

    Args:
        wanted: the effective batch, in samples.
        attempt: runs a whole step with that many samples; out-of-memory errors mean "too many".
        device: where the step runs; its cache is emptied after each failure.
        everywhere: asks all processes of the run whether it fits; each must come to the same.

    Raises:
        OutOfDeviceMemory: not even one sample fits.
    """
    micro = wanted
    while True:
        try:
            if everywhere(_fits(micro, attempt, device)):
                return BatchPlan(micro, -(-wanted // micro))
        except ValueError as error:
            if micro > 1 or wanted == 1:
                raise
            raise OutOfDeviceMemory(
                f"no two samples fit on {device} with this model, and one alone it does not take:"
                f" {error}"
            ) from error
        if micro == 1:
            raise OutOfDeviceMemory(
                f"not even one sample fits on {device} with this model; use a smaller model or"
                " image size, or a device with more memory"
            )
        micro = -(-micro // 2)


def batch_line(text: str, size: int, accumulate: int, devices: int, learning_rate: float) -> str:
    """``Batch size: 128, 64 on each of 2 devices; learning rate 0.003``."""
    parts = [f"Batch size: {text}"]
    if devices > 1:
        least, more = divmod(size, devices)
        each = f"{least} or {least + 1}" if more else f"{least}"
        parts.append(f"{each} on each of {devices} devices")
    if accumulate > 1:
        parts.append(f"accumulated {accumulate} times (effective batch {size * accumulate})")
    return f"{', '.join(parts)}; learning rate {learning_rate:g}"


def _fits(samples: int, attempt: Callable[[int], None], device: torch.device) -> bool:
    try:
        attempt(samples)
        runtime.synchronize(device)
        return True
    except (RuntimeError, MemoryError) as error:
        if not runtime.is_out_of_memory(error):
            raise
    # Outside the handler, so that the error no longer keeps the step's tensors alive.
    runtime.empty_cache(device)
    return False
