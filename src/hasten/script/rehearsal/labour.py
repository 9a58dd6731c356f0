"""How much work a sample takes on the host: calls are counted, as times would be this machine's."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

from hasten.script.rehearsal.places import Territory

_ARRAYS = frozenset(
    ["numpy", "PIL", "cv2", "scipy", "skimage", "librosa", "albumentations", "pandas"]
)
_SLEEP = 100  # calls that a sleep, which stands for work, is counted as


class Labour:
    """Counts, while it is entered, the calls that the user's code makes.

    Attributes:
        arrays: calls of array and image libraries.
        plain: other calls of functions written in C: strings, dicts, regular expressions.
    """

    def __init__(self, territory: Territory) -> None:
        self._territory = territory
        self.arrays = self.plain = 0

    def __enter__(self) -> Labour:
        self.arrays = self.plain = 0
        self._before = sys.getprofile()
        if self._before is None:
            sys.setprofile(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is None:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if self._territory.holds(frame.f_code.co_filename):
                if arg is time.sleep:
                    self.arrays += _SLEEP
                elif _home(arg) in _ARRAYS:
                    self.arrays += 1
                else:
                    self.plain += 1
        elif event == "call":
            caller = frame.f_back
            if caller is None or frame.f_code.co_name.endswith("_dispatcher"):
                return  # NumPy asks for the arguments first
            home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if home in _ARRAYS and self._territory.holds(caller.f_code.co_filename):
                self.arrays += 1


def _home(function: Any) -> str:
    """The package that a function of C comes from."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__module__", None) or type(owner).__module__
    return str(name).partition(".")[0]
