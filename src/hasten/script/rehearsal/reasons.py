"""Reasons that a tensor by itself gives for being on the CPU: made, moved in vain, forgotten."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from hasten.script.rehearsal.naming import Named, parts
from hasten.script.rehearsal.origins import Origin
from hasten.script.rehearsal.places import Place, Stack

_MOVERS = ("to", "cuda", "to_device", "move_to", "move", "send")


@dataclass(frozen=True)
class Cause:
    """Where the fix goes, of what kind the fault is, and what to write."""

    code: str
    file: str
    line: int
    why: str
    fix: str
    related: tuple[tuple[str, int, str], ...] = ()


def first_maker(origin: Origin | None) -> Origin | None:
    """The maker to name: the newest root that user code made."""
    if origin is None:
        return None
    mine = [root for root in origin.roots if root.stack]
    return mine[-1] if mine else origin


def first_stack(origin: Origin) -> Stack:
    """The stack of the maker to name."""
    first = first_maker(origin)
    return first.stack if first is not None else ()


def of_own_class(named: Named | None) -> Cause | None:
    """A field that the user's own `to` forgets: evidence is another field that is moved."""
    owner = None if named is None else named.owner
    if owner is None or isinstance(owner, (nn.Module, dict, list, tuple)):
        return None
    for name in _MOVERS:
        method = getattr(type(owner), name, None)
        if not inspect.isfunction(method):
            continue
        if any(held.device.type != "cpu" for _, held, whose in parts(owner) if whose is owner):
            code = method.__code__
            field = named.text.rpartition(".")[2] if named else ""
            return Cause(
                "HST119",
                code.co_filename,
                code.co_firstlineno,
                f"{type(owner).__name__}.{name} moves other fields but leaves `{field}` on the "
                "CPU.",
                f"self.{field} = self.{field}.to(device)",
            )
    return None


def of_dropped(origin: Origin | None, named: Named | None) -> Cause | None:
    """A copy on the device that was made and thrown away."""
    moves = [] if origin is None else [moved for moved in origin.moved if not moved.used]
    if origin is not None and not moves:  # computed from what was moved in vain
        moves = [m for root in origin.roots for m in root.moved if m.gone and not m.used]
    if not moves:
        return None
    place = moves[-1].place
    name = f"`{named.text}`" if named else "the tensor"
    return Cause(
        "HST103",
        place.file,
        place.line,
        f"the moved copy is thrown away here, and {name} stays on the CPU: `.to` gives a new "
        "tensor.",
        "keep the result: x = x.to(device); batch = [x.to(device) for x in batch]",
    )


def of_making(origin: Origin | None, named: Named | None, here: Place, op: str) -> Cause:
    """The tensor was made on the CPU: the cause that is left when there is no other."""
    first = origin
    if origin is None or origin.place is None or origin.place[:2] == here[:2]:
        first = first_maker(origin)  # made in the failing line itself: of what came from elsewhere
    place = first.place if first is not None and first.place is not None else here
    root = first_maker(origin)
    related: tuple[tuple[str, int, str], ...] = ()
    if root is not None and root is not first and root.place is not None:
        related = ((root.place.file, root.place.line, "from what is made here"),)
    name = f"`{named.text}`" if named else "the tensor"
    index = "index" in op
    code = "HST110" if index else "HST104"
    how = first.how if first is not None else "a call"
    return Cause(
        code,
        place.file,
        place.line,
        f"{name} is made on the CPU by {how}"
        + (" and indexed from the device." if index else " and meets tensors of the device."),
        "make it with device=..., as that of the tensor it meets, or move it with .to(device)",
        related,
    )
