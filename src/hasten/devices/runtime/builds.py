"""What this build of PyTorch is made for, and why its own accelerator does not start."""

from __future__ import annotations

from collections.abc import Callable

import torch


def build() -> str:
    """What this PyTorch is built for: ``cpu``, ``cuda 13.0``, ``rocm 6.4``, ``xpu`` or ``mps``."""
    if torch.version.hip:
        return f"rocm {torch.version.hip}"
    if torch.version.cuda:
        return f"cuda {torch.version.cuda}"
    if getattr(torch.version, "xpu", None):
        return "xpu"
    return "mps" if torch.backends.mps.is_built() else "cpu"


def architectures() -> list[str]:
    """GPU architectures that this build holds kernels for, such as ``sm_90`` or ``gfx942``."""
    return list(torch.cuda.get_arch_list())


def failure() -> str | None:
    """What the built-for accelerator's own initialisation complains of; None if of nothing."""
    if torch.version.cuda or torch.version.hip:
        initialise: Callable[[], object] = torch.cuda.init
    elif getattr(torch.version, "xpu", None):
        initialise = torch.xpu.init
    else:
        return None
    try:
        initialise()
    except (RuntimeError, AssertionError, OSError) as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
