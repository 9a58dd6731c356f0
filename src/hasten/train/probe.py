"""Try a step without taking it: how fast it is at each precision, and what batch fits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import DataError
from hasten.train import remembered
from hasten.train.precision import Precision, candidates, fastest, set_layout, undisturbed
from hasten.train.seed import rng_kept
from hasten.train.source import Source, close, split

if TYPE_CHECKING:
    from hasten.train.run import Run
    from hasten.train.trainer import Trainer


def choose(run: Run, trainer: Trainer, batch: Any) -> Precision:
    """The fastest precision and layout among those that the settings leave open.

    Forward and backward are timed on a batch that is on the device already; no optimizer step is
    taken, and buffers, gradients and random states are put back. A choice that is sure is
    remembered for this model, batch shape and machine, so that the same run made again computes
    the same.
    """
    settings = run.settings
    choices = candidates(settings.precision, run.device, trainer.model, settings.channels_last)
    if len(choices) == 1:
        return choices[0]
    key = remembered.key(run.device, run.modules, batch, settings, choices)
    known = remembered.recall(key, choices)
    if known is not None:
        return known

    def time_at(choice: Precision) -> float:
        try:
            return time_step(run, trainer, batch, choice)
        except RuntimeError as error:
            if choice is choices[0] or runtime.is_out_of_memory(error):
                raise
            return math.inf  # an operator of this model has no such dtype: never the fastest

    with rng_kept(run.device), undisturbed(*run.modules):
        chosen, sure = fastest(choices, time_at, run.say)
    set_layout(trainer.model, run.precision.channels_last)
    if sure:
        remembered.keep(key, chosen)
    return chosen


def time_step(run: Run, trainer: Trainer, batch: Any, precision: Precision) -> float:
    """Seconds of a forward and backward pass at a precision; leaves gradients None."""
    data, labels = split(batch)
    set_layout(trainer.model, precision.channels_last)
    trainer.model.train()
    runtime.synchronize(run.device)
    began = run.settings.clock()
    forward_backward(trainer.model, trainer.loss, data, labels, precision, run.device)
    runtime.synchronize(run.device)
    seconds = run.settings.clock() - began
    for module in run.modules:
        module.zero_grad(set_to_none=True)
    return seconds


def forward_backward(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    data: Any,
    labels: Any,
    precision: Precision,
    device: torch.device,
) -> None:
    """One pass each way; gradients are added to those there."""
    from hasten.train.trainer import call

    with precision.autocast(device):
        value = loss(call(model, data), labels)
    value.backward()  # type: ignore[no-untyped-call]


def attempt_with(
    trainer: Trainer, batches: Callable[[int], Iterable[Any]], device: torch.device
) -> Callable[[int], None]:
    """A function that takes a whole step with so many samples, on a copy of the model."""
    precision = Precision(name="float32")  # the one that needs the most memory

    def attempt(samples: int) -> None:
        given = trainer.optimizer_given
        # One copy of all three: the optimizer's then holds the parameters of the model's.
        model, loss, optimizer = copy.deepcopy((trainer.model, trainer.loss, given))
        model = model.to(device)
        if isinstance(loss, nn.Module):
            loss = loss.to(device)
        optimizer = optimizer or trainer.optimizer_for(model, loss)
        with rng_kept(device):
            loader = batches(samples)
            try:
                data, labels = split(first_of(loader, device))
            finally:
                close(loader)
            model.train()
            forward_backward(model, loss, data, labels, precision, device)
            optimizer.step()

    return attempt


def first_of(loader: Iterable[Any], device: torch.device) -> Any:
    """The first batch of a loader, on the device.

    Raises:
        DataError: it has none.
    """
    source = Source(loader, device)
    batches = source.start(0)
    try:
        for batch in batches:
            return source.onto_device(batch)
    finally:
        close(batches)
        source.close()
    raise DataError("the training data gives no batch: is it empty?")
