"""What lies around objects and their samples follow from: attributes of their classes, variables.

Of classes and functions of Python's own, of torch and of numpy nothing is looked at.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
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


def own_classes(item: Any) -> list[type]:
    """Of an object's classes those that somebody has written for it."""
    return [kind for kind in type(item).__mro__ if not _is_known(kind)]


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
    todo = [function for item in objects for function in _functions_of(item)]
    seen: set[Any] = set()
    sizes: list[int] = []
    while todo and len(seen) < _MOST_FUNCTIONS:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        if isinstance(function, _CACHING):
            sizes.append(function.cache_info().currsize)
            todo.extend(_functions_of(getattr(function, "__wrapped__", None)))
            continue
        variables = function.__globals__
        for name in _names(function.__code__):
            value = variables.get(name)
            if isinstance(value, _KEEPING):
                sizes.append(len(value))
            elif not _is_known(value):
                todo.extend(_functions_of(value, of_class=False))
    return sizes


def _functions_of(item: Any, *, of_class: bool = True) -> Iterator[Any]:
    if isinstance(item, types.MethodType):
        item = item.__func__
    if isinstance(item, types.FunctionType | _CACHING):
        yield item
        return
    for kind in own_classes(item) if of_class else ():
        for value in vars(kind).values():
            inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(inner, types.FunctionType | _CACHING):
                yield inner


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
