"""What a script does only every so many steps: how long a loop must run until it was seen once."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FrameType

from hasten.script.rehearsal.naming import value_of
from hasten.script.rehearsal.syntax import function_at

_LONGEST = 16  # steps that are waited for at most


class Rhythm:
    """Reads `step % every` in the user's functions that lead to an optimizer's step."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._read: dict[tuple[str, int], list[ast.expr]] = {}

    def steps(self, frame: FrameType | None, least: int) -> int:
        """Steps after which all that comes every so many steps was seen, and one more.

        Args:
            frame: the step's; its callers are looked at too.
            least: what is enough where nothing does.
        """
        found = least
        while frame is not None:
            if self._holds(frame.f_code.co_filename):
                for divisor in self._divisors(frame):
                    value, _ = value_of(divisor, frame)
                    if type(value) is int and least <= value <= _LONGEST:
                        found = max(found, value + 1)
            frame = frame.f_back
        return found

    def _divisors(self, frame: FrameType) -> list[ast.expr]:
        key = frame.f_code.co_filename, frame.f_code.co_firstlineno
        if key not in self._read:
            function = function_at(frame.f_code.co_filename, frame.f_lineno)
            self._read[key] = [
                node.right
                for node in (ast.walk(function) if function is not None else ())
                if isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Mod)
                and not isinstance(node.left, (ast.Constant, ast.JoinedStr))
            ]
        return self._read[key]
