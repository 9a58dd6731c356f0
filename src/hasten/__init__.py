"""hasten: PyTorch training at the speed of whatever device it runs on.

Public names are imported when first used, so that ``import hasten`` costs little more than
``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hasten.devices import DeviceInfo as DeviceInfo
    from hasten.devices import device as device
    from hasten.devices import move as move
    from hasten.devices import same_device as same_device
    from hasten.errors import CheckpointError as CheckpointError
    from hasten.errors import DataError as DataError
    from hasten.errors import DeviceMismatch as DeviceMismatch
    from hasten.errors import DeviceUnavailable as DeviceUnavailable
    from hasten.errors import HastenError as HastenError
    from hasten.errors import Interrupted as Interrupted
    from hasten.errors import NonFiniteLoss as NonFiniteLoss
    from hasten.errors import OutOfDeviceMemory as OutOfDeviceMemory
    from hasten.errors import UsageError as UsageError
    from hasten.feed import Loader as Loader
    from hasten.train import Result as Result
    from hasten.train import Run as Run
    from hasten.train import Trainer as Trainer

_HOME = {
    "CheckpointError": "hasten.errors",
    "DataError": "hasten.errors",
    "DeviceInfo": "hasten.devices",
    "DeviceMismatch": "hasten.errors",
    "DeviceUnavailable": "hasten.errors",
    "HastenError": "hasten.errors",
    "Interrupted": "hasten.errors",
    "Loader": "hasten.feed",
    "NonFiniteLoss": "hasten.errors",
    "OutOfDeviceMemory": "hasten.errors",
    "Result": "hasten.train",
    "Run": "hasten.train",
    "Trainer": "hasten.train",
    "UsageError": "hasten.errors",
    "device": "hasten.devices",
    "move": "hasten.devices",
    "same_device": "hasten.devices",
}

_FLOORS = frozenset(
    {"devices", "errors", "feed", "observe", "script", "simulate", "train", "vision"}
)

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _FLOORS:
        return import_module(f"hasten.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
