"""Calls on a stack: which are somebody's own, and where they stand."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

TORCH, _HASTEN = (
    str(Path(file).resolve()) for file in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_LIBRARIES = (TORCH, _HASTEN, sysconfig.get_paths()["stdlib"], "<")


def is_library(frame: FrameType) -> bool:
    """Whether a call is of Python's, torch's or hasten's own code."""
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def own(frames: Iterable[FrameType]) -> FrameType | None:
    """The last of some calls that is of somebody's own code; of a package where none is."""
    others = [frame for frame in frames if not is_library(frame)]
    packaged = sysconfig.get_paths()["purelib"]
    mine = [one for one in others if not one.f_code.co_filename.startswith(packaged)]
    return next(reversed(mine or others), None)


def place(frame: FrameType) -> str:
    """File, line and function of a call."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
