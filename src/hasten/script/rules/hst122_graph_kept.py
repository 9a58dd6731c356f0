"""HST122: what is kept over steps holds their graphs."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.expressions import spelled
from hasten.script.flow.facts import Loop, Seen
from hasten.script.flow.values import Const, Dict, Seq, Tensor, Unknown, Value
from hasten.script.rules.file import File, Rule, called_from, first_of_each_line


class GraphKept(Rule):
    """A loss or output is kept with its graph, step after step.

    ## What it does

    Finds tensors with a graph that a training loop appends to a list, puts in a dict, or adds to a
    running total made outside the loop. Lists that are emptied in the loop are not reported.

    ## Why is this bad?

    The graph holds every activation of its step: memory grows until it runs out.

    ## Bad

    ```python
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    ```

    ## Good

    ```python
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    ```

    ## Fix safety

    Safe, unless a later backward is meant to go through all steps.
    """

    code = "HST122"

    def check(self, file: File) -> Iterator[Finding]:
        """Kept graphs."""
        return first_of_each_line(sorted(self._all(file), key=lambda f: f.line))

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.of("keep", "augment", "bind", "store"):
            loop = seen.step_loop()
            if loop is None or seen.under("no_grad"):
                continue
            kept = _appended(file, seen, loop) if seen.kind == "keep" else _added(file, seen, loop)
            if kept:
                yield self.finding(
                    file, seen.node,
                    f"`{kept}` outlives the step and keeps its graph: memory grows with"
                    " every step of the"
                    f" loop on line {file.line(loop.node)}.",
                    "keep a value without graph: .detach(), or .item() now and then",
                    related=[
                        *called_from(file, seen, loop), (loop.node, "the training loop")
                    ],
                )  # fmt: skip


def _graph(file: File, value: Value, node: cst.CSTNode | None, loop: Loop) -> bool:
    if isinstance(value, (Tensor, Unknown)) and value.graph:
        return True
    if isinstance(value, Unknown) and node is not None and not value.key:
        # Nothing is known of it, save that the loop itself calls backward on it.
        return spelled(node) in _backward_names(loop) and bool(spelled(node))
    if isinstance(value, (Seq, Dict)):
        inner = value.items or [] if isinstance(value, Seq) else value.values()
        return any(isinstance(v, (Tensor, Unknown)) and v.graph for v in inner)
    return False


def _backward_names(loop: Loop) -> set[str]:
    names = set()
    for node in loop.backward:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            names.add(spelled(node.func.value))
    return names


def _appended(file: File, seen: Seen, loop: Loop) -> str:
    holder, value = seen.receiver, seen.args[0]
    if not isinstance(holder, (Seq, Dict)) or holder.extra.get("cleared"):
        return ""
    if holder.origin is not None and loop in holder.origin.loops:
        return ""
    node = seen.node
    argument: cst.CSTNode | None = None
    name = ""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.args:
        argument, name = node.args[-1].value, spelled(node.func.value)
    elif isinstance(node, cst.Assign):
        argument = node.value
        target = node.targets[0].target
        if isinstance(target, cst.Subscript):
            name = spelled(target.value)
            index = target.slice[0].slice
            if isinstance(index, cst.Index) and isinstance(
                index.value, (cst.SimpleString, cst.Integer)
            ):
                return ""  # one key, written over each step: it does not grow
    elif isinstance(node, cst.AugAssign):
        argument, name = node.value, spelled(node.target)
    if not _graph(file, value, argument, loop) or _emptied(file, name, loop):
        return ""
    return file.short(argument) if argument is not None else name


def _emptied(file: File, name: str, loop: Loop) -> bool:
    """Whether the loop gives the name a new list, or empties it."""
    last = name.rsplit(".", 1)[-1]
    if any(one.rsplit(".", 1)[-1] == last for one in loop.cleared):
        return True
    for seen in file.facts.of("bind", "store"):
        if (
            seen.name == last
            and any(o.node is loop.node for o in seen.loops())
            and seen.args
            and isinstance(seen.args[0], (Seq, Dict))
        ):
            return True
    return False


def _added(file: File, seen: Seen, loop: Loop) -> str:
    node = seen.node
    if seen.kind == "augment":
        if seen.name != "Add" or not isinstance(node, cst.AugAssign):
            return ""
        target: cst.CSTNode = node.target
        value, argument = seen.args[0], node.value
    else:
        if not isinstance(node, cst.Assign) or not isinstance(node.value, cst.BinaryOperation):
            return ""
        target = node.targets[0].target
        sides = [node.value.left, node.value.right]
        if not isinstance(node.value.operator, cst.Add) or spelled(target) not in [
            spelled(s) for s in sides
        ]:
            return ""
        argument = sides[1] if spelled(sides[0]) == spelled(target) else sides[0]
        value = seen.args[0]
    name = spelled(target)
    if not name or not _graph(file, value, argument, loop) or name in _backward_names(loop):
        return ""
    last = name.rsplit(".", 1)[-1]
    for other in file.facts.of("bind", "store"):
        if (
            other.name == last
            and other.node is not node
            and loop in other.loops()
            and not _again(other, name)
        ):
            return ""
    if isinstance(seen.receiver, Const) and seen.receiver.value is None:
        return ""
    return file.short(argument)


def _again(seen: Seen, name: str) -> bool:
    """Whether this binding only adds to the name."""
    node = seen.node
    if isinstance(node, cst.AugAssign):
        return True
    if isinstance(node, cst.Assign) and isinstance(node.value, cst.BinaryOperation):
        return name in (spelled(node.value.left), spelled(node.value.right))
    return False
