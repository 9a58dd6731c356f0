"""What the user calls a tensor: the expression in their code whose value it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from hasten.script.rehearsal.origins import address
from hasten.script.rehearsal.places import statement

_MISSING = object()


class Named:
    """A tensor found in the user's variables.

    Attributes:
        text: the expression, as ``batch["mask"]`` or ``self.pos.weight``.
        owner: the object whose attribute or item it is; None for a plain variable.
    """

    __slots__ = ("owner", "text")

    def __init__(self, text: str, owner: Any = None) -> None:
        self.text, self.owner = text, owner


def name_of(tensor: torch.Tensor, frames: list[FrameType]) -> Named | None:
    """The name of a tensor in the innermost of the frames that knows it."""
    for frame in frames[:4]:
        found = _in_statement(tensor, frame) or _in_variables(tensor, frame)
        if found is not None:
            return found
    return None


def _in_statement(tensor: torch.Tensor, frame: FrameType) -> Named | None:
    node = statement(frame.f_code.co_filename, frame.f_lineno)
    if node is None:
        return None
    memory = address(tensor)
    views: Named | None = None
    for part in ast.walk(node):
        if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            continue
        value, owner = value_of(part, frame)
        text = ast.unparse(part)
        if isinstance(value, torch.Tensor):
            if value is tensor:
                return Named(text, owner)
            if memory and address(value) == memory:
                views = views or Named(text, owner)
        elif value is not _MISSING:
            inner = _inside(tensor, memory, value)
            if inner is not None:
                views = views or Named(text + inner.text, inner.owner)
    return views


def _in_variables(tensor: torch.Tensor, frame: FrameType) -> Named | None:
    memory = address(tensor)
    for name, value in list(frame.f_locals.items()):
        if value is tensor or (
            isinstance(value, torch.Tensor) and memory and address(value) == memory
        ):
            return Named(name)
    for name, value in list(frame.f_locals.items()):
        if not isinstance(value, torch.Tensor):
            inner = _inside(tensor, memory, value)
            if inner is not None:
                return Named(name + inner.text, inner.owner)
    return None


def _inside(tensor: torch.Tensor, memory: int, value: Any) -> Named | None:
    for path, held, owner in parts(value):
        if held is tensor or (memory and address(held) == memory):
            return Named(path, owner)
    return None


def parts(value: Any, depth: int = 2) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """The tensors in a container, an object or a module: path from it, tensor, direct owner."""
    if isinstance(value, torch.nn.Module):
        for prefix, module in value.named_modules():
            start = f".{prefix}" if prefix else ""
            for kind in (module._parameters, module._buffers, module.__dict__):
                for name, held in list(kind.items()):
                    if isinstance(held, torch.Tensor):
                        yield f"{start}.{name}", held, module
        return
    if isinstance(value, Mapping):
        items: Any = [(f"[{key!r}]", held) for key, held in list(value.items())[:64]]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f".{name}", held) for name, held in zip(value._fields, value, strict=True)]
    elif type(value) in (list, tuple):
        items = [(f"[{index}]", held) for index, held in enumerate(value[:64])]
    elif _plain_object(value):
        items = [(f".{key}", held) for key, held in list(vars(value).items())]
    else:
        return
    for path, held in items:
        if isinstance(held, torch.Tensor):
            yield path, held, value
        elif depth and not isinstance(held, (str, bytes, int, float)):
            for rest, inner, owner in parts(held, depth - 1):
                yield path + rest, inner, owner


def _plain_object(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "builtins", "types", "hasten")


def value_of(node: ast.expr, frame: FrameType) -> tuple[Any, Any]:
    """The value of a name, attribute or item without running code of the user's; and its owner."""
    if isinstance(node, ast.Constant):
        return node.value, None
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, frame.f_globals.get(node.id, _MISSING))
        return value, None
    if isinstance(node, ast.Attribute):
        owner, _ = value_of(node.value, frame)
        return _attribute(owner, node.attr), owner
    if isinstance(node, ast.Subscript):
        owner, _ = value_of(node.value, frame)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else _MISSING
        if isinstance(node.slice, ast.Name):
            key, _ = value_of(node.slice, frame)
        if type(owner) in (dict, list, tuple) and isinstance(key, (str, int)):
            try:
                return owner[key], owner
            except (KeyError, IndexError, TypeError):
                return _MISSING, None
    return _MISSING, None


def _attribute(owner: Any, name: str) -> Any:
    if owner is _MISSING or owner is None or isinstance(owner, torch.Tensor):
        return _MISSING
    if isinstance(owner, torch.nn.Module):
        for table in (owner._parameters, owner._buffers, owner._modules, owner.__dict__):
            if name in table:
                return table[name]
        return _MISSING
    if isinstance(owner, tuple) and name in getattr(owner, "_fields", ()):
        return getattr(owner, name)
    try:
        return vars(owner).get(name, _MISSING)
    except TypeError:
        return _MISSING
