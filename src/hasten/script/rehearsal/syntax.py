"""What the user's source says around a line: where an attribute is given, what a mover leaves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from hasten.script.rehearsal.places import statement, tree

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def assigned(cls: type, name: str) -> tuple[str, int] | None:
    """The file and line where a class's own methods first give `self.name` a value."""
    for base in cls.__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        definition = _class(file, base.__qualname__) if isinstance(file, str) else None
        if definition is None or not isinstance(file, str):
            continue
        methods = [node for node in definition.body if isinstance(node, _Function)]
        for method in sorted(methods, key=lambda node: node.name != "__init__"):
            for node in ast.walk(method):
                if any(_is_own(target, name) for target in _targets(node)):
                    return file, node.lineno  # type: ignore[attr-defined]
    return None


def moved_at_once(file: str, line: int, text: str) -> bool:
    """Whether what an expression on a line gives is moved right there: `table[index].to(...)`."""
    whole = statement(file, line)
    return whole is not None and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("to", "cuda")
        and ast.unparse(node.func.value) == text
        for node in ast.walk(whole)
    )


def unpacks(file: str, line: int) -> bool:
    """Whether the statement on a line takes several things from one call."""
    node = statement(file, line)
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.targets[0], (ast.Tuple, ast.List))
    )


def _class(file: str, qualname: str) -> ast.ClassDef | None:
    module = tree(file)
    wanted = qualname.rpartition(".")[2]
    found = [] if module is None else [n for n in ast.walk(module) if isinstance(n, ast.ClassDef)]
    named = [node for node in found if node.name == wanted]
    return named[0] if len(named) == 1 else None


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        todo = list(node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        todo = [node.target]
    else:
        return
    for target in todo:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,)


def _is_own(node: ast.expr, name: str) -> bool:
    own = isinstance(node, ast.Attribute) and node.attr == name
    return own and isinstance(node.value, ast.Name) and node.value.id == "self"  # type: ignore[attr-defined]


def left_beside(file: str, line: int, last: str) -> int | None:
    """The line of the part that stands unmoved beside a moved one, in one dict, call or tuple.

    Args:
        file: where the moved part is.
        line: of the move.
        last: key or field of the part that was left.
    """
    whole = statement(file, line)
    if whole is None:
        return None
    for node in ast.walk(whole):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == last:
                    return value.lineno
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == last:
                    return keyword.value.lineno
    return None


def taken_apart(file: str, line: int, name: str) -> int | None:
    """The last assignment to a name before a line of its function, as in `meta = batch["meta"]`."""
    function = function_at(file, line)
    lines = [
        node.lineno
        for node in ast.walk(function) if isinstance(node, ast.Assign)
        for target in _targets(node)
        if isinstance(target, ast.Name) and target.id == name and node.lineno <= line
        and isinstance(node.value, (ast.Name, ast.Attribute, ast.Subscript))
    ] if function is not None else []  # fmt: skip
    return max(lines, default=None)


def passed_on(file: str, line: int) -> int | None:
    """The line of a mover that gives back, as it came, what it does not know how to move."""
    function = function_at(file, line)
    if not isinstance(function, _Function):
        return None
    arguments = {arg.arg for arg in (*function.args.posonlyargs, *function.args.args)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.lineno == line:
            continue
        if isinstance(node.value, ast.Name) and node.value.id in arguments - _given(function):
            return node.lineno
    return None


def _given(function: _Function) -> set[str]:
    """The names that a function gives another value."""
    stored = (n for n in ast.walk(function) if isinstance(n, ast.Name))
    return {node.id for node in stored if isinstance(node.ctx, ast.Store)}


def function_at(file: str, line: int) -> _Function | ast.Module | None:
    """The innermost function around a line, or the file."""
    module = tree(file)
    best: _Function | ast.Module | None = module
    for node in ast.walk(module) if module is not None else ():
        if not isinstance(node, _Function) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if not isinstance(best, _Function) or node.lineno > best.lineno:
            best = node
    return best
