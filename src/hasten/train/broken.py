"""When a run has lost its numbers: the errors for a loss or for weights that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.errors import NonFiniteLoss
from hasten.train import diagnose
from hasten.train.meter import BadLoss

if TYPE_CHECKING:
    from hasten.train.keeping import Keeper


def by_loss(run: Keeper, bad: BadLoss) -> NonFiniteLoss:
    """The error for a loss, with the step and the batch that gave it, read again if need be."""
    step, batch = run.global_step + 1, run.last_batch
    if bad.place is not None:
        step, source, number = bad.place
        if bad.place is not run.place:
            batch = source.read_again(run.epoch, number)
    return diagnose.non_finite_loss(
        bad.value,
        epoch=run.epoch + 1,
        step=step,
        learning_rate=run.learning_rate,
        batch=batch,
        last_good=_last_good(run),
    )


def by_weights(run: Keeper) -> NonFiniteLoss | None:
    """The error for trained weights; None where all are finite.

    A loss can be finite while its gradient is not: the weights tell, a step later.
    """
    names = diagnose.non_finite_weights(run.modules)
    if not names:
        return None
    return diagnose.non_finite_step(
        names,
        epoch=run.epoch + 1,
        step=run.global_step,
        learning_rate=run.learning_rate,
        batch=run.last_batch,
        last_good=_last_good(run),
    )


def _last_good(run: Keeper) -> str | None:
    return str(run.last_good) if run.last_good is not None else None
