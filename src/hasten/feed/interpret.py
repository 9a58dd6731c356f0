"""Works through a data set's code with a stand-in for the index, to see what samples are made of.

What comes out says which columns a sample's parts are rows of, and what is done to each number of
them. Whatever could depend on the index, on other rows, on chance or on anything else is not
understood, and then nothing is assumed: such a data set is treated like any other.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from hasten.feed.columns import Column, Layout, NotUnderstoodError, Part, is_sample
from hasten.feed.reading import attribute, behind, method, name_in, parameters, tree_of

_MOST_CALLS = 8


class _Index:
    pass


_INDEX = _Index()

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
"""Whose results, rounded once, are the same in NumPy and PyTorch and beside any neighbours."""
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
}
_EACH = frozenset(["float", "double", "half", "long", "int", "short", "to", "type", "astype",
                   "clamp", "abs", "clone", "copy", "contiguous"])  # fmt: skip
"""Methods that do the same to each number, whatever stands beside it."""
_FUNCTIONS: frozenset[Any] = frozenset(
    [torch.from_numpy, torch.as_tensor, torch.tensor, np.asarray, np.array, torch.abs, np.abs]
)


def layout_of(dataset: Any) -> Layout | None:
    """What samples are made of; None where the code is not understood."""
    reader = _Reader()
    try:
        shape = reader.run(method(dataset, "__getitem__"), [dataset, _INDEX], 0)
        return Layout(shape, tuple(reader.held)) if is_sample(shape) else None
    except (NotUnderstoodError, AttributeError, NameError, ValueError, RecursionError, TypeError):
        return None


class _Reader:
    """Works through functions, with Parts in place of rows."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], Any], Any]] = []
        self._columns: dict[int, Column] = {}

    def run(self, function: Any, given: list[Any], depth: int) -> Any:
        """What a function returns for these arguments."""
        tree = tree_of(function)
        arguments = tree.args if tree is not None else None
        if tree is None or arguments is None or depth > _MOST_CALLS:
            raise NotUnderstoodError("no source")
        names = parameters(tree)
        extra = arguments.vararg or arguments.kwarg or arguments.kwonlyargs
        if extra or len(names) != len(given):
            raise NotUnderstoodError("its arguments")
        frame = _Frame(self, function, dict(zip(names, given, strict=True)), depth)
        if isinstance(tree, ast.Lambda):
            return frame.value(tree.body)
        done, found = frame.statements(tree.body)
        if not done:
            raise NotUnderstoodError("no return")
        return found

    def attribute(self, owner: Any, name: str) -> Any:
        """An attribute of an object that is the same for all samples; it is remembered."""
        found = attribute(owner, name)
        if isinstance(found, types.MethodType):  # a new one each time, over the same function
            self.held.append((lambda: attribute(owner, name).__func__, found.__func__))
        else:
            self.held.append((partial(attribute, owner, name), found))
        return found

    def of_module(self, module: types.ModuleType, name: str) -> Any:
        """A variable of a module; it is remembered."""
        found = getattr(module, name)
        self.held.append((partial(getattr, module, name), found))
        return found

    def item(self, owner: Any, key: Any) -> Any:
        """An item of a dict, list or tuple that is the same for all samples."""
        found = owner[key]
        self.held.append((partial(operator.getitem, owner, key), found))
        return found

    def name(self, function: types.FunctionType, name: str) -> Any:
        """What a name of a function's surroundings stands for."""
        found = name_in(function, name)
        self.held.append((partial(name_in, function, name), found))
        return found

    def column(self, source: Any) -> Column:
        """The column that indexing this object takes rows of."""
        if id(source) not in self._columns:
            self._columns[id(source)] = Column.of(source)
        return self._columns[id(source)]


class _Frame:
    """One function at work."""

    def __init__(
        self, reader: _Reader, function: types.FunctionType, names: dict[str, Any], depth: int
    ) -> None:
        self._reader = reader
        self._function = function
        self._names = names
        self._depth = depth

    def statements(self, body: list[ast.stmt]) -> tuple[bool, Any]:
        """(it returned, what)."""
        for node in body:
            if isinstance(node, ast.Return):
                return True, None if node.value is None else self.value(node.value)
            if isinstance(node, ast.If):
                done, found = self.statements(node.body if self._test(node.test) else node.orelse)
                if done:
                    return True, found
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._bind(node.targets[0], self.value(node.value))
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, self.value(node.value))
            elif not isinstance(node, ast.Pass) and not (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                raise NotUnderstoodError(type(node).__name__)
        return False, None

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and type(value) in (tuple, list):
            for each, part in zip(target.elts, value, strict=True):
                self._bind(each, part)
        else:
            raise NotUnderstoodError("an assignment to something that stays")

    def _test(self, node: ast.expr) -> bool:
        """A condition that is the same for all samples."""
        found = self.value(node)
        if found is not None and type(found) not in (bool, int, str, tuple):
            own = hasattr(type(found), "__bool__") or hasattr(type(found), "__len__")
            if isinstance(found, (Part, _Index)) or own or not callable(found):
                raise NotUnderstoodError("a condition on the sample")
            return True  # a function or an object with __call__
        return bool(found)

    def value(self, node: ast.expr) -> Any:
        """What an expression stands for."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self._names:
                return self._names[node.id]
            return self._reader.name(self._function, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, (Part, _Index)):
                raise NotUnderstoodError("an attribute of the sample")
            if isinstance(owner, types.ModuleType):
                return self._reader.of_module(owner, node.attr)
            return self._reader.attribute(owner, node.attr)
        if isinstance(node, ast.Tuple):
            return tuple(map(self.value, node.elts))
        if isinstance(node, ast.List):
            return list(map(self.value, node.elts))
        if isinstance(node, ast.Dict):
            keys = [key and self.value(key) for key in node.keys]
            if not all(type(key) is str for key in keys):
                raise NotUnderstoodError("the keys of a dict")
            return dict(zip(keys, map(self.value, node.values), strict=True))
        if isinstance(node, ast.Subscript):
            return self._subscript(self.value(node.value), node.slice)
        if isinstance(node, ast.Call):
            return self._call(node)
        return self._computed(node)

    def _subscript(self, owner: Any, node: ast.expr) -> Any:
        key = self.value(node)
        if key is _INDEX and type(owner) is TensorDataset:
            tensors = self._reader.attribute(owner, "tensors")
            return tuple(Part(self._reader.column(tensor)) for tensor in tensors)
        if key is _INDEX and isinstance(owner, Dataset):
            asked = method(owner, "__getitem__")
            return self._reader.run(asked, [owner, _INDEX], self._depth + 1)
        if key is _INDEX:
            column = self._reader.column(owner)
            number = type(owner[0]) if column.copy is not None else None
            return Part(column, kind=number)
        if type(owner) in (dict, tuple, list) and type(key) in (str, int):
            return self._reader.item(owner, key)
        raise NotUnderstoodError("another index")

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self.value(node.left), self.value(node.right)
            apply = _BINARY[type(node.op)]
            if isinstance(left, Part) and type(right) in (int, float):
                return left.then(lambda rows: apply(rows, right))
            if isinstance(right, Part) and type(left) in (int, float):
                return right.then(lambda rows: apply(left, rows))
            if type(left) in (int, float) and type(right) in (int, float):
                return apply(left, right)
        if isinstance(node, ast.UnaryOp):
            found = self.value(node.operand)
            if isinstance(node.op, ast.USub) and isinstance(found, Part):
                return found.then(operator.neg)
            if isinstance(node.op, ast.USub) and type(found) in (int, float):
                return -found
            if isinstance(node.op, ast.Not):
                return not self._test(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            left, right = self.value(node.left), self.value(node.comparators[0])
            simple = (str, int, float, bool, type(None))
            known = not isinstance(left, (Part, _Index)) and isinstance(right, simple)
            if known and (right is None or isinstance(left, simple)):
                return _COMPARE[type(node.ops[0])](left, right)
        if isinstance(node, ast.BoolOp):
            both = isinstance(node.op, ast.And)
            for each in node.values:
                if self._test(each) is not both:
                    return not both
            return both
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self._test(node.test) else node.orelse)
        raise NotUnderstoodError(type(node).__name__)

    def _call(self, node: ast.Call) -> Any:
        given = [self.value(each) for each in node.args]
        named = {k.arg: self.value(k.value) for k in node.keywords}
        if isinstance(node.func, ast.Attribute):
            if self._is_super(node.func.value) and not named:
                return self._inherited(node.func.attr, given)
            owner = self.value(node.func.value)
            if isinstance(owner, Part):
                return self._method(owner, node.func.attr, given, named)
        target = self.value(node.func)
        if any(isinstance(v, Part) for v in named.values()):
            raise NotUnderstoodError("a named argument")
        return self._function_call(target, given, named)

    def _function_call(self, target: Any, given: list[Any], named: dict[Any, Any]) -> Any:
        first = given[0] if len(given) == 1 else None
        if target is int and first is _INDEX:
            return _INDEX
        if target in (int, float, bool) and isinstance(first, Part) and first.kind is None:
            if first.steps or first.column.rows.ndim != 1:
                raise NotUnderstoodError("a number of a computed row")
            fits = _fits(first.column.rows.dtype, torch.int64) if target is int else ()
            return dataclasses.replace(first, kind=target, fits=fits)
        if _is_one_of(target, _FUNCTIONS) and isinstance(first, Part):
            return self._of_each(target, first, named)
        if target in (tuple, list) and type(first) in (tuple, list):
            return target(first)
        if isinstance(target, type) and issubclass(target, tuple) and hasattr(target, "_fields"):
            return target(*given, **named)
        if not named:
            bound, function = behind(target)
            if function is not None and not isinstance(target, torch.nn.Module):
                return self._reader.run(function, [*bound, *given], self._depth + 1)
        raise NotUnderstoodError(f"a call of {target!r}")

    def _of_each(self, target: Any, part: Part, named: dict[Any, Any]) -> Any:
        """A conversion such as torch.tensor(label, dtype=torch.long)."""
        if set(named) - {"dtype"}:
            raise NotUnderstoodError("options of a conversion")
        dtype = named.get("dtype")
        if target in (torch.abs, np.abs):
            return part.then(abs)
        kinds = {int: torch.int64, bool: torch.bool, float: None}
        plain = dataclasses.replace(part, kind=None)
        if part.kind is not None and dtype is None:
            dtype = kinds[part.kind]
            if dtype is None:
                raise NotUnderstoodError("torch's default type")
        if dtype is None:
            return plain
        tensor = part.kind is None and isinstance(part.column.source, torch.Tensor)
        if part.column.rows.ndim == 1 and not tensor:  # a number: it has to be one of that type
            fits = _fits(part.column.rows.dtype, _dtype(dtype))
            if fits and part.steps:
                raise NotUnderstoodError("an integer of a computed number")
            plain = dataclasses.replace(plain, fits=(*plain.fits, *fits))
        return plain.then(lambda rows: _as(rows, dtype))

    def _method(self, part: Part, name: str, given: list[Any], named: dict[Any, Any]) -> Any:
        rows = part.column.rows
        if name == "item" and not given and rows.ndim == 1 and not part.steps and not part.kind:
            exact = float if rows.is_floating_point() else bool if rows.dtype == torch.bool else int
            return dataclasses.replace(part, kind=exact)
        if name == "numpy" and not given and not named:
            return part
        arguments = [*given, *named.values()]
        plain = (int, float, type(None), torch.dtype, np.dtype, type)
        if name in _EACH and all(isinstance(v, plain) for v in arguments):
            if name in {"to", "astype", "type"} and (named or len(given) != 1):
                raise NotUnderstoodError("options of a conversion")
            if name in {"to", "astype", "type"}:
                return part.then(lambda values: _as(values, given[0]))
            return part.then(lambda values: _method_of(values, name)(*given, **named))
        raise NotUnderstoodError(f"the method {name}")

    @staticmethod
    def _is_super(node: ast.expr) -> bool:
        plain = isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Name)
        return plain and node.func.id == "super"  # type: ignore[attr-defined]

    def _inherited(self, name: str, given: list[Any]) -> Any:
        own = next(iter(self._names.values()))
        here = name_in(self._function, "__class__")
        order = type(own).__mro__
        for kind in order[order.index(here) + 1 :]:
            if name in vars(kind):
                return self._reader.run(vars(kind)[name], [own, *given], self._depth + 1)
        raise NotUnderstoodError("nothing inherited")


def _is_one_of(target: Any, functions: frozenset[Any]) -> bool:
    try:
        return target in functions
    except TypeError:  # it cannot be hashed
        return False


def _as(values: Any, dtype: Any) -> torch.Tensor:
    found: torch.Tensor = values.to(_dtype(dtype))
    return found


def _dtype(dtype: Any) -> torch.dtype:
    given = isinstance(dtype, torch.dtype)
    found: torch.dtype = dtype if given else torch.from_numpy(np.empty(0, dtype)).dtype
    return found


def _fits(given: torch.dtype, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The integers that not all numbers of the given kind are of."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or given == torch.bool:
        return ()
    if given.is_floating_point:
        return (dtype,)
    have, want = torch.iinfo(given), torch.iinfo(dtype)
    return () if want.min <= have.min and have.max <= want.max else (dtype,)


def _method_of(values: Any, name: str) -> Callable[..., Any]:
    names = {"astype": "to", "copy": "clone"}
    found: Callable[..., Any] = getattr(values, names.get(name, name))
    return found
