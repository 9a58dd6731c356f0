"""Make a module's own forward pass compute at a run's precision, wherever it is called from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hasten.train.precision import Precision


def run_at(module: nn.Module, precision: Callable[[], Precision], device: torch.device) -> None:
    """From now on ``module(…)`` runs under autocast, and its floating results are float32.

    Hooks do it, not a wrapper: the module stays what it is, with its names in checkpoints, and a
    deep copy of it (an averaged model, say) behaves in the same way.

    Args:
        module: changed in place.
        precision: asked at each call.
        device: whose autocast is entered.
    """
    entered: list[Any] = []

    def enter(module: nn.Module, args: Any) -> None:
        context = precision().autocast(device)
        context.__enter__()
        entered.append(context)

    def leave(module: nn.Module, args: Any, result: Any) -> Any:
        if not entered:  # the hook before it did not get to run
            return result
        context = entered.pop()
        context.__exit__(None, None, None)
        return result if isinstance(context, _PLAIN) else to_float32(result)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


_PLAIN = type(Precision(name="float32").autocast(torch.device("cpu")))


def to_float32(value: Any) -> Any:
    """Half-precision tensors of a nest as float32, so that a loss outside of autocast is exact."""
    if isinstance(value, torch.Tensor):
        half = value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if half else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_float32, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(to_float32, value))
    if isinstance(value, Mapping) and hasattr(value, "items"):
        changed = {key: to_float32(item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    return value
