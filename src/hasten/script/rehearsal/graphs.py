"""Graphs that are kept: variables of the user that hold what a step computed, step after step."""

from __future__ import annotations

import ast
import collections
import weakref
from types import FrameType
from typing import Any

import torch

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.places import Stack, Territory, tree

_WALK = 4000  # nodes of a graph that are looked at
_ITEMS = 512  # items of a container that are looked at
_GROWN = 1  # steps in a row in which a variable's graph must grow


class Graphs:
    """Looks at the user's variables at each optimizer step."""

    def __init__(self, territory: Territory, collected: Collected) -> None:
        self._territory, self._collected = territory, collected
        # (optimizer, holder) -> tensors with a graph that it held at the step before
        self._held: dict[tuple[int, str], list[weakref.ref[torch.Tensor]]] = {}
        # (optimizer, variable) -> the end of its graph at the step before, turns it grew
        self._roots: dict[tuple[int, str], tuple[Any, int]] = {}

    def step(self, optimizer: Any, stack: Stack) -> None:
        """Told before each step."""
        seen: set[int] = set()
        for frame in self._territory.frames():
            scopes = [frame.f_locals]
            if frame.f_code.co_name != "<module>" and frame.f_globals.get("__name__") == "__main__":
                scopes.append(frame.f_globals)
            for scope in scopes:
                if id(scope) not in seen:
                    seen.add(id(scope))
                    self._look(id(optimizer), scope, frame)

    def _look(self, optimizer: int, scope: dict[str, Any], frame: FrameType) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        for name, value in list(scope.items()):
            if name.startswith("__"):
                continue
            for path, inner in _holders(name, value):
                key = (optimizer, f"{file}:{function}:{path}")
                if isinstance(inner, torch.Tensor):
                    self._look_at_tensor(key, path, inner, frame)
                else:
                    self._look_at_items(key, path, inner, frame)

    def _look_at_items(
        self, key: tuple[int, str], path: str, value: list[Any], frame: FrameType
    ) -> None:
        now = [t for t in value if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        before = {id(ref()) for ref in self._held.get(key, ()) if ref() is not None}
        if any(id(tensor) in before for tensor in now) and len(now) > len(before):
            self._tell(path, frame, f"`{path}` keeps results of earlier steps with their graphs")
        self._held[key] = [weakref.ref(tensor) for tensor in now]

    def _look_at_tensor(
        self, key: tuple[int, str], path: str, value: torch.Tensor, frame: FrameType
    ) -> None:
        if value.grad_fn is None:
            self._roots.pop(key, None)
            return
        before, grown = self._roots.get(key, (None, 0))
        if before is not None and before is not value.grad_fn:
            grown = grown + 1 if _reaches(value.grad_fn, before) else 0
        self._roots[key] = value.grad_fn, grown
        if grown >= _GROWN:
            self._tell(path, frame, f"the graph behind `{path}` grows at every step")

    def _tell(self, path: str, frame: FrameType, what: str) -> None:
        file = frame.f_code.co_filename
        line = _kept_at(file, path, frame.f_lineno) or frame.f_lineno
        self._collected.add(
            "HST122",
            file,
            line,
            f"{what}: memory grows until it is full.",
            fix="keep loss.detach() (or loss.item() where the number is needed)",
            severity="warning",
        )


def _holders(name: str, value: Any) -> list[tuple[str, Any]]:
    """The tensor or container behind a variable; one level into objects of the user's."""
    found = _holder(name, value)
    if found:
        return found
    kind = type(value)
    if (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.optim.Optimizer))
        and kind.__module__.split(".")[0] not in ("torch", "builtins", "types", "argparse")
    ):
        return [
            pair
            for key, inner in list(vars(value).items())
            if not key.startswith("_")
            for pair in _holder(f"{name}.{key}", inner)
        ]
    return []


def _holder(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        return [(name, value)] if not isinstance(value, torch.nn.Parameter) else []
    if isinstance(value, dict) and not name.startswith("_"):
        items = list(value.values())
    elif isinstance(value, (list, tuple, set, collections.deque)):
        items = list(value)
    else:
        return []
    flat: list[Any] = []
    for item in items[-_ITEMS:]:
        if isinstance(item, (list, tuple)):
            flat.extend(item[-_ITEMS:])
        elif isinstance(item, dict):
            flat.extend(list(item.values())[-_ITEMS:])
        else:
            flat.append(item)
    return [(name, flat)]


def _reaches(start: Any, wanted: Any) -> bool:
    """Whether one node of a graph leads to another."""
    seen: set[Any] = {start}
    todo = collections.deque([start])
    while todo and len(seen) < _WALK:
        for node, _ in todo.popleft().next_functions:
            if node is wanted:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return False


def _kept_at(file: str, path: str, near: int) -> int | None:
    """The line that puts something into a holder, nearest to the step."""
    module = tree(file)
    if module is None:
        return None
    lines = [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, (ast.stmt, ast.expr)) and _keeps(node, path)
    ]
    return min(lines, key=lambda line: (abs(line - near), line)) if lines else None


def _keeps(node: ast.AST, path: str) -> Any:
    last = path.rpartition(".")[2]

    def is_holder(target: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):
            target = target.value
        name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", None)
        return name == last

    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        adds = node.func.attr in ("append", "extend", "add", "appendleft", "insert", "setdefault")
        return adds and is_holder(node.func.value)
    if isinstance(node, ast.AugAssign):
        return is_holder(node.target)
    if isinstance(node, ast.Assign):
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
        return any(
            (isinstance(t, ast.Subscript) or last in names) and is_holder(t) for t in node.targets
        )
    return False
