"""The loss of an epoch: summed without making the device wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hasten.devices import runtime
from hasten.errors import UsageError


class BadLoss(NamedTuple):
    """A loss that is NaN or infinite, and where it was added."""

    value: float
    place: Any


class LossMeter:
    """Mean loss over samples, since the epoch began and since the last reading.

    On a device that works asynchronously the losses are kept there, in a window of ``window``
    batches, and read back when it is full or asked for: reading each would make the host wait for
    the device at every step. On the host reading is free, and a bad loss is seen at once.

    Args:
        device: where losses are.
        window: batches.
        together: sums numbers over the processes of a run, each of which adds its own losses.
    """

    def __init__(
        self,
        device: torch.device,
        window: int = 50,
        together: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self._immediate = runtime.is_host(device)
        self._window = window
        self._together = together
        self._places: list[tuple[float | None, Any]] = []
        if not self._immediate:
            self._ring = torch.zeros(2, window, dtype=torch.float32, device=device)
            self._slots, self._counts = (list(row.unbind()) for row in self._ring)
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.total = self.samples = 0.0
        self._read_total = self._read_samples = 0.0
        self._places.clear()

    def state(self) -> dict[str, float]:
        """The sums so far, for a checkpoint; over all processes."""
        mine = [self.total, self.samples, self._read_total, self._read_samples]
        names = ("total", "samples", "read_total", "read_samples")
        return dict(zip(names, self._together(mine), strict=True))

    def restore(self, state: dict[str, float]) -> None:
        """Go on from the sums that :meth:`state` gave."""
        self._places.clear()
        self.total, self.samples = state["total"], state["samples"]
        self._read_total, self._read_samples = state["read_total"], state["read_samples"]

    def add(
        self, loss: torch.Tensor, samples: float | torch.Tensor, place: Any = None
    ) -> BadLoss | None:
        """Add the mean loss of a batch; say so when one that was read is not finite.

        Args:
            loss: of one element.
            samples: in the batch, or how much of what else it is a mean over: a loss over nothing
                is not looked at.
            place: comes back if the loss is not finite.

        Raises:
            UsageError: the loss is no scalar tensor.
        """
        try:
            if self._immediate:
                value, samples = loss.item(), float(samples)
                if not samples:
                    return None
                if value - value != 0.0:  # NaN and both infinities
                    return BadLoss(value, place)
                self.total += value * samples
                self.samples += samples
                return None
            at = len(self._places)
            self._slots[at].copy_(loss.detach().view(()))
            known: float | None = None
            if isinstance(samples, torch.Tensor):  # it is not read before the loss is
                self._counts[at].copy_(samples)
            else:
                known = samples
        except (RuntimeError, AttributeError) as error:
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                raise
            raise UsageError(
                f"the loss is {_described(loss)}; it must be one number, the mean over the batch"
                " (of a loss function, reduction='mean')"
            ) from error
        self._places.append((known, place))
        return self.flush() if len(self._places) == self._window else None

    def flush(self) -> BadLoss | None:
        """Read what is still on the device (waits for it); say so when a loss is not finite."""
        if not self._places:
            return None
        places, self._places = self._places, []
        values, counts = self._ring[:, : len(places)].cpu().tolist()
        for value, count, (known, place) in zip(values, counts, places, strict=True):
            samples = count if known is None else known
            if not samples:
                continue
            if not math.isfinite(value):
                return BadLoss(value, place)
            self.total += value * samples
            self.samples += samples
        return None

    @property
    def own_mean(self) -> float:
        """The mean over this process's samples alone, which no other has to be asked for."""
        return self.total / self.samples if self.samples else math.nan

    @property
    def mean(self) -> float:
        """Mean loss over the samples of the epoch so far that have been read; NaN before any."""
        total, samples = self._together([self.total, self.samples])
        return total / samples if samples else math.nan

    def recent(self) -> float:
        """Mean loss over the samples read since this was last called; NaN when none."""
        mine = [self.total - self._read_total, self.samples - self._read_samples]
        total, samples = self._together(mine)
        self._read_total, self._read_samples = self.total, self.samples
        return total / samples if samples else math.nan


def _described(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {list(loss.shape)}"
    return f"a {type(loss).__name__}"
