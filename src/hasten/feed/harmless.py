"""What a data set's code would leave behind, as far as that can be shown from its source.

Harmless is only what is known to be: plain values are read, functions that are named in `pure` are
called, and other functions whose source is read in the same way. Everything else is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from hasten.feed import pure
from hasten.feed.fetching import many_of
from hasten.feed.plain import is_constant, is_plain, is_record
from hasten.feed.reading import UNKNOWN, Scope, behind, method, shown
from hasten.feed.visitor import PASSING, Visitor

_LONG = 40  # letters of code in a message
DRAW = "samples draw"
"""What `doubt` says first where that is seen."""
_UNSEEN = "samples are not seen to draw nothing and change nothing"


def harmless(dataset: Any) -> bool:
    """Whether threads may ask a data set for samples at once, by what its code is seen to do.

    It reads plain values, tensors and arrays, waits, opens files of its own, computes, and writes
    to nothing that another thread sees; it draws no random numbers. What gives many samples at once
    (`__getitems__`) is not read.
    """
    return _one_by_one(dataset) and many_of(dataset) is None


def _one_by_one(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return is_plain(dataset.indices) and _one_by_one(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_one_by_one, dataset.datasets))
    return shown(lambda: _Harmless().function(method(dataset, "__getitem__"), dataset))


def length_is_harmless(dataset: Any) -> bool:
    """Whether its `__len__` may be asked at any time, by what it is seen to do (see above)."""
    return shown(lambda: _Harmless().function(method(dataset, "__len__"), dataset))


def calls_harmless(function: Any) -> bool:
    """Whether threads may call a function at once, by what its code is seen to do (see above)."""
    return shown(lambda: _Harmless().calls(function, pure.Given(1)))


def doubt(dataset: Any, collate_fn: Any) -> str:
    """Why samples and batches are not taken for harmless, with the place in the code, where it is
    known; "" where they are."""
    for whole in _wholes(dataset):
        kind = type(whole).__name__
        if many_of(whole) is not None:
            return f"{_UNSEEN} (__getitems__ of {kind} is not read)"
        judge = _Harmless()
        if not shown(partial(judge.function, method(whole, "__getitem__"), whole)):
            return _refused(judge) or f"{_UNSEEN} (the source of {kind} cannot be read)"
    judge = _Harmless()
    if not shown(partial(judge.calls, collate_fn, pure.Given(1))):
        return _refused(judge) or f"{_UNSEEN} (the source of its collate_fn cannot be read)"
    return ""


def _wholes(dataset: Any) -> Iterator[Any]:
    """The data sets that others only index."""
    inner = [dataset.dataset] if type(dataset) is Subset else []
    inner = dataset.datasets if type(dataset) is ConcatDataset else inner
    for each in inner:
        yield from _wholes(each)
    if not inner:
        yield dataset


def _refused(judge: _Harmless) -> str:
    """The code that is not harmless; "" where none was read."""
    if judge.refused is None:
        return ""
    node, scope = judge.refused
    called = node.func if isinstance(node, ast.Call) else node
    text = ast.unparse(called).split("\n")[0]
    text = text if len(text) <= _LONG else f"{text[:_LONG]}…"
    file = Path(scope.function.__code__.co_filename).name
    where = f"{text} at {file}:{getattr(node, 'lineno', scope.tree.lineno)}"
    if isinstance(node, ast.Call) and pure.draws(scope.known(called)):
        return f"{DRAW} ({where})"
    return f"{_UNSEEN} ({where})"


class _Harmless(Visitor):
    passing = (*PASSING, ast.With, ast.withitem)

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[int, tuple[Any, bool]] = {}

    def allows(self, node: ast.AST, scope: Scope) -> bool:
        """See `Visitor`; what is there may be seen by another thread, and is not written to."""
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            return False
        return super().allows(node, scope)

    def default(self, value: Any) -> bool:
        """See `Visitor`."""
        return self._is_plain(value)

    def name(self, value: Any) -> bool:
        """See `Visitor`."""
        return is_constant(value) or self._is_plain(value)

    def _is_plain(self, value: Any) -> bool:
        """See `is_plain`; each value is looked at once."""
        if id(value) not in self._plain:
            self._plain[id(value)] = value, is_plain(value)
        return self._plain[id(value)][1]

    def attribute(self, node: ast.Attribute, scope: Scope) -> bool:
        """See `Visitor`."""
        found = scope.known(node)
        if found is UNKNOWN and node.attr in pure.VALUES:
            return self.sees(node.value, scope)
        return self.name(found)

    def call(self, node: ast.Call, scope: Scope) -> bool:
        """See `Visitor`."""
        target = scope.known(node.func)
        if target is len and len(node.args) == 1 and scope.is_own(node.args[0]):
            return self.function(method(scope.owner, "__len__"), scope.owner)
        if not self.given(node, scope) or (target is open and not _reads(node)):
            return False
        given = pure.Given.to(node)
        if target is not UNKNOWN:
            return self.calls(target, given)
        if not isinstance(node.func, ast.Attribute) or not self.sees(node.func.value, scope):
            return False
        name = node.func.attr
        if name in pure.IMAGE_METHODS and _is_image(node.func.value, scope, _images(scope)):
            return given.fits(pure.IMAGE_METHODS[name])
        if name == "replace":  # of text; that of a path has one argument, and moves a file
            return given.fits(3) and given.places not in (0, 1, None)
        return name in pure.METHODS and given.fits(pure.METHODS[name])

    def calls(self, target: Any, given: pure.Given) -> bool:
        """Whether this object may be called."""
        if target is None:  # as a transform that is not there: it would raise
            return True
        most = pure.places(target)
        if most is not None:
            return given.fits(most)
        if isinstance(target, type):
            return is_record(target)
        bound, function = behind(target)
        return function is not None and self.function(function, *bound)


def _reads(node: ast.Call) -> bool:
    """Whether this `open` is for reading."""
    modes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
    return all(
        isinstance(m, ast.Constant) and isinstance(m.value, str) and not set("wax+") & set(m.value)
        for m in modes
    )


def _images(scope: Scope) -> set[str]:
    """Which names stand for images of PIL's, whatever is done."""
    bound: dict[str, list[ast.expr | None]] = {}
    stored = []
    for node in ast.walk(scope.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            bound.setdefault(node.optional_vars.id, []).append(node.context_expr)
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.append(node.id)
    images: set[str] = set()
    for _ in bound:  # one image is made of another
        for name, values in bound.items():
            always = len(values) == stored.count(name)
            if always and all(_is_image(value, scope, images) for value in values):
                images.add(name)
    return images


def _is_image(node: ast.expr | None, scope: Scope, images: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in images
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in pure.IMAGE_METHODS:
        return _is_image(node.func.value, scope, images)
    return pure.opens_images(scope.known(node.func))
