"""Numbers on a device: random states, and the formats that it multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hasten.devices import dtypes
from hasten.devices.runtime.backend import HOST_TYPES, ask, module
from hasten.devices.runtime.presence import ACCELERATOR_TYPES, properties


def manual_seed(device: torch.device, seed: int) -> None:
    """Seed the random generators of the device (of all devices of its type)."""
    if device.type in HOST_TYPES:
        torch.default_generator.manual_seed(seed)
        return
    own = module(device.type)
    seeding = getattr(own, "manual_seed_all", None) or getattr(own, "manual_seed", None)
    ask(None, seeding, seed)


def autocasts() -> dict[str, torch.dtype]:
    """Of each kind of device that this thread computes under autocast for, the dtype."""
    kinds = (*HOST_TYPES, *ACCELERATOR_TYPES)
    return {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}


def rng_state(device: torch.device) -> torch.Tensor | None:
    """State of the device's random generator (uint8, on the CPU); None on the host."""
    if device.type in HOST_TYPES:
        return None
    state: torch.Tensor | None = ask(
        None, getattr(module(device.type), "get_rng_state", None), device
    )
    return state


def set_rng_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Put back what ``rng_state`` gave; None does nothing.

    Raises:
        RuntimeError: the state is of another kind of device.
    """
    if state is not None and device.type not in HOST_TYPES:
        own = module(device.type)
        if own is not None and hasattr(own, "set_rng_state"):
            own.set_rng_state(state, device)


def autocast_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Dtypes that ``torch.autocast`` takes on the device, the safer bfloat16 first."""
    if not torch.amp.is_autocast_available(device.type):
        return ()
    own = module(device.type)
    if device.type not in HOST_TYPES and device.type not in {"cuda", "mps", "xpu"}:
        found = ask((), getattr(own, "get_amp_supported_dtype", None))
        return tuple(d for d in (torch.bfloat16, torch.float16) if d in (found or ()))
    if device.type == "cuda" and not ask(False, torch.cuda.is_bf16_supported):
        return (torch.float16,)
    return (torch.bfloat16, torch.float16)


def dtype_support(device: torch.device) -> dtypes.Formats:
    """How well the device multiplies ``float16``, ``bfloat16``, ``float8`` and ``tf32``."""
    if device.type in HOST_TYPES:
        return dtypes.of_cpu(dtypes.cpu_capabilities())
    if device.type == "xpu":
        return dtypes.of_xpu()
    if device.type == "mps":
        return dtypes.of_mps()
    found = properties(device) if device.type == "cuda" else None
    if found is None:
        return dtypes.of_autocast(autocast_dtypes(device))
    if torch.version.hip:
        return dtypes.of_rocm(str(getattr(found, "gcnArchName", "")))
    return dtypes.of_cuda((int(found.major), int(found.minor)))


def fast_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Of the half-size dtypes, those that the device multiplies in hardware, bfloat16 first."""
    found = dtype_support(device)
    both = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    return tuple(dtype for key, dtype in both if found[key] == "fast")


def has_tf32(device: torch.device) -> bool:
    """Whether float32 products can be rounded to TF32 for speed."""
    return dtype_support(device)["tf32"] == "fast"


@contextlib.contextmanager
def float32_products(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Within the context float32 products are exact, or rounded to TF32; then as before."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn  # its annotations lack what it has had since 2.9
    settings = (torch.backends.cuda.matmul, cudnn.conv)
    before = [each.fp32_precision for each in settings]
    for each in settings:
        each.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        for each, old in zip(settings, before, strict=True):
            each.fp32_precision = old


def has_float8(device: torch.device) -> bool:
    """Whether matrices of float8 can be multiplied in hardware."""
    return dtype_support(device)["float8"] == "fast" and hasattr(torch, "_scaled_mm")


def float8_product(matrix: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call that multiplies the matrix, turned into float8 (e4m3), by itself.

    Args:
        matrix: float32 [N, N] on the device, N a multiple of 16.
    """
    left = matrix.to(torch.float8_e4m3fn)
    right = left.clone().t()  # the hardware wants the second factor column by column
    scale = torch.ones((), device=matrix.device)
    return lambda: torch._scaled_mm(
        left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
    )
