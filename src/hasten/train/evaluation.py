"""Evaluation: loss, accuracy and confusion matrix over a loader, without disturbing training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import DataError, UsageError
from hasten.train import loss_over
from hasten.train.half import to_float32
from hasten.train.source import split

if TYPE_CHECKING:
    from hasten.train.run import Run

MOST_CLASSES = 2000
"""With more there is no confusion matrix: of so many nobody reads it, and it fills the memory."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model does on a loader's samples."""

    loss: float
    """Mean over samples, or over what else the loss is a mean over; NaN or infinite where the
    model's outputs are."""
    samples: int
    accuracy: float | None = None
    """Share of labelled samples whose highest output is their label, 0 to 1; None without class
    labels. A label that is no class (-100, say, for a loss to ignore) is not counted."""
    confusion: list[list[int]] | None = None
    """Samples by true class (row) and predicted class (column); None without class labels, or
    with more than 2,000 classes."""
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
    over: loss_over.LossOver = "auto",
) -> Evaluation:
    """Run the model in eval mode over a loader; its mode is put back.

    Args:
        run: gives device and precision.
        model: any module.
        loss: ``loss(outputs, labels)``, the mean over a batch.
        loader: batches as :meth:`hasten.Trainer.fit` takes them.
        metrics: torchmetrics objects by name, reset first.
        over: what the loss is a mean over.

    Raises:
        DataError: the loader gives no batch.
        UsageError: a metric is not one number.
    """
    from hasten.train.trainer import call

    total = torch.zeros((), dtype=torch.float32, device=run.device)
    weights: float | torch.Tensor = 0.0
    hits: Hits | None = None
    samples = 0
    for metric in metrics.values():
        metric.to(run.device).reset()
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    modes = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        for batch in run.batches(loader, training=False):
            data, labels = split(batch)
            with run.autocast():
                outputs = call(model, data)
                value = loss(outputs, labels)
            size = run.counted
            if not size:
                continue  # another process counts it
            counts = loss_over.of(over, loss, outputs, labels)
            if isinstance(counts, str):
                if counts == "nothing":  # a batch's sum counts as often as it has samples
                    value = value * (run.counted_of_all / size)
                total += value.detach() * size
                weights += size
            else:
                weight = torch.as_tensor(counts, device=run.device).float()
                total += torch.where(weight > 0, value.detach() * weight, 0.0)
                weights = weights + weight
            if samples == 0 and is_classification(outputs, labels):
                hits = Hits(outputs.shape[1], run.device)
            if hits is not None:
                hits.add(outputs, labels)
            for metric in metrics.values():
                metric.update(to_float32(outputs), labels)
            samples += size
    finally:
        for part, mode in modes.items():
            part.training = mode
    summed, weighed, counted = run.world.sum([total.item(), float(weights), samples])
    if counted == 0:
        raise DataError("the data to evaluate on gives no batch: is it empty?")
    if run.world.any(hits is not None):
        hits = together(run, hits)
    return Evaluation(
        loss=summed / weighed if weighed else math.nan,
        samples=int(counted),
        accuracy=hits.accuracy() if hits else None,
        confusion=hits.confusion() if hits else None,
        metrics={name: _number(name, metric) for name, metric in metrics.items()},
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


def together(run: Run, hits: Hits | None) -> Hits:
    """The counts of all processes; one that had no sample does not know the classes."""
    classes = run.world.most([0 if hits is None else hits.classes])[0]
    hits = hits or Hits(classes, run.device)
    hits.add_up(run.world.sum_tensor)
    return hits


class Hits:
    """Counts of true and predicted classes, kept on the device and read once."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.classes = self._classes = classes
        rows = classes if classes <= MOST_CLASSES else 2
        # One cell more: samples whose label is no class. Masking them out would read the device.
        self._counts = torch.zeros(rows * rows + 1, dtype=torch.int64, device=device)
        self._rows = rows

    def add(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: scores ``[N, C]`` and labels ``[N]``."""
        labels = labels.long()
        predicted = outputs.argmax(dim=1)
        if self._classes <= MOST_CLASSES:
            cells = labels * self._rows + predicted
        else:
            cells = (labels != predicted).long()  # right in the first cell, wrong in the second
        no_class = (labels < 0) | (labels >= self._classes)
        cells = cells.masked_fill(no_class, len(self._counts) - 1)
        self._counts.index_add_(0, cells, torch.ones_like(cells))

    def add_up(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Sum the counts over processes by a function of a tensor on the host."""
        self._counts = total(self._counts.cpu())

    def confusion(self) -> list[list[int]] | None:
        """Samples by true class (row) and predicted class (column); None where not kept."""
        if self._classes > MOST_CLASSES:
            return None
        table: list[list[int]] = self._read().tolist()
        return table

    def accuracy(self) -> float | None:
        """Share of samples with a class that were predicted right; None where none has one."""
        counts = self._read()
        right = counts.diagonal().sum() if self._classes <= MOST_CLASSES else counts[0, 0]
        labelled = int(counts.sum())
        return int(right) / labelled if labelled else None

    def _read(self) -> torch.Tensor:
        return self._counts[:-1].cpu().view(self._rows, self._rows)


def _number(name: str, metric: Any) -> float:
    value = metric.compute()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the metric {name} does not compute one number: average it (average='macro'), or give"
            " it a class of its own"
        ) from error
