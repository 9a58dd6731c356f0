"""The state of a reading: names, fields, and how branches are tried and joined."""

# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import libcst as cst

from hasten.script.flow.facts import Around, Facts, Loop, Mix, Seen
from hasten.script.flow.joining import join
from hasten.script.flow.values import (
    Function,
    Heap,
    Loader,
    Module,
    Origin,
    ParameterOf,
    Scope,
    Seq,
    Tensor,
    Value,
)

MISSING: Any = object()
Done = str | None  # how a block ended: None, return, break, continue or raise

# A reading stops following calls after this many expressions, so that no file takes long.
_BUDGET = 120_000


class OutOfBudget(Exception):  # noqa: N818
    """The file is too involved to follow to its end; what was seen until here counts."""


@dataclass(eq=False)
class Frame:
    """One call under way."""

    function: Function | None
    node: cst.CSTNode | None
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)


class State:
    """Names, heap, branches, and the record of what was seen."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.globals = Scope({})
        self.scope = self.globals
        self.frames: list[Frame] = [Frame(None, None)]
        self.around: list[Around] = []
        self.journals: list[dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]]] = []
        self.assumed = False
        self.default_place: str = "cpu"
        self.spent = 0
        self._noted: dict[tuple[str, int, str], int] = {}

    # -- names and fields ---------------------------------------------------------------

    def put(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Write so that a branch can be undone."""
        if self.journals:
            journal = self.journals[-1]
            if (id(mapping), key) not in journal:
                journal[id(mapping), key] = (mapping, key, mapping.get(key, MISSING))
        mapping[key] = value

    def bind(self, name: str, value: Value) -> None:
        """Give a name of the present scope its value."""
        scope = self.scope
        if name in scope.globals:
            scope = scope.home(name) or self.globals
            if scope is self.scope and scope.outer is not None:
                scope = self.globals
        self.put(scope.names, name, value)

    def spend(self) -> None:
        """Count one expression or statement."""
        self.spent += 1
        if self.spent > _BUDGET:
            raise OutOfBudget

    # -- branches -----------------------------------------------------------------------

    def fork(self, *arms: Callable[[], Done]) -> Done:
        """Try each arm from the same state; go on with what all that go on agree on."""
        ended: list[tuple[Done, dict[Any, tuple[dict[Any, Any], Any, Any]]]] = []
        for arm in arms:
            self.journals.append({})
            try:
                done = arm()
            finally:
                journal = self.journals.pop()
                after = {k: (m, key, m.get(key, MISSING)) for k, (m, key, _) in journal.items()}
                for mapping, key, old in journal.values():
                    if old is MISSING:
                        mapping.pop(key, None)
                    else:
                        mapping[key] = old
            ended.append((done, after))
        going = [after for done, after in ended if done is None]
        for slot in {
            k: v for after in (going or [a for _, a in ended]) for k, v in after.items()
        }.values():
            mapping, key, _ = slot
            present = mapping.get(key, MISSING)
            ways = [
                after[id(mapping), key][2] if (id(mapping), key) in after else present
                for after in (going or [a for _, a in ended])
            ]
            self.put(mapping, key, _joined([w for w in ways if w is not MISSING]))
        return None if going else ended[0][0]

    @contextmanager
    def within(self, kind: str, node: cst.CSTNode, **more: Any) -> Iterator[None]:
        """Stand something around what follows."""
        self.around.append(Around(kind, node, **more))
        try:
            yield
        finally:
            self.around.pop()

    def no_grad(self) -> bool:
        """Whether graphs are off here."""
        for around in reversed(self.around):
            if around.kind == "no_grad":
                return True
            if around.kind == "enable_grad":
                return False
        return False

    def loops(self) -> list[Loop]:
        """The loops under way, outermost first."""
        return [a.loop for a in self.around if a.loop is not None]

    # -- what was seen ------------------------------------------------------------------

    def call_nodes(self) -> tuple[cst.CSTNode, ...]:
        """The calls under way."""
        return tuple(f.node for f in self.frames if f.node is not None)

    def note(self, kind: str, node: cst.CSTNode, **more: Any) -> Seen:
        """Record something at this place; the same place a few times at most."""
        seen = Seen(
            kind,
            node,
            around=tuple(self.around),
            calls=self.call_nodes(),
            inside=tuple(f.function for f in self.frames if f.function is not None),
            assumed=self.assumed,
            **more,
        )
        key = (kind, id(node), seen.name)
        self._noted[key] = self._noted.get(key, 0) + 1
        if self._noted[key] <= 12:
            self.facts.seen.append(seen)
        return seen

    def origin(self, kind: str, node: cst.CSTNode, **more: Any) -> Origin:
        """That a value was made here."""
        inside = tuple(f.function.name for f in self.frames if f.function is not None)
        return Origin(kind, node, calls=self.call_nodes(), inside=inside,
                      in_init="__init__" in inside, loops=tuple(self.loops()), **more)  # fmt: skip

    def meet(
        self,
        node: cst.CSTNode,
        what: str,
        operands: list[tuple[str, Value]],
        *,
        strict: bool,
        **more: Any,
    ) -> None:
        """Record each operand that is surely on the CPU while another is on the accelerator.

        With `strict` no tensor may be elsewhere; else zero-dimensional ones on the CPU may.
        """
        tensors = [(role, self.tensor(v)) for role, v in operands]
        known = [(role, t) for role, t in tensors if t is not None]
        there = [t for _, t in known if t.place == "dev"]
        if not there:
            return
        for role, tensor in known:
            if tensor.place != "cpu" or tensor.ndim == 0 or (tensor.ndim is None and not strict):
                continue
            seen = self.note("mix", node, name=what)
            self.facts.mixes.append(Mix(seen, tensor, there[0], what, role, **more))

    def tensor(self, value: Value | None) -> Tensor | None:
        """The value as a tensor, None when it is none (or nobody knows)."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, ParameterOf):
            module = value.module
            return Tensor(self.place_of(module), -1, True, module.origin, registered=True)
        return None

    if TYPE_CHECKING:  # what the floors above this one give, for those between

        def ev(self, node: cst.CSTNode) -> Value: ...
        def place_of(self, value: Value) -> Any: ...
        def statement(self, node: Any) -> Done: ...
        def call_module(
            self,
            node: cst.CSTNode,
            module: Module,
            args: list[Value],
            kwargs: dict[str, Value],
        ) -> Value: ...
        def flat(self, values: list[Value]) -> list[Tensor]: ...
        def children(self, module: Module) -> list[Value]: ...
        def batch(self, loader: Loader, node: cst.CSTNode) -> Value: ...
        def escape(self, node: cst.CSTNode, values: list[Value]) -> None: ...
        def assign(self, target: cst.CSTNode, value: Value, node: cst.CSTNode) -> None: ...
        def block(self, body: Any) -> Done: ...
        def call(
            self,
            node: cst.CSTNode,
            func: Value,
            args: list[Value],
            kwargs: dict[str, Value],
            loose: bool,
        ) -> Value: ...
        def call_attribute(
            self,
            node: cst.Call,
            receiver: Value,
            name: str,
            args: list[Value],
            kwargs: dict[str, Value],
            loose: bool,
        ) -> Value: ...
        def call_library(
            self,
            node: cst.CSTNode,
            path: str,
            args: list[Value],
            kwargs: dict[str, Value],
            loose: bool,
        ) -> Value: ...
        def call_function(
            self,
            node: cst.CSTNode,
            func: Function,
            args: list[Value],
            kwargs: dict[str, Value],
            *,
            guess: bool = False,
        ) -> Value: ...

    def elements(self, value: Value | None) -> list[Value]:
        """What a container may hold."""
        if isinstance(value, Seq):
            items = list(value.items or [])
            elem = value.fields["elem"]
            return items + ([elem] if elem is not None else [])
        return []


def _joined(ways: list[Any]) -> Any:
    if not ways:
        return None
    result = ways[0]
    for way in ways[1:]:
        if way is result:
            continue
        if isinstance(way, Value) and isinstance(result, Value):
            result = join(result, way)
        elif isinstance(way, list) and isinstance(result, list) and len(way) == len(result):
            result = [join(a, b) if a is not b else a for a, b in zip(result, way, strict=True)]
        else:
            result = way if result is None else result if way is None else None
    return result


__all__ = ["MISSING", "Done", "Frame", "Heap", "OutOfBudget", "State"]
