"""What a loss is a mean over: where that is not the samples, pieces of a batch cannot be averaged
by their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hasten.errors import DataError, UsageError
from hasten.train.seed import rng_kept
from hasten.train.sharding import rows, rows_in

if TYPE_CHECKING:
    from hasten.train.run import Run

Over = Literal["samples", "nothing"] | float | torch.Tensor
"""``samples``; ``nothing`` for a sum; or how many, of what this process has of the batch."""
LossOver = Literal["auto", "samples", "nothing"] | Callable[[Any, Any], float | torch.Tensor]

_CLOSE, _CLOSE_IN_HALF = 1e-3, 2e-2
_DIFFERS = (
    "The loss is no mean over samples: of {n} samples it is {whole:.4g}, of the halves of them"
    " {first:.4g} and {second:.4g}. The processes' pieces of a batch are averaged by their samples"
    " all the same, so that another number of devices changes the results. {advice}"
)
_SUM = "It is their sum: give loss_over='nothing'"
_MEAN = (
    "Say what it is a mean over: loss_over=lambda outputs, labels: (labels != -100).sum(), say. If"
    " it compares samples with each other, bring their outputs together in your loss"
)


def check(over: LossOver) -> None:
    """Refuse what says nothing.

    Raises:
        UsageError: it is neither a word for it nor a function.
    """
    if not callable(over) and over not in ("auto", "samples", "nothing"):
        raise UsageError(
            f"loss_over={over!r}: 'auto', 'samples', 'nothing' (a sum), or a function of outputs"
            " and labels that counts what the loss is a mean over"
        )


def counted(over: Over, samples: int, device: torch.device) -> torch.Tensor | None:
    """How many things the loss of a batch is a mean over; None where that is told by a word.

    Args:
        over: see `Over`.
        samples: that this process has of the batch; without any it has none of the things.
        device: of the loss.

    Raises:
        UsageError: a word that says nothing.
    """
    if not isinstance(over, str):
        return torch.as_tensor(over if samples else 0, device=device).float()
    if over not in ("samples", "nothing"):
        raise UsageError(f"over={over!r}: 'samples', 'nothing' (a sum), or a number")
    return None


def of(over: LossOver, loss: Any, outputs: Any, labels: Any) -> Over:
    """What the loss of a batch is a mean over.

    For ``auto``, PyTorch's own losses tell whether they are sums; and of class labels the weights,
    or the number of those that are not ignored, are summed up where they may differ from sample
    to sample: with class weights, with an ``ignore_index`` that was chosen, with several labels a
    sample.
    """
    if callable(over):
        return over(outputs, labels)
    if over != "auto":
        return over
    if getattr(loss, "reduction", None) == "sum" and isinstance(loss, nn.modules.loss._Loss):
        return "nothing"
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or not _is_class_label(labels):
        return "samples"
    if loss.weight is None and loss.ignore_index < 0 and labels.dim() < 2:
        return "samples"
    counted: torch.Tensor = labels != loss.ignore_index
    if loss.weight is not None:
        counted = loss.weight[torch.where(counted, labels, 0)] * counted
    return counted.sum()


def _is_class_label(labels: Any) -> bool:
    return isinstance(labels, torch.Tensor) and labels.dtype in (torch.int64, torch.uint8)


def word(
    run: Run,
    loss: Callable[[Any, Any], torch.Tensor],
    value: torch.Tensor,
    outputs: Any,
    labels: Any,
) -> str | None:
    """What to tell a person of a loss that is taken for a mean over samples, and is none.

    It is asked for the two halves of a batch, in all processes alike: it may speak with the others
    itself. None where it is one, or that cannot be told: of a batch that cannot be cut, of one in
    which some process has less than two samples, of a loss that is not finite.
    """
    try:
        size = rows_in(labels)
        half = size // 2
        if run.samples < 2 * run.world.size or rows_in(outputs) != size:
            return None
        cuts = [(rows(outputs, a, b), rows(labels, a, b)) for a, b in ((0, half), (half, size))]
    except DataError:
        return None
    with torch.no_grad(), rng_kept(run.device), run.autocast():
        first, second = (float(loss(*cut)) for cut in cuts)
    whole = float(value.detach())
    mean = (first * half + second * (size - half)) / size
    single = isinstance(outputs, torch.Tensor) and outputs.dtype == torch.float32
    room = (_CLOSE if single else _CLOSE_IN_HALF) * max(abs(whole), abs(first), abs(second))
    if not abs(mean - whole) > room:  # NaN is told of elsewhere
        return None
    advice = _SUM if abs(first + second - whole) <= room else _MEAN
    return _DIFFERS.format(n=size, whole=whole, first=first, second=second, advice=advice)
