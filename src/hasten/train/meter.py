"""The loss of an epoch: summed without making the device wait."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hasten.devices import runtime


class BadLoss(NamedTuple):
    """A loss that is NaN or infinite, and how many batches ago it was added (0: the last)."""

    value: float
    batches_ago: int


class LossMeter:
    """Mean loss over samples, since the epoch began and since the last reading.

    On a device that works asynchronously the losses are kept there, in a window of ``window``
    batches, and read back when it is full or asked for: reading each would make the host wait for
    the device at every step. On the host reading is free, and a bad loss is seen at once.
    """

    def __init__(self, device: torch.device, window: int = 50) -> None:
        self._immediate = runtime.is_host(device)
        self._window = window
        self._losses: list[torch.Tensor] = []
        self._counts: list[int] = []
        if not self._immediate:
            self._ring = torch.zeros(window, dtype=torch.float32, device=device)
            self._slots = list(self._ring.unbind())
        self.reset()

    def reset(self, total: float = 0.0, samples: int = 0) -> None:
        """Begin an epoch, or the rest of one whose sum so far is ``total`` over ``samples``."""
        self.total, self.samples = total, samples
        self._read_total, self._read_samples = total, samples
        self._counts.clear()

    def add(self, loss: torch.Tensor, samples: int) -> BadLoss | None:
        """Add the mean loss of a batch; say so when one that was read is not finite."""
        if self._immediate:
            value = loss.item()
            if value - value != 0.0:  # NaN and both infinities
                return BadLoss(value, 0)
            self.total += value * samples
            self.samples += samples
            return None
        self._slots[len(self._counts)].copy_(loss.detach())
        self._counts.append(samples)
        return self.flush() if len(self._counts) == self._window else None

    def flush(self) -> BadLoss | None:
        """Read what is still on the device (waits for it); say so when a loss is not finite."""
        if not self._counts:
            return None
        counts, self._counts = self._counts, []
        for place, value in enumerate(self._ring[: len(counts)].tolist()):
            if not math.isfinite(value):
                return BadLoss(value, len(counts) - 1 - place)
            self.total += value * counts[place]
            self.samples += counts[place]
        return None

    @property
    def mean(self) -> float:
        """Mean loss over the samples of the epoch so far that have been read; NaN before any."""
        return self.total / self.samples if self.samples else math.nan

    def recent(self) -> float:
        """Mean loss over the samples read since this was last called; NaN when none."""
        samples = self.samples - self._read_samples
        total = self.total - self._read_total
        self._read_total, self._read_samples = self.total, self.samples
        return total / samples if samples else math.nan
