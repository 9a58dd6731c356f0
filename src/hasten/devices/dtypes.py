"""Which number formats which hardware multiplies itself, and which it only emulates: tables."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

Support = Literal["fast", "works", "no"]
"""``fast``: in hardware; ``works``: emulated, no faster than float32; ``no``: refused or unused."""

Formats = dict[str, Support]
"""Support by format: the keys are ``float16``, ``bfloat16``, ``float8`` and ``tf32``."""


def of_cuda(capability: tuple[int, int]) -> Formats:
    """By compute capability: 7.0 brought float16 tensor cores, 8.0 bfloat16, TF32, 8.9 float8."""
    half = capability >= (7, 0) or capability in {(5, 3), (6, 0), (6, 2)}
    return {
        "float16": "fast" if half else "works",
        "bfloat16": "fast" if capability >= (8, 0) else "works",
        "float8": "fast" if capability >= (8, 9) else "no",
        "tf32": "fast" if capability >= (8, 0) else "no",
    }


def of_rocm(architecture: str) -> Formats:
    """By AMD's architecture name, such as ``gfx942:sramecc+:xnack-``."""
    matrix = architecture.startswith(("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"))
    packed = architecture.startswith(("gfx900", "gfx906", "gfx10"))
    return {
        "float16": "fast" if matrix or packed else "works",
        "bfloat16": "fast" if matrix else "works",
        "float8": "fast" if architecture.startswith(("gfx94", "gfx95", "gfx12")) else "no",
        "tf32": "fast" if architecture.startswith("gfx94") else "no",
    }


def of_cpu(capabilities: Mapping[str, Any]) -> Formats:
    """By instruction sets: plain AVX2 or AVX-512 emulates half sizes, slower than float32."""
    bfloat16 = any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    float16 = any(capabilities.get(key) for key in ("amx_fp16", "avx512_fp16", "fp16_arith"))
    return {
        "float16": "fast" if float16 else "works",
        "bfloat16": "fast" if bfloat16 else "works",
        "float8": "no",
        "tf32": "no",
    }


def of_xpu() -> Formats:
    """Intel's GPUs: the XMX engines of all that PyTorch supports multiply both half sizes."""
    return {"float16": "fast", "bfloat16": "fast", "float8": "no", "tf32": "works"}


def of_mps() -> Formats:
    """Apple's GPUs: the older ones emulate bfloat16, and nothing says which this is."""
    return {"float16": "fast", "bfloat16": "works", "float8": "no", "tf32": "no"}


def of_autocast(taken: tuple[torch.dtype, ...]) -> Formats:
    """A device that no table knows: what its autocast takes is believed to be fast."""
    return {
        "float16": "fast" if torch.float16 in taken else "no",
        "bfloat16": "fast" if torch.bfloat16 in taken else "no",
        "float8": "no",
        "tf32": "no",
    }


def cpu_capabilities(*, root: Path = Path("/")) -> dict[str, Any]:
    """Instruction sets of this CPU by PyTorch's names, such as ``avx512_bf16``."""
    listing = getattr(torch.cpu, "get_capabilities", None)
    if listing is not None:
        return dict(listing())
    found: dict[str, Any] = {  # PyTorch before 2.10 answers one question at a time
        "avx512_bf16": _query("_is_avx512_bf16_supported"),
        "amx_bf16": _query("_is_amx_tile_supported"),
        "amx_fp16": _query("_is_amx_fp16_supported"),
    }
    if platform.machine().lower() in {"aarch64", "arm64"}:
        features = _arm_features(root)
        found["bf16"] = "bf16" in features
        found["fp16_arith"] = {"fphp", "asimdhp"} <= features
    return found


def _query(name: str) -> bool:
    return bool(getattr(torch.cpu, name, lambda: False)())


def _arm_features(root: Path) -> set[str]:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: nothing says, so nothing is claimed
        return set()
    lines = [line for line in text.splitlines() if line.startswith("Features")]
    return {word for line in lines for word in line.partition(":")[2].split()}
