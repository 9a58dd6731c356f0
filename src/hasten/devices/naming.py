"""What the caller wrote: the source text of the arguments of a call that is going on."""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from types import FrameType


def argument_names(count: int, *, depth: int = 2) -> list[str]:
    """Names for the positional arguments of the call made ``depth`` frames up.

    ``same_device(model, batch["image"])`` gives ``["model", "batch['image']"]``. Where the
    source cannot be had (``python -c``, a compiled module), from a starred argument on, and for
    what is no name, an argument is called ``argument 1``, ``argument 2``, ….

    Args:
        count: how many positional arguments the call got.
        depth: 1 is the caller of this function.
    """
    plain = [f"argument {place}" for place in range(1, count + 1)]
    call = _call(sys._getframe(depth))
    if call is None:
        return plain
    names = list(plain)
    for place, argument in enumerate(call.args[:count]):
        if isinstance(argument, ast.Starred):  # how many it stands for is not in the source
            break
        if isinstance(argument, (ast.Name, ast.Attribute, ast.Subscript)):
            names[place] = ast.unparse(argument)
    return names


def _call(frame: FrameType) -> ast.Call | None:
    """The call expression that ``frame`` is executing."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if not 0 <= at < len(positions):
        return None
    first, last, start, end = positions[at]
    if first is None or last is None or start is None or end is None:
        return None
    lines = [
        linecache.getline(frame.f_code.co_filename, number, frame.f_globals)
        for number in range(first, last + 1)
    ]
    if not all(lines):
        return None
    raw = [line.encode() for line in lines]  # columns count bytes of UTF-8
    raw[-1] = raw[-1][:end]
    raw[0] = raw[0][start:]
    try:
        tree = ast.parse(
            textwrap.dedent("(" + b"".join(raw).decode(errors="replace") + ")"), mode="eval"
        )
    except SyntaxError:  # the file changed since it was compiled
        return None
    return tree.body if isinstance(tree.body, ast.Call) else None
