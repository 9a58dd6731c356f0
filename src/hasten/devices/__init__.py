"""Devices: choose one, describe it, measure it, move things to it, check that they met there.

The lowest floor of hasten: it imports nothing of the package but ``hasten.errors``. All that it
asks PyTorch goes through ``runtime``.
"""

from __future__ import annotations

from hasten.devices import runtime
from hasten.devices.advising import advice
from hasten.devices.describing import DeviceInfo, describe
from hasten.devices.measuring import measure
from hasten.devices.meeting import same_device
from hasten.devices.moving import move
from hasten.devices.rates import Rates
from hasten.devices.selection import device

__all__ = [
    "DeviceInfo",
    "Rates",
    "advice",
    "describe",
    "device",
    "measure",
    "move",
    "runtime",
    "same_device",
]
