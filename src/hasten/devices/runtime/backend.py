"""How each backend is asked: its module, and what to do where it lacks a facility."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HOST_TYPES = frozenset({"cpu"})

_UNSUPPORTED = (RuntimeError, AttributeError, AssertionError, ValueError)
"""How backends say that they lack a facility (NotImplementedError is a RuntimeError)."""


def is_host(device: torch.device) -> bool:
    """Whether the device is the CPU, that is, computes in host memory."""
    return device.type in HOST_TYPES


def module(kind: str) -> Any:
    """``torch.cuda``, ``torch.xpu``, …, or None where a type has no such module."""
    return ask(None, torch.get_device_module, kind)


def ask(default: Any, function: Callable[..., Any] | None, *args: Any, **named: Any) -> Any:
    """Call a backend's function; ``default`` where the backend lacks the facility."""
    if function is None:
        return default
    try:
        return function(*args, **named)
    except torch.OutOfMemoryError:
        raise
    except _UNSUPPORTED:
        return default


def is_current_type(device: torch.device) -> bool:
    """Whether ``torch.accelerator`` speaks of devices of this type."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
