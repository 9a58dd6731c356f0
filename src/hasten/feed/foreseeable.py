"""Whether a copy of a sampler may be asked what the sampler will give, and nothing is left behind.

A copy shares with its original what is no state of its own: a generator that is a variable of a
module, what a function closes over, attributes of classes, the model that it asks. So PyTorch's
own samplers may be asked, and those whose code is seen to draw from the global generators of torch,
random and numpy (which are put back) and from what they hold themselves, and to write nowhere else.
"""

from __future__ import annotations

import ast
import random
import types
from pathlib import Path
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
from hasten.feed.harmless import length_is_harmless
from hasten.feed.plain import is_plain
from hasten.feed.reading import UNKNOWN, Scope, method, shown
from hasten.feed.visitor import PASSING, Visitor

KNOWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
"""PyTorch's own, which give indices of samples, and follow from their generators."""

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
_OUTSIDE_METHODS = ("tofile", "dump", "save", "to", "cuda", "pin_memory", "share_memory_", "flush")


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
    return shown(
        lambda: _copies_plainly(type(sampler)) and _Asked(sampler, dataset).runs("__iter__")
    )


def _copies_plainly(kind: type) -> bool:
    """Whether nobody's code runs when one is copied, or an attribute of it read."""
    own = [each for each in kind.__mro__ if each.__module__ not in ("typing", "builtins")]
    return type(kind).__module__ in ("builtins", "abc", "typing") and not any(
        name in vars(each) for each in own if each not in _BARE for name in _COPYING
    )


class _Asked(Visitor):
    """Goes through a sampler's methods: they may write to what is the copy's own."""

    passing = (*PASSING, ast.AugAssign, ast.Delete, ast.Yield)

    def __init__(self, sampler: Any, dataset: Any) -> None:
        super().__init__()
        self._sampler = sampler
        self._held: dict[str, Any] = vars(sampler)
        self._inner: set[str] = set()  # attributes that are samplers, and the data set
        self._data: set[str] = set()
        self._set_here: set[str] = set()
        self._left = _MOST_ITEMS
        for name, value in self._held.items():
            if value is dataset:
                self._data.add(name)
            elif isinstance(value, Sampler) and foreseeable(value, dataset):
                self._inner.add(name)
            elif type(value) not in _GENERATORS and not self._is_small(value):
                raise ValueError(name)
        self._counted = bool(self._data) and (
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
        return is_plain(value, 0) and not _is_outside(value)

    def name(self, value: Any) -> bool:
        """See `Visitor`."""
        return super().name(value) and not _is_outside(value)

    def runs(self, name: str) -> bool:
        """Whether a method may be run on a copy."""
        found = method(self._sampler, name)
        if isinstance(found, staticmethod):
            return self.function(found.__func__)
        return self.function(found, UNKNOWN)

    def function(self, function: Any, owner: Any = None) -> bool:
        """See `Visitor`; of a method of the sampler, the owner is not known: it is a copy."""
        scope = Scope.of(function, owner)
        if scope is not None:
            stored = (n for n in ast.walk(scope.tree) if isinstance(n, ast.Attribute))
            self._set_here |= {
                n.attr for n in stored if isinstance(n.ctx, ast.Store) and scope.is_own(n.value)
            }
        return super().function(function, owner)

    def sees(self, node: ast.AST, scope: Scope) -> bool:
        """See `Visitor`."""
        if isinstance(node, ast.YieldFrom):
            return self.iterates(node.value, scope)
        if isinstance(node, ast.Lambda):
            inner = scope.within(*(n for n in ast.walk(node.args) if isinstance(n, ast.arg)))
            defaults = [n for n in (*node.args.defaults, *node.args.kw_defaults) if n is not None]
            return self.sees(node.body, inner) and all(self.sees(n, scope) for n in defaults)
        return super().sees(node, scope)

    def iterates(self, source: ast.expr, scope: Scope) -> bool:
        """See `Visitor`."""
        return self._among(source, scope, self._inner) or self.sees(source, scope)

    def attribute(self, node: ast.Attribute, scope: Scope) -> bool:
        """See `Visitor`."""
        name = node.attr
        if not scope.is_own(node.value):
            if isinstance(node.ctx, ast.Load) and self.name(scope.known(node)):
                return True
            return not name.startswith("_") and self.sees(node.value, scope)
        if not isinstance(node.ctx, ast.Load) or name in self._held:
            return name not in self._data | self._inner
        found = method(self._sampler, name)
        if isinstance(found, property):
            return self.function(found.fget, UNKNOWN)
        return self.name(found) if found is not None else name in self._set_here

    def _among(self, node: ast.AST, scope: Scope, names: set[str]) -> bool:
        """Whether it is an attribute of the sampler by one of these names."""
        return isinstance(node, ast.Attribute) and scope.is_own(node.value) and node.attr in names

    def call(self, node: ast.Call, scope: Scope) -> bool:
        """See `Visitor`."""
        given = [*node.args, *(each.value for each in node.keywords)]
        if any(each.arg in (None, "device") for each in node.keywords):
            return False
        target = scope.known(node.func)
        if len(given) == 1 and any(target is each for each in (len, iter, list, tuple)):
            whole = given[0]
            if self._among(whole, scope, self._inner):
                return True
            if target is len and scope.is_own(whole):
                return self.runs("__len__")
            if target is len and self._among(whole, scope, self._data):
                return self._counted
        if not self.given(node, scope):
            return False
        if target is not UNKNOWN:
            return self._calls(target)
        if not isinstance(node.func, ast.Attribute):
            return False
        name, owner = node.func.attr, node.func.value
        if scope.is_own(owner):
            return name not in self._held and self.runs(name)
        seen = not name.startswith("_") and name not in _OUTSIDE_METHODS
        return seen and self.sees(owner, scope)

    def _calls(self, target: Any) -> bool:
        if _is_outside(target):
            return False
        known = pure.places(target) is not None or pure.draws(target)
        if known or target is iter or target is next:
            return True
        return isinstance(target, types.FunctionType) and self.function(target)


def _is_outside(value: Any) -> bool:
    """What reaches files or the clock: may be harmless, but is not to be done twice or sooner."""
    path = isinstance(value, Path) or (isinstance(value, type) and issubclass(value, Path))
    return path or value is open or getattr(value, "__module__", None) == "time"
