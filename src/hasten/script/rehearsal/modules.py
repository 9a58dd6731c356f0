"""Modules while the script runs: where each was built and moved, and which calls are outermost."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from hasten.script.rehearsal.places import Place, Stack, Territory

_Value = TypeVar("_Value")


class ById(Generic[_Value]):
    """A table of live objects by identity, for those that hash and compare in ways of their own."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], _Value]] = {}

    def __setitem__(self, key: Any, value: _Value) -> None:
        number, entries = id(key), self._entries
        entries[number] = weakref.ref(key, lambda _: entries.pop(number, None)), value

    def get(self, key: Any, default: _Value) -> _Value:
        """The value of an object."""
        entry = self._entries.get(id(key))
        return default if entry is None else entry[1]

    def __contains__(self, key: Any) -> bool:
        return id(key) in self._entries

    def keys(self) -> list[Any]:
        """The objects that are alive."""
        return [
            key for key in (ref() for ref, _ in list(self._entries.values())) if key is not None
        ]


class Move:
    """One `.to`, `.cuda` or `.cpu` of a module."""

    __slots__ = ("direct", "module", "moved", "stack", "target")

    def __init__(
        self, module: nn.Module, stack: Stack, moved: bool, target: str, direct: bool
    ) -> None:
        self.module, self.stack = weakref.ref(module), stack
        self.direct = direct  # asked for by the user's own code, not by a library
        self.moved, self.target = moved, target


class Modules:
    """Every module that is alive, its building place, and all moves."""

    def __init__(self, territory: Territory) -> None:
        self._territory = territory
        self._built: ById[Stack] = ById()
        self.moves: list[Move] = []
        self.depth = 0  # calls of modules that are running
        self.moving = 0

    def install(self, on_call: Any) -> None:
        """Watch `nn.Module` for the life of this process.

        Args:
            on_call: called with (module, output, stack) after each outermost call.
        """
        plain_init, plain_state, plain_call = (
            nn.Module.__init__,
            nn.Module.__setstate__,
            nn.Module.__call__,
        )
        built, stack = self._built, self._territory.stack

        def init(this: nn.Module, *args: Any, **kwargs: Any) -> None:
            plain_init(this, *args, **kwargs)
            if this not in built:
                built[this] = stack(sys._getframe(1))

        def set_state(this: nn.Module, state: Any) -> None:
            plain_state(this, state)  # type: ignore[no-untyped-call]
            if this not in built:
                built[this] = stack(sys._getframe(1))

        def call(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                out = plain_call(this, *args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                on_call(this, out, stack(sys._getframe(1)))
            return out

        nn.Module.__init__ = init  # type: ignore[method-assign, assignment]
        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        for name in ("to", "cuda", "cpu"):
            setattr(nn.Module, name, self._watched_move(getattr(nn.Module, name)))

    def _watched_move(self, plain: Any) -> Any:
        def move(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = device_of(this)
            self.moving += 1
            try:
                out = plain(this, *args, **kwargs)
            finally:
                self.moving -= 1
            stack = self._territory.stack(sys._getframe(1))
            after = device_of(this)
            if stack:
                direct = self._territory.holds(sys._getframe(1).f_code.co_filename)
                self.moves.append(Move(this, stack, before != after, after or "", direct))
            return out

        return move

    def alive(self) -> list[nn.Module]:
        """All modules that are alive."""
        return self._built.keys()

    def built(self, module: nn.Module) -> Stack:
        """Where a module was built; empty where that is not known."""
        return self._built.get(module, ())

    def shared(self, stack: Stack) -> tuple[Place | None, Place | None]:
        """The innermost place of a stack in a call that also moves a module; and that move."""
        moves = {(p.frame, p.function): p for m in self.moves if m.moved for p in m.stack}
        for place in stack:
            moved = moves.get((place.frame, place.function))
            if moved is not None:
                return place, moved
        return None, None

    def was_moved(self, module: nn.Module) -> bool:
        """Whether the user asked for a module to be moved."""
        return any(move.module() is module for move in self.moves)

    def owner(self, tensor: torch.Tensor, same: Any) -> tuple[nn.Module, str, str] | None:
        """The module that holds a tensor: module, kind (parameter, buffer, plain), name.

        Args:
            tensor: looked for.
            same: whether a held tensor is it (or shares its memory).
        """
        for module in self.alive():
            for kind, table in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
                ("plain", module.__dict__),
            ):
                for name, held in list(table.items()):
                    if isinstance(held, torch.Tensor) and (held is tensor or same(held)):
                        return module, kind, name
        return None

    def container(self, module: nn.Module) -> tuple[nn.Module, str] | None:
        """The module that keeps this one in a plain list or dict, and the attribute's name."""
        for parent in self.alive():
            for name, value in list(parent.__dict__.items()):
                if name.startswith("_") and name in _MODULE_TABLES:
                    continue
                if _keeps(value, module):
                    return parent, name
        return None

    def outside_init(self, stack: Stack) -> Place | None:
        """The innermost place that is in no module's `__init__`: where the whole was built."""
        classes = {cls.__qualname__ for m in self.alive() for cls in type(m).__mro__}
        for place in stack:
            if not is_init(place, classes):
                return place
        return stack[0] if stack else None

    def parent(self, module: nn.Module) -> nn.Module | None:
        """The registered parent of a module."""
        for candidate in self.alive():
            if any(child is module for child in candidate._modules.values()):
                return candidate
        return None

    def top(self, module: nn.Module) -> nn.Module:
        """The outermost registered parent."""
        for _ in range(100):
            parent = self.parent(module)
            if parent is None:
                return module
            module = parent
        return module


_MODULE_TABLES = frozenset(vars(nn.Module()))


def _keeps(value: Any, module: nn.Module, depth: int = 2) -> bool:
    if isinstance(value, nn.Module):
        return False
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or not depth:
        return False
    for item in value:
        if item is module or (
            isinstance(item, nn.Module) and any(m is module for m in item.modules())
        ):
            return True
        if _keeps(item, module, depth - 1):
            return True
    return False


def device_of(module: nn.Module) -> str | None:
    """The device of a module's first parameter or buffer, by name."""
    for tensor in (*module.parameters(), *module.buffers()):
        return str(tensor.device)
    return None


def is_init(place: Place, classes: set[str]) -> bool:
    """Whether a place lies in the `__init__` of one of the classes, or in a comprehension of it."""
    owner, _, name = place.function.split(".<locals>.<")[0].rpartition(".")
    return name == "__init__" and owner in classes
