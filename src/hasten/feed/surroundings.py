"""What lies around objects and their samples follow from: attributes of their classes, variables.

Of classes and functions of Python's own, of torch and of numpy nothing is looked at; of variables,
those that a person's code names, not a library's.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MOST_FUNCTIONS = 200
_KNOWN = frozenset({"torch", "numpy", *sys.stdlib_module_names})
_KEEPING = (dict, list, set, deque)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
)
_CACHING = type(functools.lru_cache(lambda: None))
_CALLED = (types.FunctionType, types.MethodType, _CACHING)
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


def own_classes(item: Any) -> list[type]:
    """Of an object's classes those that somebody has written for it."""
    return own(type(item).__mro__)


def own(kinds: Iterable[type]) -> list[type]:
    """Of some classes those that are not Python's, torch's or numpy's."""
    return [kind for kind in kinds if not _is_known(kind)]


def _is_known(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).partition(".")[0] in _KNOWN


def of_class(kind: type) -> tuple[list[Any], list[Any]]:
    """What a class holds for all of its objects: to be looked into, and to be compared as it is."""
    inner: list[Any] = []
    plain: list[Any] = []
    for name, value in list(vars(kind).items()):
        if isinstance(value, _CACHING):
            plain.append(value.cache_info())
        elif isinstance(value, types.FunctionType) and value.__closure__:
            inner.append(value)
        elif isinstance(value, _CODE):
            plain.append(value)
        elif not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl":
            inner.append(value)
    return inner, plain


def kept(objects: Any) -> list[int]:
    """How much is kept in variables of modules that the objects' code names, and by what caches
    functions: it grows where samples are kept for when they are asked for again."""
    todo = [function for item in objects for function in functions_of(item)]
    seen: set[Any] = set()
    sizes: list[int] = []
    while todo and len(seen) < _MOST_FUNCTIONS:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        if isinstance(function, _CACHING):
            sizes.append(function.cache_info().currsize)
        for value in variables_of(function):
            if isinstance(value, _KEEPING):
                sizes.append(len(value))
            elif isinstance(value, _CALLED) and not _is_known(value):
                todo.extend(functions_of(value))
    return sizes


def functions_of(item: Any) -> Iterator[Any]:
    """A function of Python, or one that caches, as it is; of another object, its methods."""
    if isinstance(item, types.MethodType):
        item = item.__func__
    if isinstance(item, types.FunctionType | _CACHING):
        yield item
        return
    for kind in own_classes(item):
        yield from functions_in(kind)


def functions_in(kind: type) -> Iterator[Any]:
    """A class's own methods, what properties call among them."""
    for value in vars(kind).values():
        inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        inner = inner.fget if isinstance(inner, property) else inner
        inner = inner.func if isinstance(inner, functools.cached_property) else inner
        if isinstance(inner, types.FunctionType | _CACHING):
            yield inner


def variables_of(function: Any) -> Iterator[Any]:
    """The variables of its module that its code names."""
    function = _uncached(function)
    if isinstance(function, types.FunctionType):
        known = function.__globals__
        yield from (known[name] for name in _names(function.__code__)[0] if name in known)


def changeable(function: Any) -> Iterator[Any]:
    """Variables that a person's code names, of its module or of others that a person wrote: what a
    loop may give another value. Nothing of code of libraries, which fill tables of theirs."""
    function = _uncached(function)
    if not isinstance(function, types.FunctionType) or of_library(function.__module__):
        return
    named = _names(function.__code__)[1]
    modules = list(_imported(function))
    for value in variables_of(function):
        if isinstance(value, types.ModuleType):
            modules.append(value)
        elif isinstance(value, (*_CALLED, type)):
            if not of_library(value.__module__):
                yield value
        elif not type(value).__module__.startswith("hasten."):  # a Loader counts its batches
            yield value
    seen: set[int] = set()
    while modules:
        module = modules.pop()
        if id(module) in seen or of_library(module.__name__):
            continue
        seen.add(id(module))
        found = [vars(module)[name] for name in named if name in vars(module)]
        modules += [value for value in found if isinstance(value, types.ModuleType)]
        yield from found


def _imported(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """The modules that its code imports, as far as they are there already."""
    package = str(function.__globals__.get("__package__") or "")
    within = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)]
    for name in _imports(function.__code__):
        for full in (name, *(f"{outer}.{name}".strip(".") for outer in within if outer)):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType):
                yield module


def _uncached(function: Any) -> Any:
    """What a caching function calls."""
    return inspect.unwrap(function, stop=lambda item: not isinstance(item, _CACHING))


@functools.cache
def of_library(module: str | None) -> bool:
    """Whether a module is Python's own, hasten's or one that was installed."""
    top = str(module).partition(".")[0]
    if top in _KNOWN or top == "hasten":
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@functools.lru_cache(maxsize=2048)
def _imports(code: types.CodeType) -> frozenset[str]:
    """Of the modules that it imports where it runs."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _imports(constant)
    return frozenset(found)


@functools.lru_cache(maxsize=2048)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Of variables of its module, and of anything, attributes among them."""
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in _LOADS}
    named = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            loaded |= inner[0]
            named |= inner[1]
    return frozenset(loaded), frozenset(named)
