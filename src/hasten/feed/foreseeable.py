"""Whether a copy of a sampler may be asked what the sampler will give, and nothing is left behind.

A copy shares with its original what is no state of its own: a generator that is a variable of a
module, what a function closes over, attributes of classes, the model that it asks. So PyTorch's
own samplers may be asked, and those whose code is seen to draw from the global generators of torch,
random and numpy (which are put back) and from what they hold themselves, and to write nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import math
import random
import time
import types
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hasten.feed import pure
from hasten.feed.harmless import is_plain, length_is_harmless
from hasten.feed.reading import name_in, tree_of

KNOWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""PyTorch's own, which give indices of samples, and follow from their generators."""

_MOST_CALLS = 8  # depth of methods that call methods
_MOST_ITEMS = 50_000  # that a copy is made of: some 20 ms
_MOST_BYTES = 1 << 26  # the same of tensors and arrays
_LISTS = (list, tuple, range)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_BARE = (Sampler, Dataset, object)
_COPYING_WORDS = (
    "__copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getattr__"
    " __getattribute__ __setattr__ __new__ __del__ __slots__"
)
_COPYING = _COPYING_WORDS.split()
_HOMES = (torch, np, np.random, np.linalg, random, math)
_DRAWING = {
    torch: "randperm randint rand randn multinomial bernoulli normal Generator",
    np.random: "default_rng RandomState Generator PCG64 Philox SeedSequence",
    random: "Random",
}
_BUILTINS = (iter, next)
_OUTSIDE = (open, time.sleep)  # harmless, but not to be done twice
_OUTSIDE_METHODS = ("tofile", "dump", "to", "cuda", "pin_memory", "share_memory_", "flush")


def foreseeable(sampler: Any, dataset: Any) -> bool:
    """Whether a copy may be asked, `dataset` being shared with it."""
    if type(sampler) in _LISTS:
        return True
    if type(sampler) is BatchSampler:
        return foreseeable(sampler.sampler, dataset)
    if type(sampler) in KNOWN:
        held = getattr(sampler, "generator", None)
        listed = type(sampler) is not SubsetRandomSampler or is_plain(sampler.indices, 1)
        return listed and (held is None or type(held) is torch.Generator)
    try:
        return _is_bare(type(sampler)) and _Code(sampler, dataset).runs("__iter__")
    except (AttributeError, NameError, TypeError, ValueError, RecursionError):
        return False


def _is_bare(kind: type) -> bool:
    """Whether nobody's code runs when one is copied, or an attribute of it read."""
    own = [each for each in kind.__mro__ if each.__module__ not in ("typing", "builtins")]
    return type(kind).__module__ in ("builtins", "abc", "typing") and not any(
        name in vars(each) for each in own if each not in _BARE for name in _COPYING
    )


class _Code:
    """What a sampler's methods do."""

    def __init__(self, sampler: Any, dataset: Any) -> None:
        self.sampler = sampler
        self.held: dict[str, Any] = vars(sampler)
        self.inner: set[str] = set()
        self.data: set[str] = set()
        self.set_here: set[str] = set()
        self._seen: set[Any] = set()
        self._left = _MOST_ITEMS
        for name, value in self.held.items():
            if value is dataset:
                self.data.add(name)
            elif isinstance(value, Sampler) and foreseeable(value, dataset):
                self.inner.add(name)
            elif type(value) not in _GENERATORS and not self._is_small(value):
                raise ValueError(name)
        self.counted = bool(self.data) and (
            type(dataset) in (*_LISTS, TensorDataset, np.ndarray, torch.Tensor)
            or length_is_harmless(dataset)
        )

    def _is_small(self, value: Any) -> bool:
        """Plain, and soon copied."""
        if isinstance(value, torch.Tensor | np.ndarray):
            return is_plain(value) and value.nbytes <= _MOST_BYTES
        if type(value) in (list, tuple, set, dict):
            self._left -= len(value)
            parts = [*value, *value.values()] if type(value) is dict else value
            return self._left >= 0 and all(map(self._is_small, parts))
        return is_plain(value, 0)

    def runs(self, name: str) -> bool:
        """Whether a method may be run on a copy."""
        found = inspect.getattr_static(type(self.sampler), name)
        own = not isinstance(found, staticmethod)
        function = found if own else found.__func__
        return isinstance(function, types.FunctionType) and self.function(function, own=own)

    def function(self, function: types.FunctionType, *, own: bool, depth: int = 0) -> bool:
        """The same of a function; with `own` its first parameter is the sampler."""
        if function in self._seen:
            return True
        tree = tree_of(function)
        if tree is None or depth > _MOST_CALLS:
            return False
        self._seen.add(function)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if not all(isinstance(each, int | float | str | None) for each in defaults):
            return False
        return _Look(self, function, own=own, depth=depth).all_of(tree)


class _Look:
    """The code of one function; each part of it, whether it would be run or not."""

    def __init__(self, code: _Code, function: Any, *, own: bool, depth: int) -> None:
        self._code = code
        self._function = function
        self._depth = depth
        self._has_own = own
        self._own: str | None = None
        self._locals: set[str] = set()

    def all_of(self, tree: ast.FunctionDef | ast.Lambda) -> bool:
        arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
        self._own = arguments[0] if self._has_own and arguments else None
        stored = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                self._locals.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                stored.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._code.set_here |= {node.attr} if self._is_own(node.value) else set()
        self._locals |= stored
        code = self._function.__code__
        outside = {*code.co_names, *code.co_freevars}
        inner = self._locals - {self._own, *code.co_varnames, *code.co_cellvars}
        if inner & outside or self._own in stored:
            return False
        self._locals.discard(self._own or "")
        body = tree.body if isinstance(tree, ast.FunctionDef) else [tree.body]
        return all(map(self._sees, body))

    def _is_own(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._own and self._own is not None

    def _sees(self, node: ast.AST) -> bool:
        """Whether all is known to stay within the copy."""
        if isinstance(node, ast.Call):
            return self._calls(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Name):
            return node.id in self._locals or _is_constant(self._known(node))
        if isinstance(node, ast.For | ast.comprehension | ast.YieldFrom):
            source = node.value if isinstance(node, ast.YieldFrom) else node.iter
            if self._among(source, self._code.inner):
                rest = [n for n in ast.iter_child_nodes(node) if n is not source]
                return all(map(self._sees, rest))
        return isinstance(node, _STAYING) and all(map(self._sees, ast.iter_child_nodes(node)))

    def _attribute(self, node: ast.Attribute) -> bool:
        name = node.attr
        if not self._is_own(node.value):
            if _is_constant(self._known(node)):
                return True
            return not name.startswith("_") and self._sees(node.value)
        if not isinstance(node.ctx, ast.Load):
            return name not in self._code.data | self._code.inner
        if name in self._code.held:
            return name not in self._code.data | self._code.inner
        found = inspect.getattr_static(type(self._code.sampler), name, None)
        if isinstance(found, property):
            return isinstance(found.fget, types.FunctionType) and self._code.function(
                found.fget, own=True, depth=self._depth + 1
            )
        return _is_constant(found) or (found is None and name in self._code.set_here)

    def _among(self, node: ast.AST, names: set[str]) -> bool:
        """Whether it is an attribute of the sampler by one of these names."""
        return isinstance(node, ast.Attribute) and self._is_own(node.value) and node.attr in names

    def _calls(self, node: ast.Call) -> bool:
        given = [*node.args, *(each.value for each in node.keywords)]
        if any(each.arg in (None, "device") for each in node.keywords):
            return False
        target = self._known(node.func)
        if len(given) == 1 and target in (len, iter, list, tuple):
            whole = given[0]
            if self._among(whole, self._code.inner):
                return True
            if target is len and self._is_own(whole):
                return self._code.runs("__len__")
            if target is len and self._among(whole, self._code.data):
                return self._code.counted
        if not all(map(self._sees, given)):
            return False
        if target is not None:
            return self._may_be_called(target)
        if not isinstance(node.func, ast.Attribute):
            return False
        name = node.func.attr
        if self._is_own(node.func.value):
            return name not in self._code.held and self._code.runs(name)
        return (
            not name.startswith("_")
            and name not in _OUTSIDE_METHODS
            and self._sees(node.func.value)
        )

    def _may_be_called(self, target: Any) -> bool:
        if target in _OUTSIDE:
            return False
        if pure.places(target) is not None or target in _BUILTINS or _is_drawing(target):
            return True
        return isinstance(target, types.FunctionType) and self._code.function(
            target, own=False, depth=self._depth + 1
        )

    def _known(self, node: ast.AST) -> Any:
        """What a dotted name stands for that begins outside the function; None of others."""
        try:
            if isinstance(node, ast.Name):
                if node.id in self._locals or node.id == self._own:
                    return None
                return name_in(self._function, node.id)
            if isinstance(node, ast.Attribute):
                home = self._known(node.value)
                if isinstance(home, types.ModuleType) and home in _HOMES:
                    return getattr(home, node.attr)
        except (AttributeError, NameError, ValueError):
            return None
        return None


_STAYING = (
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.comprehension,
    ast.keyword, ast.arguments, ast.arg, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Starred, ast.Tuple, ast.List, ast.Set,
    ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Lambda,
    ast.JoinedStr, ast.FormattedValue, ast.Yield, ast.YieldFrom, ast.Return, ast.Expr, ast.Assign,
    ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Pass, ast.Break, ast.Continue,
    ast.Raise, ast.Assert, ast.Delete,
)  # fmt: skip


def _is_constant(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__ in ("builtins", "numpy")
    return isinstance(value, int | float | str | torch.dtype | np.dtype)


def _is_drawing(target: Any) -> bool:
    """A function of a global generator, which is put back, or a maker of another generator."""
    owner = getattr(target, "__self__", None)
    if owner is getattr(random.random, "__self__", 0) or owner is np.random.mtrand._rand:
        return True
    return any(
        target is getattr(home, name, None)
        for home, names in _DRAWING.items()
        for name in names.split()
    )
