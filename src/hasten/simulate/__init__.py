"""An accelerator made of software: ``with hasten.simulate():`` lets CUDA code run and fail here.

The numbers are the CPU's; placement, errors, synchronisations, memory and order are CUDA's.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from hasten.simulate.frames import Location as Location
from hasten.simulate.frames import user_frame as user_frame
from hasten.simulate.records import Copy as Copy
from hasten.simulate.records import Hazard as Hazard
from hasten.simulate.records import MemoryFigures as MemoryFigures
from hasten.simulate.records import Mismatch as Mismatch
from hasten.simulate.records import MismatchInfo as MismatchInfo
from hasten.simulate.records import Operand as Operand
from hasten.simulate.records import Origin as Origin
from hasten.simulate.records import Sync as Sync
from hasten.simulate.simulation import Simulation as Simulation
from hasten.simulate.simulation import simulate as simulate
from hasten.simulate.specs import SPECS as SPECS
from hasten.simulate.specs import DeviceSpec as DeviceSpec


class _Callable(ModuleType):
    """Lets the package be called: ``hasten.simulate()`` is ``hasten.simulate.simulate()``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Simulation:
        return simulate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
