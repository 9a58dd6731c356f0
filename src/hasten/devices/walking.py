"""Going through a nest: what is in it is replaced, and what it is made of keeps its types."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import types
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from hasten.errors import UsageError

_ALONE = (
    *(str, bytes, bytearray, memoryview, int, float, complex, type(None)),
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


class Walk:
    """One call: looks into tuples, lists, mappings, dataclasses, attrs classes, namespaces, deques.

    A container none of whose parts was replaced is given back as the same object; else it is
    rebuilt, and the given one is not changed. What occurs twice is replaced once.
    """

    name = "hasten"
    """Of the call, for messages."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.open: set[int] = set()
        self.kept: list[Any] = []  # so that no id in ``done`` is given to another object

    def visit(self, obj: Any, path: str) -> Any:
        """What the object is replaced by.

        Raises:
            UsageError: a container holds itself.
        """
        is_tensor = isinstance(obj, torch.Tensor)
        if not is_tensor and isinstance(obj, _ALONE):
            return obj
        key = id(obj)
        if key in self.done:
            return self.done[key]
        if key in self.open:
            raise UsageError(
                f"{self.name} cannot rebuild {path or 'the object'}: this "
                f"{type(obj).__name__} holds itself. Break the cycle, or move its parts one by one."
            )
        self.open.add(key)
        found = self.tensor(obj) if is_tensor else self.container(obj, path)
        self.open.discard(key)
        self.done[key] = found
        self.kept.append(obj)
        return found

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor is replaced by."""
        raise NotImplementedError

    def container(self, obj: Any, path: str) -> Any:
        """What anything else is replaced by."""
        if isinstance(obj, Mapping):
            return self.mapping(obj, path)
        if isinstance(obj, (tuple, list, collections.deque, collections.UserList)):
            return self.sequence(obj, path)
        if names := _fields(obj):
            return self.attributes(obj, names, path)
        self.unknown(obj, path)
        return obj

    def unknown(self, obj: Any, path: str) -> None:
        """Called with what the walk does not know the parts of."""

    def stays(self, obj: Any, path: str, why: str, advice: str = "") -> None:
        """Called with a container that could not be rebuilt."""

    def sequence(self, obj: Any, path: str) -> Any:
        """A tuple, list, deque or UserList, rebuilt where an item was replaced."""
        items = [self.visit(item, f"{path}[{place}]") for place, item in enumerate(obj)]
        if all(new is old for new, old in zip(items, obj, strict=True)):
            return obj
        kind = type(obj)
        if kind is tuple or kind is list:
            return kind(items)
        if isinstance(obj, tuple):
            return kind._make(items) if hasattr(kind, "_make") else kind(items)
        rebuilt = copy.copy(obj)
        for place, item in enumerate(items):
            rebuilt[place] = item
        return rebuilt

    def mapping(self, obj: Mapping[Any, Any], path: str) -> Any:
        """A mapping, rebuilt where a value was replaced; keys are left alone."""
        items = {key: self.visit(value, f"{path}[{key!r}]") for key, value in obj.items()}
        changed = {key: value for key, value in items.items() if value is not obj[key]}
        if not changed:
            return obj
        if type(obj) is dict:
            return items
        if isinstance(obj, (dict, collections.UserDict)):
            rebuilt: MutableMapping[Any, Any] = copy.copy(obj)  # keeps a default_factory
            rebuilt.update(changed)
            return rebuilt
        try:
            return type(obj)(items)  # type: ignore[call-arg]
        except TypeError as error:
            self.stays(obj, path, f"its constructor takes no mapping ({error})")
            return obj

    def attributes(self, obj: Any, names: list[str], path: str) -> Any:
        """An object of named fields, rebuilt where one was replaced."""
        changed: dict[str, Any] = {}
        for name in names:
            old = getattr(obj, name)
            new = self.visit(old, f"{path}.{name}" if path else name)
            if new is not old:
                changed[name] = new
        if not changed:
            return obj
        rebuilt = _shallow_copy(obj, names)
        for name, value in changed.items():
            object.__setattr__(rebuilt, name, value)  # a frozen dataclass refuses plain setattr
        return rebuilt


def _fields(obj: Any) -> list[str]:
    """Names of the attributes to move, for an object that is made of named fields."""
    kind = type(obj)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(obj)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [field.name for field in kind.__attrs_attrs__]
    elif isinstance(obj, _NAMESPACES):
        names = []
    else:
        return []
    names += [name for name in getattr(obj, "__dict__", {}) if name not in names]
    return [name for name in names if hasattr(obj, name)]


def _shallow_copy(obj: Any, names: list[str]) -> Any:
    try:
        return copy.copy(obj)
    except AttributeError:  # a frozen dataclass with slots, of which one is not set yet
        rebuilt = object.__new__(type(obj))
        for name in names:
            object.__setattr__(rebuilt, name, getattr(obj, name))
        return rebuilt
