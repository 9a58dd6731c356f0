"""``torch.compile`` runs uncompiled in a simulation; what needs a traced graph is refused."""

from __future__ import annotations

from typing import Any

import torch

from hasten.simulate.naming import is_simulated
from hasten.simulate.wording import missing


def compile_(model: Any = None, **settings: Any) -> Any:
    """Stand for ``torch.compile``: modules get its wrapper (and its names in checkpoints)."""
    if model is None:
        return lambda function: compile_(function, **settings)
    if not isinstance(model, torch.nn.Module):
        return model
    from torch._dynamo.eval_frame import OptimizedModule, _NullDecorator

    through: Any = _NullDecorator()
    return OptimizedModule(model, through)


def no_fakes(make: Any) -> Any:
    """Refuse fake tensors made of simulated ones: PyTorch ends the process at their gradients."""

    def from_real_tensor(self: Any, fake_mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        if is_simulated(t) and not isinstance(t, torch._subclasses.FakeTensor):
            raise missing("fake tensors (torch.export and tracing with them)")
        return make(self, fake_mode, t, *args, **kwargs)

    return from_real_tensor
