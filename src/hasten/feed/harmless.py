"""What a data set's code would leave behind, as far as that can be shown from its source.

Harmless is only what is known to be: plain values are read, functions that are named in `pure` are
called, and other functions whose source is read in the same way. Everything else is not.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import types
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from hasten.feed import pure
from hasten.feed.reading import attribute, name_in, tree_of

_MOST_CALLS = 8  # depth of functions that call functions
_MOST_ITEMS = 5_000_000  # of lists that are looked through: a tenth of a second
_MOST_NESTED = 100_000  # of those with lists or dicts in them
_PLAIN = frozenset([int, float, complex, bool, str, bytes, type(None), range])
_VALUES_WORDS = "shape dtype ndim size T real imag device name stem suffix parent width height mode"
_VALUES = frozenset(_VALUES_WORDS.split())
_WRITING = frozenset("wax+")  # modes of files
_GENERATED = frozenset(["dataclasses", "collections", "typing", "reprlib"])


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


def length_is_harmless(dataset: Any) -> bool:
    """Whether its `__len__` may be asked at any time, by what it is seen to do (see above)."""
    counted = inspect.getattr_static(type(dataset), "__len__", None)
    try:
        return _Harmless().method(counted, dataset, 0)
    except (AttributeError, NameError, ValueError, RecursionError):
        return False


def calls_harmless(function: Any) -> bool:
    """Whether threads may call a function at once, by what its code is seen to do (see above)."""
    try:
        return _Harmless().call(function, 0, _Given(1))
    except (AttributeError, NameError, ValueError, RecursionError):
        return False


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a function is called with.

    Attributes:
        places: arguments given by place; None where that is not known.
        named: whether all given by name are of `pure.KEYWORDS`.
    """

    places: int | None
    named: bool = True

    def fits(self, most: int) -> bool:
        if self.places is None:
            return self.named and most == pure.MANY
        return self.named and self.places <= most


class _Harmless:
    """Looks at every statement, whether it would be run or not."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[Any, bool]] = {}

    def plain(self, value: Any) -> bool:
        """See `is_plain`; each value is looked at once."""
        if id(value) not in self._plain:
            self._plain[id(value)] = value, is_plain(value)
        return self._plain[id(value)][1]

    def method(self, function: Any, owner: Any, depth: int) -> bool:
        """A function whose first parameter is `owner`; without one, `owner` is None."""
        tree = tree_of(function)
        if tree is None or depth > _MOST_CALLS:
            return False
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if not all(map(self.plain, defaults)):
            return False
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        own = arguments[0] if owner is not None and arguments else None
        names = {*arguments, *(a.arg for a in tree.args.kwonlyargs)} - {own}
        look = _Look(function, own, owner, names, depth, self)
        body = tree.body if isinstance(tree, ast.FunctionDef) else [ast.Return(tree.body)]
        look.sees_images(tree)
        return all(map(look.statement, body))

    def call(self, target: Any, depth: int, given: _Given) -> bool:
        """Whether calling this object is harmless."""
        if target is None:  # as a transform that is not there: it would raise
            return True
        most = pure.places(target)
        if most is not None:
            return given.fits(most)
        if isinstance(target, types.MethodType):
            return self.method(target.__func__, target.__self__, depth + 1)
        if isinstance(target, types.FunctionType):
            return self.method(target, None, depth + 1)
        if isinstance(target, type):
            return _is_record(target)
        called = inspect.getattr_static(type(target), "__call__", None)
        if isinstance(called, types.FunctionType):
            return self.method(called, target, depth + 1)
        return False


def _is_record(kind: type) -> bool:
    """A dataclass or named tuple without code of its own in what Python calls by itself."""
    record = "__dataclass_fields__" in vars(kind) and not hasattr(kind, "__post_init__")
    if record:
        made = [f.default_factory for f in dataclasses.fields(kind)]
        record = all(f is dataclasses.MISSING or f in (list, dict, set) for f in made)
    named = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return type(kind) is type and (record or named) and _is_bare(kind)


def _is_bare(kind: type) -> bool:
    """Whether no code of a person's runs when it is made, compared or computed with."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            code = getattr(value, "__code__", None)
            if not name.startswith("__") or code is None or code.co_filename == "<string>":
                continue
            if value.__globals__.get("__name__") not in _GENERATED:
                return False
    return True


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
        self._images: set[str] = set()

    def sees_images(self, tree: ast.AST) -> None:
        """Note which names stand for images of PIL's, whatever is done."""
        bound: dict[str, list[ast.expr | None]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                bound.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                bound.setdefault(node.optional_vars.id, []).append(node.context_expr)
            elif isinstance(node, ast.arg):
                bound.setdefault(node.arg, []).append(None)
        stored = [n.id for n in ast.walk(tree)
                  if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]  # fmt: skip
        for _ in bound:  # one image is made of another
            for name, values in bound.items():
                if len(values) == stored.count(name) and all(map(self._is_image, values)):
                    self._images.add(name)

    def _is_image(self, node: ast.expr | None) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._images
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr in pure.IMAGE_METHODS:
            return self._is_image(node.func.value)
        return pure.opens_images(self._known(node.func))

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
            return node.cause is None and (node.exc is None or self._raises(node.exc))
        return isinstance(node, ast.Pass | ast.Break | ast.Continue)

    def _raises(self, node: ast.expr) -> bool:
        """An error of Python's own: told by the loop, which makes the sample again."""
        kind = self._known(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or not _is_bare(kind):
            return False
        given = (
            [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
        )
        return all(map(self.value, given))

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
            outside = set(self._locals)
            good = all(map(self._goes_through, node.generators)) and self.value(node.elt)
            self._locals = outside
            return good
        return False

    def _goes_through(self, each: ast.comprehension) -> bool:
        good = not each.is_async and self.value(each.iter) and self._bind(each.target)
        return good and all(map(self.value, each.ifs))

    def _call(self, node: ast.Call) -> bool:
        target = self._known(node.func)
        if target is len and self._own is not None and _names(node.args) == [self._own]:
            counted = inspect.getattr_static(type(self._owner), "__len__", None)
            return self._rules.method(counted, self._owner, self._depth + 1)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not all(map(self.value, values)):
            return False
        known = any(isinstance(each, ast.Starred) for each in node.args)
        given = _Given(
            None if known else len(node.args), {k.arg for k in node.keywords} <= pure.KEYWORDS
        )
        if target is open and not _reads(node):
            return False
        if target is not _UNKNOWN:
            return self._rules.call(target, self._depth, given)
        if not isinstance(node.func, ast.Attribute) or not self.value(node.func.value):
            return False
        name = node.func.attr
        if name in pure.IMAGE_METHODS and self._is_image(node.func.value):
            return given.fits(pure.IMAGE_METHODS[name])
        if name == "replace":  # of text; that of a path has one argument, and moves a file
            return given.fits(3) and given.places not in (0, 1, None)
        return name in pure.METHODS and given.fits(pure.METHODS[name])

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
                if isinstance(owner, types.ModuleType | enum.EnumType):
                    return getattr(owner, node.attr)
                if owner is self._owner and owner is not None:
                    return attribute(owner, node.attr)
        except (AttributeError, NameError, ValueError):
            return _UNKNOWN
        return _UNKNOWN

    def _plain(self, node: ast.expr) -> bool:
        found = self._known(node)
        if found is _UNKNOWN:
            return False
        if isinstance(found, type):  # as it stands for a type of numbers
            return found.__module__ in ("builtins", "numpy")
        if isinstance(found, enum.Enum):
            return type(found).__module__.startswith("PIL.")
        return pure.is_torch_value(found) or self._rules.plain(found)


def _names(nodes: list[ast.expr]) -> list[str]:
    return [node.id if isinstance(node, ast.Name) else "" for node in nodes]


def _reads(node: ast.Call) -> bool:
    """Whether this `open` is for reading."""
    modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    return all(
        isinstance(m, ast.Constant) and isinstance(m.value, str) and not _WRITING & set(m.value)
        for m in modes
    )


class _Unknown:
    pass


_UNKNOWN = _Unknown()


def is_plain(value: Any, depth: int = 3) -> bool:
    """Numbers, text, tensors and arrays, and lists, tuples and dicts of them.

    False also of lists that are too long to look through.
    """
    kind = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, PurePath | np.generic):
        return kind.__module__.startswith(("pathlib", "numpy")) and kind is not np.object_
    if kind in (np.ndarray, np.memmap):
        return not value.dtype.hasobject
    if kind is torch.Tensor:
        return True
    if not depth or kind not in (list, tuple, dict):
        return False
    if len(value) > _MOST_ITEMS:
        return False
    if kind is dict:
        return _all_plain(list(value), depth) and _all_plain(list(value.values()), depth)
    return _all_plain(value, depth)


def _all_plain(values: list[Any] | tuple[Any, ...], depth: int) -> bool:
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    pairs = kinds <= {list, tuple} and depth > 1 and sum(map(len, values)) <= _MOST_ITEMS
    if pairs and set(map(type, chain.from_iterable(values))) <= _PLAIN:
        return True
    return len(values) <= _MOST_NESTED and all(is_plain(each, depth - 1) for each in values)
