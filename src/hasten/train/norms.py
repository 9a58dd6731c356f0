"""Batch norms whose statistics are those of the batch of all processes, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(
    module: nn.Module, counts: Callable[[], bool], alone: Callable[[], bool] = bool
) -> None:
    """Make a module's batch norms take their statistics over all processes.

    The norms stay what they are, with their names; another forward pass takes the place of their
    own. It is written in plain operators, for PyTorch's SyncBatchNorm is for GPUs alone.

    Args:
        module: changed in place.
        counts: whether the samples of this process count: where no sample of a batch is left for
            it, it computes with another's.
        alone: whether this process computes for itself now, and no other comes along.
    """
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.__dict__["forward"] = _Together(part, counts, alone)


class _Sum(torch.autograd.Function):
    """A tensor summed over the processes; so is its gradient."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _sum(own: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(own)  # type: ignore[no-untyped-call]
    return total


class _Together:
    """A batch norm's forward pass over the batch of all processes."""

    def __init__(
        self, norm: _BatchNorm, counts: Callable[[], bool], alone: Callable[[], bool]
    ) -> None:
        self._norm = norm
        self._counts, self._alone = counts, alone

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """The normalised batch, ``[N, C, …]`` as it came."""
        norm = self._norm
        if not (norm.training and torch.is_grad_enabled()) or self._alone():
            found: torch.Tensor = type(norm).forward(norm, batch)
            return found
        values = batch.float()
        axes = [0, *range(2, batch.dim())]
        shape = [1, -1, *[1] * (batch.dim() - 2)]
        channels = values.shape[1]
        share = float(self._counts())
        rows = values.new_full((1,), values.numel() / channels)
        summed = _sum(torch.cat([values.sum(axes), rows]) * share)
        count = summed[-1].detach()
        mean = summed[:channels] / count
        apart = values - mean.view(shape)
        # Not by the mean of squares: of large values the difference of two would be left.
        variance = _sum(apart.square().sum(axes) * share) / count
        if norm.track_running_stats:
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            self._note(mean.detach(), unbiased)
        scale = (variance + norm.eps).rsqrt()
        if norm.affine:
            scale = scale * norm.weight.float()
        result = apart * scale.view(shape)
        if norm.affine:
            result = result + norm.bias.float().view(shape)
        return result.to(batch.dtype)

    def _note(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        norm = self._norm
        assert norm.running_mean is not None and norm.running_var is not None
        with torch.no_grad():
            momentum: Any = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
                if momentum is None:
                    momentum = 1.0 / norm.num_batches_tracked
            norm.running_mean.mul_(1 - momentum).add_(momentum * mean)
            norm.running_var.mul_(1 - momentum).add_(momentum * variance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the norm is one that no process shares."""
        copied = memo[id(self._norm)]
        return type(copied).forward.__get__(copied)
