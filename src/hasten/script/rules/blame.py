"""Which line a fault belongs to: the call that comes too early, the part that was left behind."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.flow.facts import Seen
from hasten.script.flow.values import Dict, Origin, Seq, Tensor, Value
from hasten.script.rules.file import File


def asked_for(
    calls: tuple[cst.CSTNode, ...], node: cst.CSTNode, other: tuple[cst.CSTNode, ...]
) -> cst.CSTNode:
    """Of a thing made under some calls, what stands in the function that another thing is in.

    Args:
        calls: those under way when it was made, outermost first; `node` makes it.
        other: the calls under way at the other thing.
    """
    depth = 0
    while depth < min(len(calls), len(other)) and calls[depth] is other[depth]:
        depth += 1
    return calls[depth] if len(calls) > depth else node


def beside_moves(file: File, origin: Origin) -> cst.CSTNode:
    """Of a module, the call that makes it in the innermost function that moves modules, too.

    Or that keeps it: the `__init__` of an object.
    """
    moves = {tuple(map(id, seen.calls)) for seen in file.facts.all("move")}
    for depth in range(len(origin.calls), -1, -1):
        kept = depth > 0 and origin.inside[depth - 1 :][:1] == ("__init__",)
        if kept or tuple(map(id, origin.calls[:depth])) in moves:
            node = origin.calls[depth] if depth < len(origin.calls) else origin.node
            return origin.node if _unpacked(file, node) else node
    return origin.node


def _unpacked(file: File, node: cst.CSTNode) -> bool:
    """Whether a call gives several things, of which one is meant."""
    return any(
        isinstance(one, cst.Assign)
        and one.value is node
        and isinstance(one.targets[0].target, (cst.Tuple, cst.List))
        for one in file.positions
    )


def moved_too(file: File, origin: Origin) -> bool:
    """Whether what was made there, or a part of it, is also moved to the device as it should be."""
    kept = {id(seen.node) for seen in file.facts.all("dropped")}
    return any(
        getattr(seen.receiver, "origin", None) is origin and id(seen.node) not in kept
        for seen in file.facts.all("tensor-move")
        if seen.data.get("to") == "dev"
    )


def left_part(file: File, move: cst.CSTNode, origin: Origin) -> cst.CSTNode | None:
    """What leaves a part of a batch behind while another is moved.

    Either it stands unmoved beside the moved one in a display or call, or a statement of the same
    function takes it out of the batch as it is.
    """
    if not isinstance(move, cst.Call) or not isinstance(move.func, cst.Attribute):
        return None
    batch = _root(move.func.value)
    if not batch:
        return None
    for value in _beside(file, move):
        if value is not move and _is_read(value) and _root(value) == batch:
            return value
    function = _function_of(file, move)
    moved = {
        _root(seen.node.func.value)
        for seen in file.facts.of("tensor-move", "unknown-move")
        if isinstance(seen.node, cst.Call) and isinstance(seen.node.func, cst.Attribute)
        and _function_of(file, seen.node) is function
    }  # fmt: skip
    for seen in file.facts.all("bind"):
        node = seen.node
        if (
            isinstance(node, cst.Assign)
            and _is_read(node.value)
            and _root(node.value) == batch
            and seen.name not in (*moved, batch)
            and _function_of(file, node) is function
            and _holds_part(seen, origin)
        ):
            return node
    return None


def _holds_part(seen: Seen, origin: Origin) -> bool:
    return any(
        tensor.place == "cpu" and tensor.origin is not None and tensor.origin.node is origin.node
        for value in seen.args
        for tensor in _tensors(value)
    )


def _tensors(value: Value, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (Seq, Dict)):
        inner = value.values() if isinstance(value, Dict) else [*(value.items or [])]
        if isinstance(value, Seq) and value.fields["elem"] is not None:
            inner.append(value.fields["elem"])
        for item in inner:
            yield from _tensors(item, depth - 1)


def _beside(file: File, move: cst.CSTNode) -> list[cst.BaseExpression]:
    """The values of the smallest display or call that has this one among its own."""
    best: cst.CSTNode | None = None
    found: list[cst.BaseExpression] = []
    for node in file.positions:
        values = _values(node)
        if any(value is move for value in values) and (best is None or file.holds(best, node)):
            best, found = node, values
    return found


def _values(node: cst.CSTNode) -> list[cst.BaseExpression]:
    if isinstance(node, cst.Call):
        return [arg.value for arg in node.args]
    if isinstance(node, (cst.Dict, cst.Tuple, cst.List)):
        return [element.value for element in node.elements]
    return []


def _is_read(node: cst.CSTNode) -> bool:
    """Whether it is a name, attribute or item, with no call in it."""
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        node = node.value
    return isinstance(node, cst.Name)


def _root(node: cst.CSTNode) -> str:
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _function_of(file: File, node: cst.CSTNode) -> cst.CSTNode | None:
    """The innermost function around a node, None at the top of the file."""
    if "functions" not in file.shared:
        file.shared["functions"] = [n for n in file.positions if isinstance(n, cst.FunctionDef)]
    best: cst.CSTNode | None = None
    for function in file.shared["functions"]:
        if file.holds(function, node) and (best is None or file.holds(best, function)):
            best = function
    return best
