"""Which rule speaks of a meeting of devices: the one that knows why an operand is on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from hasten.script.findings import Severity
from hasten.script.flow.facts import Loop, Mix, Seen
from hasten.script.flow.values import (
    ClassValue,
    Dict,
    Function,
    Instance,
    Loader,
    Module,
    Origin,
    Seq,
    Value,
)
from hasten.script.rules.blame import asked_for, beside_moves, left_part, moved_too
from hasten.script.rules.file import File


@dataclass(frozen=True, eq=False)
class Meeting:
    """A mismatch with its reason: the code of the rule, the place to mend, and what is there."""

    code: str
    mix: Mix
    node: cst.CSTNode
    origin: Origin | None
    holder: tuple[Seen, str] | None = None
    extra: cst.CSTNode | None = None

    @property
    def severity(self) -> Severity:
        """A warning where the arguments of the function are not known."""
        return "warning" if self.mix.seen.assumed else "error"


def meetings(file: File, code: str) -> list[Meeting]:
    """The mismatches that a rule has to report: one for each place to mend."""
    if "meetings" not in file.shared:
        file.shared["meetings"] = _all(file)
    return [m for m in file.shared["meetings"] if m.code == code]


def _all(file: File) -> list[Meeting]:
    dropped = dropped_moves(file)
    found: dict[int, Meeting] = {}
    for mix in file.facts.mixes:
        if mix.origin is not None and any(
            _same_batch(mix.origin, origin) for d in dropped for origin in d.origins
        ):
            continue  # HST103 speaks of it
        meeting = _judged(file, mix)
        key = id(meeting.node)
        old = found.get(key)
        if old is None or (old.mix.seen.assumed and not mix.seen.assumed):
            found[key] = meeting
    return list(found.values())


def _same_batch(one: Origin, other: Origin) -> bool:
    return (
        one is other
        or (one.kind == other.kind == "batch" and one.node is other.node)
        or (one.kind == other.kind == "factory" and one.node is other.node)
    )


def _judged(file: File, mix: Mix) -> Meeting:
    origin = mix.origin
    if mix.role == "module" and isinstance(mix.module, Module):
        return _of_module(file, mix, mix.module)
    if origin is None:
        return Meeting("HST115", mix, mix.seen.node, None)
    if mix.role == "weight":
        return _of_weight(mix, origin)
    if origin.kind == "copy":
        return Meeting("HST107", mix, _where_copied(file, origin), origin)
    if origin.kind == "attribute":
        inner = origin.inner
        if (
            not origin.in_init
            and inner is not None
            and inner.kind == "factory"
            and not inner.in_init
        ):
            return Meeting("HST104", mix, inner.node, inner)
        return Meeting("HST105", mix, origin.node, origin)
    if origin.kind == "field":
        method = _own_move(origin.owner)
        if method is not None:
            return Meeting("HST119", mix, method.node, origin)
        inner = origin.inner
        if mix.role == "index" and _moved_after(file, mix.seen.node):
            return Meeting("HST110", mix, mix.seen.node, origin)
        if inner is not None and inner.kind == "factory":
            code = "HST110" if mix.role == "index" else "HST104"
            return Meeting(code, mix, origin.node if moved_too(file, inner) else inner.node, inner)
        return Meeting("HST110" if mix.role == "index" else "HST115", mix, origin.node, origin)
    if mix.role == "index":
        table = mix.cpu.bound or origin.node
        moved = _moved_after(file, mix.seen.node)
        return Meeting("HST110", mix, mix.seen.node if moved else table, origin)
    if origin.kind == "batch":
        sibling = _sibling_move(file, origin)
        left = left_part(file, sibling, origin) if sibling is not None else None
        return Meeting("HST109", mix, left or sibling or mix.seen.node, origin, extra=sibling)
    if origin.kind == "factory":
        derived = mix.cpu.bound if moved_too(file, origin) else None
        return Meeting("HST104", mix, derived or origin.node, origin)
    if origin.kind == "module":
        made = next(
            (
                s.receiver
                for s in file.facts.all("module-call")
                if isinstance(s.receiver, Module) and s.receiver.origin is origin
            ),
            None,
        )
        if isinstance(made, Module):
            return _of_module(file, mix, made)
        return Meeting("HST111", mix, origin.node, origin)
    return Meeting("HST115", mix, mix.seen.node, origin)


def _of_weight(mix: Mix, origin: Origin) -> Meeting:
    """Weights of a loss: where the loss is made, unless it was moved and keeps them plainly."""
    owner = mix.module if isinstance(mix.module, Module) else origin.owner
    if isinstance(owner, (Module, Instance)) and owner.origin is not None:
        if origin.kind == "attribute" and "dev" in owner.extra.get("moved", {}):
            return Meeting("HST105", mix, origin.node, origin)
        return Meeting("HST108", mix, owner.origin.node, origin)
    return Meeting("HST108", mix, mix.cpu.bound or origin.node, origin)


def _moved_after(file: File, node: cst.CSTNode) -> bool:
    """Whether what is taken from a table is moved at once: the table is meant to be on the CPU."""
    return any(
        isinstance(seen.node, cst.Call)
        and isinstance(seen.node.func, cst.Attribute)
        and seen.node.func.value is node
        for seen in file.facts.all("tensor-move")
    )


def _of_module(file: File, mix: Mix, module: Module) -> Meeting:
    holder = plain_holder(file, module)
    if holder is not None:
        return Meeting("HST106", mix, holder[0].node, module.origin, holder=holder)
    origin = module.origin
    # A part of a model that was never moved: the model is what has to be moved.
    root = _root(file, module)
    if root is not None and root.origin is not None:
        origin = root.origin
    node = mix.seen.node if origin is None else beside_moves(file, origin)
    return Meeting("HST111", mix, node, origin)


def _root(file: File, module: Module) -> Module | None:
    best = module
    for seen in file.facts.all("module-call"):
        outer = seen.receiver
        if isinstance(outer, Module) and outer is not best and _contains(outer, best):
            best = outer
    return best


def _contains(outer: Module, inner: Module) -> bool:
    todo, done = [outer], set()
    while todo:
        one = todo.pop()
        if one is inner:
            return True
        if id(one) in done:
            continue
        done.add(id(one))
        todo += [v for v in one.fields.values() if isinstance(v, Module)]
        if isinstance(one.extra.get("wraps"), Module):
            todo.append(one.extra["wraps"])
    return False


def plain_holder(file: File, module: Module) -> tuple[Seen, str] | None:
    """The assignment of a plain list or dict in a module that holds this module, if any."""
    for seen in file.facts.all("store"):
        if (
            isinstance(seen.receiver, Module)
            and seen.args
            and any(_contains(held, module) for held in modules_in(seen.args[0]))
        ):
            return seen, seen.name
    return None


def modules_in(value: Value) -> list[Module]:
    """The modules in a plain list, tuple or dict (nested ones too)."""
    if not isinstance(value, (Seq, Dict)):
        return []
    found: list[Module] = []
    todo: list[Value] = [value]
    for _ in range(200):
        if not todo:
            break
        one = todo.pop()
        if isinstance(one, Module):
            found.append(one)
        elif isinstance(one, Seq):
            todo += [
                *(one.items or []),
                *([one.fields["elem"]] if one.fields["elem"] is not None else []),
            ]
        elif isinstance(one, Dict):
            todo += one.values()
    return found


def _own_move(owner: object) -> Function | None:
    """The class's own `to` or `cuda`."""
    cls = owner.cls if isinstance(owner, (Instance, Module)) else None
    if isinstance(cls, ClassValue):
        for name in ("to", "cuda", "to_device", "move_to"):
            found = cls.find(name)
            if isinstance(found, Function):
                return found
    return None


def _where_copied(file: File, origin: Origin) -> cst.CSTNode:
    """The call, in the function that later moves the module, in which it was copied."""
    moves = [s for s in file.facts.all("move") if s.receiver is origin.owner]
    return asked_for(origin.calls, origin.node, moves[0].calls) if moves else origin.node


def _sibling_move(file: File, origin: Origin) -> cst.CSTNode | None:
    """Where other parts of the same batch are moved."""
    found = None
    for seen in file.facts.all("tensor-move"):
        theirs = getattr(seen.receiver, "origin", None)
        if (
            theirs is not None
            and seen.data.get("to") == "dev"
            and theirs.kind == "batch"
            and theirs.node is origin.node
        ):
            found = seen.node
    return found


# -- results thrown away ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dropped:
    """A `.to(device)` whose result nobody keeps."""

    node: cst.CSTNode
    origins: tuple[Origin, ...]  # of all that was moved here
    proven: bool
    rebound: str = ""


def dropped_moves(file: File) -> list[Dropped]:
    """All of them in a file."""
    if "dropped" not in file.shared:
        file.shared["dropped"] = [*_statements(file), *_rebound(file)]
    return file.shared["dropped"]  # type: ignore[no-any-return]


def _statements(file: File) -> list[Dropped]:
    from hasten.script.flow.values import Tensor, Unknown

    found = []
    moves = _moves(file)
    for seen in file.facts.all("dropped"):
        theirs = moves.get(id(seen.node), [])
        if not theirs:
            continue
        move = theirs[-1]
        if isinstance(seen.result, Tensor):
            if move.data.get("from") == "dev" and move.data.get("to") == "dev":
                continue
            found.append(Dropped(seen.node, _origins(theirs), True))
        elif (
            isinstance(seen.result, Unknown)
            and seen.result.origin is not None
            and seen.result.origin.kind in ("batch", "loop")
            and any(loop.has_backward for loop in seen.loops())
        ):
            found.append(Dropped(seen.node, (seen.result.origin,), False))
    return found


def _moves(file: File) -> dict[int, list[Seen]]:
    """The moves of tensors at each node, in the order they happened."""
    found: dict[int, list[Seen]] = {}
    for seen in file.facts.of("tensor-move", "unknown-move"):
        found.setdefault(id(seen.node), []).append(seen)
    return found


def _origins(moves: list[Seen]) -> tuple[Origin, ...]:
    found = (getattr(move.receiver, "origin", None) for move in moves)
    return tuple(dict.fromkeys(origin for origin in found if origin is not None))


def _rebound(file: File) -> list[Dropped]:
    """`for t in batch: t = t.to(device)`: the loop's own name is all that changes."""
    found = []
    moves = _moves(file)
    for seen in file.facts.all("bind"):
        loops = seen.loops()
        if not loops or not isinstance(loops[-1].node, cst.For):
            continue
        loop = loops[-1].node
        if not isinstance(seen.node, cst.Assign) or seen.name not in _names(loop.target):
            continue
        value = seen.node.value
        if (
            not isinstance(value, cst.Call)
            or not isinstance(value.func, cst.Attribute)
            or value.func.attr.value not in ("to", "cuda")
        ):
            continue
        base = value.func.value
        theirs = moves.get(id(value), [])
        if not isinstance(base, cst.Name) or base.value != seen.name or not theirs:
            continue
        if _read_after(file, loop, seen.node, seen.name) or not _used_again(file, loop, loops[-1]):
            continue
        tensor = theirs[-1].kind == "tensor-move"
        found.append(Dropped(value, _origins(theirs), tensor, rebound=seen.name))
    return found


def _used_again(file: File, loop: cst.For, going: Loop) -> bool:
    """Whether what the loop goes over is used after it, so that the move was meant to last."""
    if isinstance(going.over, Loader):
        return False
    found = _NamesIn()
    loop.iter.visit(found)
    end = file.positions[loop].end
    return any(
        isinstance(node, cst.Name)
        and node.value in found.names
        and (place.start.line, place.start.column) >= (end.line, end.column)
        for node, place in file.positions.items()
    )


class _NamesIn(cst.CSTVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        """A name that is read."""
        self.names.add(node.value)


def _names(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, (cst.Tuple, cst.List)):
        return {name for e in target.elements for name in _names(e.value)}
    return set()


def _read_after(file: File, loop: cst.For, assign: cst.CSTNode, name: str) -> bool:
    """Whether the name is read in the loop after this assignment, or after the loop."""
    end = file.positions[assign].end
    last = file.positions[loop].end
    for node, place in file.positions.items():
        if isinstance(node, cst.Name) and node.value == name:
            start = place.start
            after = (start.line, start.column) >= (end.line, end.column)
            if after and (start.line, start.column) <= (last.line, last.column):
                return True
    return False
