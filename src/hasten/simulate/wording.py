"""Errors of CUDA's runtime as PyTorch words them."""

from __future__ import annotations

import os

import torch

_HELP = {
    "invalid device ordinal": "GPU device may be out of range, do you have enough GPUs?",
    "device not ready": (
        "Search for `cudaErrorNotReady' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information."
    ),
}


def cuda_error(what: str) -> RuntimeError:
    """The error for what the runtime says, as "invalid device ordinal"."""
    text = f"CUDA error: {what}\n{_HELP[what]}"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        text += (
            "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
            "stacktrace below might be incorrect.\nFor debugging consider passing "
            "CUDA_LAUNCH_BLOCKING=1"
        )
    text += "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    return torch.AcceleratorError(text)


def missing(what: str) -> NotImplementedError:
    """The error for a part of CUDA that is not modelled."""
    return NotImplementedError(f"the simulated accelerator has no {what}; see docs/simulate.md")
