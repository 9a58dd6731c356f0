"""FSDP: each process holds a part of every weight, and of its gradient and optimizer state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hasten.errors import HastenError, UsageError
from hasten.train import norms, pieces
from hasten.train.precision import Precision
from hasten.train.strategies import Strategy, from_first, total
from hasten.train.world import World

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose kernel for all parameters at once takes tensors in parts (PyTorch 2.13)."""

_BLOCK = 100_000  # parameters of a part that is worth bringing together by itself


class FSDP(Strategy):
    """PyTorch's ``fully_shard``: a module's weights are brought together while it computes.

    Parts of an ``nn.ModuleList`` or ``nn.Sequential`` with many parameters are brought together
    one after the other, the rest with the module itself.

    Args:
        world: the processes.
        precision: that weights are gathered and used in; gradients are summed in float32.
        sync_batchnorm: batch norms take their statistics over all processes.

    Raises:
        UsageError: the precision does not go with weights in parts.
    """

    name = "fsdp"
    in_step = True
    in_parts = True

    def __init__(self, world: World, precision: Precision, *, sync_batchnorm: bool) -> None:
        if precision.name == "float16":
            raise UsageError(
                "strategy='fsdp' with precision='float16', whose loss scaling looks at whole"
                " gradients: use bfloat16 or float32, or strategy='ddp'"
            )
        if precision.channels_last:
            raise UsageError("strategy='fsdp' keeps weights in parts: leave channels_last out")
        super().__init__()
        self.fixed = self._precision = precision
        self._world = world
        self._sync_batchnorm = sync_batchnorm

    def adopt(self, module: nn.Module, device: torch.device) -> None:
        """See `Strategy`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if self._sync_batchnorm:
            norms.synchronise(module, lambda: self.counts)
        if isinstance(module, FSDPModule) or not any(True for _ in module.parameters()):
            return
        scalars = [name for name, p in module.named_parameters() if not p.dim()]
        if scalars:
            raise UsageError(
                f"strategy='fsdp' cuts parameters by their first dimension, and"
                f" {', '.join(scalars[:3])} of {type(module).__name__} has none: make it a tensor"
                " of one number, torch.ones(1), or use strategy='ddp'"
            )
        with torch.no_grad():
            for parameter in module.parameters():
                from_first(parameter)
        mesh = init_device_mesh(device.type, (self._world.size,))
        dtype = None if self._precision.name == "float32" else self._precision.dtype
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
        )
        for part in (*blocks(module), module):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """See `Strategy`. The weights were the same when they were cut."""
        self.settle(modules)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """See `Strategy`."""
        return total(value)

    def step_failed(self, optimizer: Optimizer, error: RuntimeError) -> HastenError | None:
        """See `Strategy`. Some optimizers compute what tensors in parts do not have."""
        if not any(word in str(error) for word in ("DTensor", "sharding strategy", "placement")):
            return None
        return UsageError(
            f"{type(optimizer).__name__} cannot step weights in parts, as strategy='fsdp' has them"
            f" ({str(error).splitlines()[0].split('. ')[0]}): use another optimizer, such as AdamW"
            " or SGD, or strategy='ddp'"
        )

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """See `Strategy`."""
        with torch.no_grad():
            for module in modules:
                for buffer in module.buffers():
                    from_first(buffer)

    def whole(self, nest: Any) -> Any:
        """See `Strategy`. On the host of the first process; the others get None in their place."""
        from torch.distributed.tensor import DTensor

        if isinstance(nest, DTensor):
            tensor = nest.full_tensor()  # by all processes, one tensor after the other
            return tensor.cpu() if self._world.is_main else None
        if isinstance(nest, Mapping):
            made = OrderedDict((key, self.whole(value)) for key, value in nest.items())
            if hasattr(nest, "_metadata"):
                made._metadata = nest._metadata  # type: ignore[attr-defined]
            return made if isinstance(nest, OrderedDict) else dict(made)
        if isinstance(nest, (tuple, list)):
            return type(nest)(self.whole(item) for item in nest)
        return nest

    def part(self, target: Any, value: Any) -> Any:
        """See `Strategy`. It is cut where it is, on the host or the disk: the device gets its part
        alone."""
        from torch.distributed.tensor import DTensor

        if isinstance(value, pieces.Stored):
            if isinstance(target, DTensor) and value.shape == target.shape:
                return pieces.part(target, value)
            return pieces.whole(value)
        if not isinstance(target, DTensor) or getattr(value, "shape", None) != target.shape:
            return value
        local = target.to_local()
        rows = value.chunk(self._world.size, dim=0)
        rank = self._world.rank
        mine = rows[rank] if rank < len(rows) else value[:0]
        return DTensor.from_local(
            mine.to(local.device),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )


def in_parts(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether one of the parameters lies in parts over the processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return False  # and what the import below takes is spared
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in parameters)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The parts that are brought together one by one; none is within another."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in module.modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        for child in part:
            large = sum(p.numel() for p in child.parameters()) >= _BLOCK
            if large and child not in inside and not isinstance(child, nn.ModuleList):
                found.append(child)
                inside.update(child.modules())
    return found
