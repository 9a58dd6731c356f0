"""The window of batches whose gradients are averaged before an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Window:
    """Counts the batches of a step under way, and weights each by its samples.

    The gradient of a window is that of the mean loss over its samples, as if they had come in one
    batch: also where the last batches of an epoch are fewer, or smaller.

    Args:
        size: batches in a full window.
    """

    __slots__ = ("_first", "batches", "closed", "samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.batches = self.samples = self._first = 0
        self.closed = False
        """Whether its step was taken: the next batch begins a new one."""

    def add(self, samples: int) -> None:
        """Count a batch, into a new window if the step of the last one was taken."""
        if self.closed or not self.batches:
            self.closed = False
            self.batches, self.samples, self._first = 1, samples, samples
        else:
            self.batches += 1
            self.samples += samples

    def drop(self) -> None:
        """Begin anew with the next batch."""
        self.closed = True

    @property
    def full(self) -> bool:
        """Whether it holds as many batches as it should before a step."""
        return self.batches >= self.size

    def share(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """The part of a batch's mean loss in the mean over a full window of such batches."""
        if samples == self._first:
            return loss / self.size
        return loss * (samples / (self._first * self.size))

    def correct(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the gradients those of the mean over the samples that came, if not as expected."""
        expected = self._first * self.size
        if self.samples == expected or not self.samples:
            return
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(expected / self.samples)
