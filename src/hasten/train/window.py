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

    __slots__ = ("_counted", "_expected", "_first", "batches", "closed", "ended", "samples", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.batches = self.samples = self._first = 0
        self._expected: torch.Tensor | None = None  # of what losses are means over, where it is
        self._counted: torch.Tensor | None = None  # not samples; and what has come of it
        self.closed = True
        """Whether its step was taken: the next batch begins a new one."""
        self.ended = False
        """Whether no batch is to follow, though it may not be full."""

    def add(self, samples: int) -> None:
        """Count a batch, into a new window if the step of the last one was taken."""
        if self.closed:
            self.closed = self.ended = False
            self.batches, self.samples, self._first = 1, samples, samples
            self._expected = self._counted = None
        else:
            self.batches += 1
            self.samples += samples

    def drop(self) -> None:
        """Forget the batches; the next one begins a new window."""
        self.closed, self.ended, self.batches = True, False, 0
        self._expected = self._counted = None

    @property
    def full(self) -> bool:
        """Whether it holds as many batches as it will before its step."""
        return self.batches >= self.size or self.ended

    def share(self, loss: torch.Tensor, samples: int, processes: int = 1) -> torch.Tensor:
        """The part of a mean loss in the mean over a full window of such batches.

        Args:
            loss: the mean over this process's samples of the batch.
            samples: how many those are.
            processes: whose gradients are averaged.
        """
        if samples * processes == self._first:
            return loss if self.size == 1 else loss / self.size
        return loss * (samples * processes / (self._first * self.size))

    def share_of(
        self, loss: torch.Tensor, mine: torch.Tensor, of_all: torch.Tensor, processes: int = 1
    ) -> torch.Tensor:
        """The same of a loss that is a mean over something else than samples.

        Args:
            loss: the mean over what this process has of it.
            mine: how much that is.
            of_all: how much all processes have of it in this batch.
            processes: whose gradients are averaged.
        """
        if self._expected is None or self._counted is None:
            # A batch may have none of it; then the others of the window tell.
            self._expected = torch.where(of_all > 0, of_all, torch.ones_like(of_all)) * self.size
            self._counted = of_all
        else:
            self._counted = self._counted + of_all
        return loss * (mine * processes / self._expected)

    def correct(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the gradients those of the mean over the samples that came, if not as expected."""
        factor: float | torch.Tensor
        if self._counted is not None and self._expected is not None:
            factor = self._expected / torch.where(
                self._counted > 0, self._counted, torch.ones_like(self._counted)
            )
        else:
            expected = self._first * self.size
            if self.samples == expected or not self.samples:
                return
            factor = expected / self.samples
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
