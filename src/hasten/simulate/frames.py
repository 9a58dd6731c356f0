"""Where in the user's own code something happened: the innermost frame outside the libraries."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType


@dataclass(frozen=True, kw_only=True)
class Location:
    """A line of source: the file as Python names it, the line (1-based) and the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _roots() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_paths()[name] for name in names}
    here = str(Path(__file__).resolve().parents[1])
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        paths.add(str(Path(torch.__file__).resolve().parent))
    return tuple(path.rstrip("/\\") + ("\\" if "\\" in path else "/") for path in (*paths, here))


_ROOTS = _roots()
_known: dict[str, bool] = {}


def is_library(file: str) -> bool:
    """Whether a source file belongs to Python, an installed package, or hasten itself."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = file.startswith(("<", *_ROOTS)) and not file.startswith("<ipython")
    return known


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame of the calling thread that is the user's, or None.

    Args:
        depth: frames to skip, counted from the caller.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def locate(depth: int = 1) -> Location | None:
    """The user's line that the calling thread is in, or None where there is none."""
    frame = user_frame(depth + 1)
    if frame is None:
        return None
    return Location(
        file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name
    )
