"""Evaluation: loss, accuracy and confusion matrix over a loader, without disturbing training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import DataError
from hasten.train.source import count, split

if TYPE_CHECKING:
    from hasten.train.run import Run


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model does on a loader's samples."""

    loss: float
    """Mean over samples; NaN or infinite where the model's outputs are."""
    samples: int
    accuracy: float | None = None
    """Share of samples whose highest output is their label, 0 to 1; None without class labels."""
    confusion: list[list[int]] | None = None
    """Samples by true class (row) and predicted class (column); None without class labels."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """For :meth:`hasten.Run.log`."""
        accuracy = {} if self.accuracy is None else {"val_accuracy": self.accuracy}
        return {"val_loss": self.loss, **accuracy, **self.metrics}


@torch.no_grad()  # not inference_mode: its tensors may not enter a backward pass later, and a
def evaluate(  # loader that keeps batches on the device gives the same ones to training
    run: Run,
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    loader: Iterable[Any],
    metrics: Mapping[str, Any],
) -> Evaluation:
    """Run the model in eval mode over a loader; its mode is put back.

    Args:
        run: gives device and precision.
        model: any module.
        loss: ``loss(outputs, labels)``, the mean over a batch.
        loader: batches as :meth:`hasten.Trainer.fit` takes them.
        metrics: torchmetrics objects by name, reset first.

    Raises:
        DataError: the loader gives no batch.
    """
    from hasten.train.trainer import call

    totals = torch.zeros((), dtype=torch.float32, device=run.device)
    confusion: Any = None
    samples = 0
    for metric in metrics.values():
        metric.to(run.device).reset()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch in run.batches(loader, training=False):
            data, labels = split(batch)
            with run.autocast():
                outputs = call(model, data)
                value = loss(outputs, labels)
            size = count(batch)
            totals += value.detach() * size
            if samples == 0 and is_classification(outputs, labels):
                confusion = _confusion(outputs.shape[1], run.device)
            if confusion is not None:
                confusion.update(outputs.argmax(dim=1), labels)
            for metric in metrics.values():
                metric.update(outputs, labels)
            samples += size
    finally:
        for module, mode in modes:
            module.training = mode
    if samples == 0:
        raise DataError("the data to evaluate on gives no batch: is it empty?")
    table = confusion.compute().to("cpu").tolist() if confusion is not None else None
    return Evaluation(
        loss=totals.item() / samples,
        samples=samples,
        accuracy=sum(table[i][i] for i in range(len(table))) / samples if table else None,
        confusion=table,
        metrics={name: float(metric.compute()) for name, metric in metrics.items()},
    )


def is_classification(outputs: Any, labels: Any) -> bool:
    """Whether outputs are scores ``[N, C]`` and labels whole numbers ``[N]``."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(labels, torch.Tensor)
        and outputs.dim() == 2
        and outputs.shape[1] > 1
        and labels.dim() == 1
        and not labels.dtype.is_floating_point
        and labels.dtype is not torch.bool
    )


def _confusion(classes: int, device: torch.device) -> Any:
    from torchmetrics.classification import MulticlassConfusionMatrix

    # Its own checks of the values read them back from the device at every batch.
    return MulticlassConfusionMatrix(classes, validate_args=False).to(device)
