"""``torch.compile`` in a simulation: what it returns runs uncompiled, and looks compiled."""

from __future__ import annotations

from typing import Any

import torch


def compile_(model: Any = None, **settings: Any) -> Any:
    """Stand for ``torch.compile``: modules get its wrapper (and its names in checkpoints)."""
    if model is None:
        return lambda function: compile_(function, **settings)
    if not isinstance(model, torch.nn.Module):
        return model
    from torch._dynamo.eval_frame import OptimizedModule, _NullDecorator

    through: Any = _NullDecorator()
    return OptimizedModule(model, through)
