"""What the flow saw, for rules to judge: calls, meetings of devices, waits, things kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from hasten.script.flow.values import ClassValue, Function, Origin, Tensor, Value


@dataclass(eq=False)
class Loop:
    """One loop under way: what it goes over, and what happened in it."""

    node: cst.CSTNode
    over: Value | None = None
    backward: list[cst.CSTNode] = field(default_factory=list)  # the innermost loop around them
    has_backward: bool = False  # within it, at any depth
    has_step: bool = False
    rounds: int | None = None
    calls: set[str] = field(default_factory=set)
    cleared: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Around:
    """One thing that stands around a place: a loop, a condition, a `with`."""

    kind: str  # loop, if, guard, no_grad, autocast, with, try
    node: cst.CSTNode
    loop: Loop | None = None
    test: cst.CSTNode | None = None


@dataclass(frozen=True, eq=False)
class Seen:
    """One thing that happened at a place in the source.

    Attributes:
        kind: call, mix, sync, keep, move, drop, store, ...
        around: loops and conditions, outermost first, through the calls under way.
        calls: nodes of the calls under way, outermost first; `inside` the functions entered.
        assumed: inside a function that nothing in the file calls, its arguments unknown.
    """

    kind: str
    node: cst.CSTNode
    around: tuple[Around, ...]
    calls: tuple[cst.CSTNode, ...]
    inside: tuple[Function, ...]
    assumed: bool
    name: str = ""
    receiver: Value | None = None
    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    result: Value | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def loops(self) -> list[Loop]:
        """The loops around it, outermost first."""
        return [a.loop for a in self.around if a.loop is not None]

    def step_loop(self) -> Loop | None:
        """The training loop whose step this is part of: innermost with a backward right in it."""
        for loop in reversed(self.loops()):
            if loop.backward:
                return loop
        return None

    def every_round_of(self, loop: Loop) -> bool:
        """Whether it happens in each round of that loop: no condition between."""
        inner = False
        for around in self.around:
            if around.loop is loop:
                inner = True
            elif inner and around.kind in ("if", "except"):
                return False
        return inner

    def under(self, kind: str) -> bool:
        """Whether something of that kind stands around it."""
        return any(around.kind == kind for around in self.around)


@dataclass(frozen=True, eq=False)
class Mix:
    """An operation with one operand surely on the CPU and one surely on the accelerator."""

    seen: Seen
    cpu: Tensor
    dev: Tensor
    what: str  # the operation, in words
    role: str = ""  # module, index, weight, lengths, target or ""
    module: Value | None = None

    @property
    def origin(self) -> Origin | None:
        """Where the operand on the CPU came to be."""
        return self.cpu.origin


@dataclass(eq=False)
class Facts:
    """All that was seen in one file."""

    seen: list[Seen] = field(default_factory=list)
    mixes: list[Mix] = field(default_factory=list)
    classes: list[ClassValue] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    gave_up: bool = False

    def of(self, *kinds: str) -> list[Seen]:
        """Everything of these kinds, in the order it happened."""
        return [s for s in self.seen if s.kind in kinds]

    def all(self, kind: str, *names: str) -> list[Seen]:
        """Everything of this kind, in the order it happened."""
        return [s for s in self.seen if s.kind == kind and (not names or s.name in names)]
