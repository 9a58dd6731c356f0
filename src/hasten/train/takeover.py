"""A run's DataLoaders taken over by the feed, unasked: the same batches at the same moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten.feed import Loader, Plan
from hasten.feed.parts import Parts
from hasten.feed.taken import left_as_it_is, told_epochs
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


class Told:
    """Tells a loader, and its samplers, which epoch begins, where they want to know.

    One that the loop has told another epoch by itself (its ``epoch`` is not what was told here, or
    not 0 at first) is left to the loop from then on, as where the loader is iterated as it is.
    """

    def __init__(self) -> None:
        self._epochs: dict[str, Any] = {}
        self._by_loop: set[str] = set()

    def look(self, loader: Any) -> None:
        """See what the loop has told them, before anything else is."""
        for name, told in self._samplers(loader):
            epoch = getattr(told, "epoch", None)
            if type(epoch) is int and epoch != self._epochs.get(name, 0):
                self._by_loop.add(name)
            self._epochs[name] = epoch

    def tell(self, loader: Any, epoch: int, *, fed: bool) -> None:
        """Tell them, if the feed has not; and again what the loop told them."""
        for name, told in self._samplers(loader):
            if name in self._by_loop:
                told.set_epoch(self._epochs[name])
                continue
            if not fed:
                told.set_epoch(epoch)
            self._epochs[name] = getattr(told, "epoch", None)

    def _samplers(self, loader: Any) -> Iterator[tuple[str, Any]]:
        """A Loader is told itself by who feeds from it."""
        for name, told in told_epochs(loader).items():
            if not isinstance(told, Loader):
                yield name, told
