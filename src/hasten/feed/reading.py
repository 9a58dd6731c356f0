"""What a data set's code does, read from its source: only what is seen there counts as known.

Functions are looked up in the file that they came from, and the file is compiled again: where
the result is not the code that runs, or the source cannot be had, nothing is known.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import linecache
import os
import re
import types
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

_MOST_CALLS = 8  # depth of functions that call functions
_PLAIN = frozenset([int, float, complex, bool, str, bytes, type(None), range])
_BUILTINS_WORDS = (
    "int float bool str len range enumerate zip min max abs sum round tuple list dict set sorted"
    " reversed isinstance ord chr open divmod pow bytes slice any all"
)
_BUILTINS = frozenset(_BUILTINS_WORDS.split())
_MODULES = frozenset(["time", "math", "json", "struct", "torch", "numpy", "posixpath", "io"])
_NOT_IN_MODULES = re.compile(
    r"(^|\.)(set_|manual_seed|seed|use_|enable|load|save|random|shuffle|rand|bernoulli|normal"
    r"|multinomial|get_|fork|lock|.*dropout|.*_$)"
)
_METHODS_WORDS = (
    "float double half long int short byte bool item tolist numpy clone copy to type astype view"
    " reshape flatten permute transpose unsqueeze squeeze contiguous sum mean min max std clamp"
    " abs flip roll repeat expand strip split lower upper rstrip lstrip replace join encode decode"
    " startswith endswith get index count keys values items read read_bytes read_text convert crop"
    " resize"
)
_METHODS = frozenset(_METHODS_WORDS.split())
_VALUES_WORDS = "shape dtype ndim size T real imag device name stem suffix parent"
_VALUES = frozenset(_VALUES_WORDS.split())


def tree_of(function: Any) -> ast.FunctionDef | ast.Lambda | None:
    """The source of a plain Python function, if it is known to be what runs."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, types.FunctionType) or code is None:
        return None
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = _compiled("".join(lines), code.co_filename) if lines else {}
    trees = (tree for tree, seen in found.get(code.co_firstlineno, ()) if seen == code)
    return next(trees, None)


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


def harmless(dataset: Any) -> bool:
    """Whether threads may ask a data set for samples at once, by what its code is seen to do.

    It reads plain values, tensors and arrays, waits, opens files of its own, computes, and writes
    to nothing that another thread sees; it draws no random numbers.
    """
    if type(dataset) is Subset:
        return is_plain(dataset.indices) and harmless(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(harmless, dataset.datasets))
    method = inspect.getattr_static(type(dataset), "__getitem__", None)
    try:
        return _Harmless().method(method, dataset, 0)
    except (AttributeError, NameError, ValueError, RecursionError):
        return False


def calls_harmless(function: Any) -> bool:
    """Whether threads may call a function at once, by what its code is seen to do (see above)."""
    try:
        return _Harmless().call(function, 0)
    except (AttributeError, NameError, ValueError, RecursionError):
        return False


class _Harmless:
    """Looks at every statement, whether it would be run or not."""

    def method(self, function: Any, owner: Any, depth: int) -> bool:
        """A function whose first parameter is `owner`; without one, `owner` is None."""
        tree = tree_of(function)
        if tree is None or depth > _MOST_CALLS:
            return False
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        own = arguments[0] if owner is not None and arguments else None
        names = {*arguments, *(a.arg for a in tree.args.kwonlyargs)}
        look = _Look(function, own, owner, names, depth, self)
        body = tree.body if isinstance(tree, ast.FunctionDef) else [ast.Return(tree.body)]
        return all(map(look.statement, body))

    def call(self, target: Any, depth: int) -> bool:
        """Whether calling this object is harmless."""
        if isinstance(target, types.MethodType):
            return self.method(target.__func__, target.__self__, depth + 1)
        if isinstance(target, types.FunctionType) and not _of_modules(target):
            return self.method(target, None, depth + 1)
        if isinstance(target, type) and not _of_modules(target):
            record = dataclasses.is_dataclass(target) and not hasattr(target, "__post_init__")
            named = issubclass(target, tuple) and hasattr(target, "_fields")
            return record or named or issubclass(target, PurePath) or target.__module__ == "io"
        return _of_modules(target)


def _of_modules(target: Any) -> bool:
    name = str(getattr(target, "__name__", ""))
    module = str(getattr(target, "__module__", None) or "")
    if module == "builtins" and getattr(builtins, name, None) is target:
        return name in _BUILTINS
    if target in (torch.Tensor, np.ndarray):
        return False
    if module == "PIL.Image" and name in {"open", "fromarray"}:
        return True
    home = module.split(".")[0]
    known = home in _MODULES
    if not module and getattr(torch, name, None) is target:
        known = True
    if target in (open, os.path.join, os.path.exists):
        return True
    return known and not _NOT_IN_MODULES.search(name) and "random" not in module


class _Look:
    """The statements of one function."""

    def __init__(
        self,
        function: types.FunctionType,
        own: str | None,
        owner: Any,
        names: set[str],
        depth: int,
        rules: _Harmless,
    ) -> None:
        self._function = function
        self._own = own
        self._owner = owner
        self._depth = depth
        self._rules = rules
        self._locals = names
        self._fresh: set[str] = set()

    def statement(self, node: ast.stmt) -> bool:
        """Whether it is harmless."""
        if isinstance(node, ast.Return | ast.Expr):
            return node.value is None or self.value(node.value)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            good = node.value is None or self.value(node.value)
            return good and all(map(self._bind, targets))
        if isinstance(node, ast.If | ast.While):
            return self.value(node.test) and all(map(self.statement, [*node.body, *node.orelse]))
        if isinstance(node, ast.For):
            good = self.value(node.iter) and self._bind(node.target)
            return good and all(map(self.statement, [*node.body, *node.orelse]))
        if isinstance(node, ast.With):
            for item in node.items:
                if not self.value(item.context_expr):
                    return False
                if item.optional_vars is not None and not self._bind(item.optional_vars):
                    return False
            return all(map(self.statement, node.body))
        if isinstance(node, ast.Raise):
            return True  # told by the loop, which makes the sample again
        return isinstance(node, ast.Pass | ast.Break | ast.Continue)

    def _bind(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Name) and target.id != self._own:
            self._locals.add(target.id)
            return True
        if isinstance(target, ast.Tuple | ast.List):
            return all(map(self._bind, target.elts))
        return False

    def value(self, node: ast.expr) -> bool:
        """Whether computing it is harmless."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return node.id in self._locals or self._plain(node)
        if isinstance(node, ast.Attribute):
            if node.attr in _VALUES and self._known(node) is _UNKNOWN:
                return self.value(node.value)
            return self._plain(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(
            node,
            ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Subscript
            | ast.Tuple | ast.List | ast.Dict | ast.Slice | ast.JoinedStr | ast.FormattedValue
            | ast.Starred,
        ):  # fmt: skip
            parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
            return all(map(self.value, parts))
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            for each in node.generators:
                if each.is_async or not self.value(each.iter) or not self._bind(each.target):
                    return False
                if not all(map(self.value, each.ifs)):
                    return False
            return self.value(node.elt)
        return False

    def _call(self, node: ast.Call) -> bool:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not all(map(self.value, given)):
            return False
        target = self._known(node.func)
        if target is not _UNKNOWN:
            return self._rules.call(target, self._depth)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return self.value(node.func.value)
        return False

    def _known(self, node: ast.expr) -> Any:
        """The object that a dotted name stands for, where that is the same at each call."""
        try:
            if isinstance(node, ast.Name):
                if node.id == self._own:
                    return self._owner
                if node.id in self._locals:
                    return _UNKNOWN
                return name_in(self._function, node.id)
            if isinstance(node, ast.Attribute):
                owner = self._known(node.value)
                if isinstance(owner, types.ModuleType):
                    return getattr(owner, node.attr)
                if owner is self._owner and owner is not None:
                    return attribute(owner, node.attr)
        except (AttributeError, NameError, ValueError):
            return _UNKNOWN
        return _UNKNOWN

    def _plain(self, node: ast.expr) -> bool:
        found = self._known(node)
        if isinstance(found, torch.dtype | torch.device):
            return True
        return found is not _UNKNOWN and is_plain(found)


class _Unknown:
    pass


_UNKNOWN = _Unknown()


def is_plain(value: Any, depth: int = 3) -> bool:
    """Numbers, text, tensors and arrays, and lists, tuples and dicts of them."""
    if type(value) in _PLAIN or isinstance(value, PurePath | np.generic):
        return True
    if type(value) in (np.ndarray, np.memmap):
        return not value.dtype.hasobject
    if type(value) is torch.Tensor:
        return True
    if depth and type(value) in (list, tuple):
        return all(is_plain(each, depth - 1) for each in value)
    if depth and type(value) is dict:
        return all(is_plain(each, depth - 1) for each in (*value, *value.values()))
    return False
