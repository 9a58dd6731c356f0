"""DeviceLoader: a Loader's batches on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hasten.devices import device as chosen_device
from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan

if TYPE_CHECKING:
    from hasten.feed.loader import Loader


class DeviceLoader:
    """A Loader's batches on one device; made by `Loader.to`; it shares the position."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        self.device = runtime.with_index(device)
        self._ahead = None if runtime.is_host(device) else Ahead(self.device)

    def __repr__(self) -> str:
        return f"{self.loader!r}.to({str(self.device)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceLoader, (self.loader, self.device)

    def __iter__(self) -> Iterator[Any]:
        return self.loader._iterate(self.device, self._ahead)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """What a Loader can be asked about itself (`len(batches.dataset)`, as loops do)."""
        if name.startswith("_") or name == "loader":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def plan(self) -> Plan:
        """How batches are made and brought to the device."""
        return self.loader._feeds.plan(self.device)

    @property
    def copy_seconds(self) -> float:
        """Host time spent pinning and copying so far, all epochs; part of the time in next()."""
        return self._ahead.copy_seconds if self._ahead is not None else 0.0

    def explain(self) -> str:
        """See `Loader.explain`."""
        notes = self._ahead.notes if self._ahead is not None else []
        return "\n  ".join([self.loader.explain(self.device), *notes])

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """See `Loader.close`."""
        self.loader.close()


def placed(device: torch.device | str | int) -> torch.device:
    """A device that is here, with its index; one given as such is taken at its word."""
    if isinstance(device, torch.device) or device == "meta":
        return runtime.with_index(torch.device(device))
    if device is None:
        raise UsageError('to(None) names no device: give "auto", "cpu", "cuda", "mps" or another')
    return chosen_device(device)
