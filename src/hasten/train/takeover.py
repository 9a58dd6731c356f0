"""A run's DataLoaders taken over by the feed, unasked: the same batches at the same moments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten.feed import Loader, Plan
from hasten.feed.parts import Parts
from hasten.feed.taken import left_as_it_is
from hasten.feed.telling import silence


class Takeover:
    """The Loader in place of one DataLoader, for as long as that stays as it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: Loader | None = None
        self._parts: Parts | None = None
        self._plan: Plan | None = None

    def of(self, loader: Any) -> Loader | None:
        """The Loader to iterate in place of this one; None where it is iterated as it is."""
        if self._parts is not None and self._parts.changed(begun=True, loader=loader):
            self.close()
        if self._taken is None:
            self._plan = None
            if _can_be_taken(loader):
                # A copy: what is started for a DataLoader is not to keep it alive.
                given = copy.copy(loader) if type(loader) is DataLoader else loader
                self._taken = Loader.from_dataloader(given, ahead=False)
                self._parts = Parts(given)
                silence(self._taken)
        return self._taken

    @property
    def plan(self) -> Plan | None:
        """How batches are made, also after the end; None where none was taken over."""
        return self._plan if self._taken is None else self._taken.to(self._device).plan

    def close(self) -> None:
        """End workers and give up memory; it can be taken over again."""
        if self._taken is not None:
            self._plan = self.plan
            self._taken.close()
            self._taken = self._parts = None


def _can_be_taken(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not left_as_it_is(loader)
        and loader._iterator is None  # else workers of its own are at work, and go on
    )


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, and its samplers, which epoch begins, where they want to know."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    for shuffling in (loader, *samplers):
        set_epoch = getattr(shuffling, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
