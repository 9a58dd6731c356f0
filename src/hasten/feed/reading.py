"""What a data set's code does, read from its source: only what is seen there counts as known.

Functions are looked up in the file that they came from, and the file is compiled again: where
the result is not the code that runs, or the source cannot be had, nothing is known.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import types
from functools import lru_cache
from typing import Any


def tree_of(function: Any) -> ast.FunctionDef | ast.Lambda | None:
    """The source of a plain Python function, if it is known to be what runs."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, types.FunctionType) or code is None:
        return None
    lines = _lines(function)
    found = _compiled("".join(lines), code.co_filename) if lines else {}
    trees = (tree for tree, seen in found.get(code.co_firstlineno, ()) if seen == code)
    return next(trees, None)


def has_source(function: types.FunctionType) -> bool:
    """Whether its file has any text: what `exec` or standard input gave has none."""
    return bool(_lines(function))


def _lines(function: types.FunctionType) -> list[str]:
    return linecache.getlines(function.__code__.co_filename, function.__globals__)


@lru_cache(maxsize=32)
def _compiled(text: str, name: str) -> dict[int, list[tuple[Any, types.CodeType]]]:
    """By first line: each function's tree and what it compiles to."""
    try:
        module = ast.parse(text)
        codes = list(_codes(compile(text, name, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    trees: dict[tuple[int, Any], list[Any]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            trees.setdefault((line, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault((node.body.lineno, node.body.col_offset), []).append(node)
    found: dict[int, list[tuple[Any, types.CodeType]]] = {}
    for code in codes:
        named = code.co_name != "<lambda>"
        nodes = trees.get((code.co_firstlineno, code.co_name) if named else _begin(code), [])
        if len(nodes) == 1:
            found.setdefault(code.co_firstlineno, []).append((nodes[0], code))
    return found


def _codes(code: types.CodeType) -> Any:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _begin(code: types.CodeType) -> tuple[int, int]:
    """Line and column at which the body of a lambda begins: there may be several in a line."""
    places = [(line, column) for line, _, column, end in code.co_positions()
              if line is not None and column is not None and end]  # fmt: skip
    return min(places, default=(0, 0))


def name_in(function: types.FunctionType, name: str) -> Any:
    """What a name that is not local means in a function.

    Raises:
        NameError: nothing.
    """
    code = function.__code__
    if name in code.co_freevars:
        cell = (function.__closure__ or ())[code.co_freevars.index(name)]
        return cell.cell_contents
    if name in function.__globals__:
        return function.__globals__[name]
    return getattr(builtins, name)


def attribute(owner: Any, name: str) -> Any:
    """An attribute that is kept as it is: no property, nothing made on the way.

    Raises:
        AttributeError: there is none.
    """
    reader: Any = type(owner).__getattribute__
    if reader is not object.__getattribute__:
        raise AttributeError(name)
    if name in getattr(owner, "__dict__", {}):
        return owner.__dict__[name]
    found = inspect.getattr_static(owner, name)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, owner)
    if isinstance(found, staticmethod):
        return found.__func__
    if hasattr(type(found), "__get__") and not isinstance(found, type):
        raise AttributeError(name)
    return found
