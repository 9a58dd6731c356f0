"""DP: one process computes on several devices, with a copy of the model on each for every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.train.strategies import Strategy


class DP(Strategy):
    """PyTorch's ``nn.DataParallel``: each batch is cut among the devices of one process.

    Args:
        device: where the weights are; all devices of its type take part.

    Raises:
        UsageError: there is one device alone.
    """

    name = "dp"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        count = 1 if runtime.is_host(device) else runtime.count(device.type)
        if count < 2:
            raise UsageError(
                f"strategy='dp' cuts each batch among devices, and {device} is the only one of its"
                " kind: leave strategy out"
            )
        first = device.index
        self.devices = [device] + [
            torch.device(device.type, index) for index in range(count) if index != first
        ]

    def words(self) -> str:
        """See `Strategy`."""
        names = ", ".join(map(str, self.devices))
        return (
            f"Strategy: dp, nn.DataParallel over {names}. DDP is faster, with a process for each"
            f" device: hasten train --devices {len(self.devices)}, or torchrun"
            f" --nproc-per-node {len(self.devices)}"
        )

    def adopt(self, module: nn.Module, device: torch.device) -> None:
        """See `Strategy`."""
        if any(True for _ in module.parameters()):
            module.__dict__["forward"] = _Scattered(module, self.devices)


class _Scattered:
    """A module's forward pass, by way of nn.DataParallel."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        self.module = module
        self._wrapped = nn.DataParallel(_Body(module), device_ids=devices)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        return self._wrapped(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module computes where it is."""
        copied = memo[id(self.module)]
        return type(copied).forward.__get__(copied)


class _Body(nn.Module):
    """What nn.DataParallel copies: it calls the forward pass of the copy's own class, without the
    module's hooks, which have been run already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return type(self.module).forward(self.module, *args, **kwargs)
