"""Signal handlers of the program's that raise amid the feed's code: theirs is not its own error."""

from __future__ import annotations

import inspect
from itertools import chain, pairwise
from traceback import walk_tb
from types import FrameType


def by_a_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it, in whatever code it has interrupted.

    Not to be known by the type of the error (an alarm clock's is often a TimeoutError or OSError),
    nor by the handlers that are set (it may have put another in its place): Python calls them with
    the frame that they interrupt.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(_is_given(inner, outer) for outer, inner in pairwise(frames))


def _is_given(frame: FrameType, what: FrameType) -> bool:
    code, there = frame.f_code, frame.f_locals
    more = code.co_flags & inspect.CO_VARARGS  # its name comes after those of keywords
    count = code.co_argcount + (code.co_kwonlyargcount + 1 if more else 0)
    given = [there.get(name) for name in code.co_varnames[:count]]
    return any(each is what for each in chain(given, given[-1] if more and given[-1] else ()))
