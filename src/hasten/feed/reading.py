"""The source of functions, and what the names in it stand for: nothing here judges them.

Functions are looked up in the file that they came from, and the file is compiled again: where
the result is not the code that runs, or the source cannot be had, nothing is known.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import inspect
import linecache
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

UNKNOWN: Any = object()
"""What a name stands for that is not the same object at each call."""

UNREADABLE = (AttributeError, NameError, ValueError, TypeError, RecursionError)
"""What reading code raises where it cannot be looked up."""


def shown(seen: Callable[[], bool]) -> bool:
    """Whether something is seen in the code; what cannot be looked up is not."""
    try:
        return seen()
    except UNREADABLE:
        return False


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


@dataclasses.dataclass(frozen=True)
class Scope:
    """A function whose source is known to be what runs, and the names in it.

    Attributes:
        own: its first parameter, where it is a method; `owner`: what that stands for.
        names: that it binds itself, among them its other parameters.
    """

    function: types.FunctionType
    tree: ast.FunctionDef | ast.Lambda
    own: str | None
    owner: Any
    names: frozenset[str]

    @classmethod
    def of(cls, function: Any, owner: Any = None) -> Scope | None:
        """That of a function, or of a method of `owner`; None where its source is not known."""
        tree = tree_of(function)
        if tree is None:
            return None
        own = next(iter(parameters(tree)), None) if owner is not None else None
        # What a comprehension binds is only known within it, also where Python makes it a variable
        # of the function.
        bound = {node.arg for node in ast.walk(tree.args) if isinstance(node, ast.arg)}
        targets = {id(name) for node in ast.walk(tree) if isinstance(node, ast.comprehension)
                   for name in ast.walk(node.target)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound |= {node.id} if id(node) not in targets else set()
        code = function.__code__
        names = bound & {*code.co_varnames, *code.co_cellvars} - {own}
        return cls(function, tree, own, owner, frozenset(names))

    @property
    def body(self) -> list[ast.stmt] | list[ast.expr]:
        """Its statements; of a lambda, its value."""
        return self.tree.body if isinstance(self.tree, ast.FunctionDef) else [self.tree.body]

    @property
    def defaults(self) -> list[Any]:
        """What its parameters are where they are not given."""
        function = self.function
        return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    def within(self, *targets: ast.AST) -> Scope:
        """The same where these names or parameters are bound, too."""
        nodes = [node for target in targets for node in ast.walk(target)]
        inner = {node.id for node in nodes if isinstance(node, ast.Name)}
        inner |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        return dataclasses.replace(self, names=self.names | inner)

    def is_own(self, node: ast.AST) -> bool:
        """Whether it is the first parameter of a method."""
        return isinstance(node, ast.Name) and node.id == self.own and node.id not in self.names

    def known(self, node: ast.AST) -> Any:
        """What a dotted name stands for, where that is the same at each call; else `UNKNOWN`."""
        try:
            if isinstance(node, ast.Name) and node.id not in self.names:
                return self.owner if node.id == self.own else name_in(self.function, node.id)
            if isinstance(node, ast.Attribute):
                home = self.known(node.value)
                if isinstance(home, types.ModuleType | enum.EnumType):
                    return getattr(home, node.attr)
                if home is self.owner and home is not None and home is not UNKNOWN:
                    return attribute(home, node.attr)
        except (AttributeError, NameError, ValueError, ImportError):
            return UNKNOWN
        return UNKNOWN


def parameters(tree: ast.FunctionDef | ast.Lambda) -> list[str]:
    """Those that may be given by place."""
    return [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]


def behind(target: Any) -> tuple[list[Any], types.FunctionType | None]:
    """(what is given to it first, the Python function) behind something that is called."""
    if isinstance(target, types.MethodType):
        return [target.__self__], target.__func__  # type: ignore[return-value]
    if isinstance(target, types.FunctionType):
        return [], target
    called = method(target, "__call__") if not isinstance(target, type) else None
    return ([target], called) if isinstance(called, types.FunctionType) else ([], None)


def method(owner: Any, name: str) -> Any:
    """What Python calls of an object's class by a name such as ``__len__``; None without one."""
    return inspect.getattr_static(type(owner), name, None)


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
