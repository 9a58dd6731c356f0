"""Statements: assignments, branches, loops, definitions."""

# A method for each kind of node is named after it, as LibCST names them.
# ruff: noqa: N802, D102

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import libcst as cst

from hasten.script.flow.definitions import Definitions
from hasten.script.flow.expressions import spelled
from hasten.script.flow.facts import Loop
from hasten.script.flow.state import Done
from hasten.script.flow.values import (
    Const,
    Dict,
    Function,
    Guard,
    Instance,
    Lib,
    Module,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)

_FEW = 6  # loops over so many known items are followed item by item


class Statements(Definitions):
    """Follow statements."""

    def __init__(self) -> None:
        super().__init__()
        self.required = 0  # times that the script stopped itself where there is no GPU

    def block(self, body: cst.BaseSuite | Sequence[Any]) -> Done:
        """A block; how it ended."""
        statements = body.body if isinstance(body, cst.BaseSuite) else body
        pushed = 0
        try:
            for statement in statements:
                before = self.required
                done = self.statement(statement)
                if self.required != before:
                    self.required = before
                    from hasten.script.flow.facts import Around

                    self.around.append(Around("guard", statement))
                    pushed += 1
                if done is not None:
                    return done
            return None
        finally:
            for _ in range(pushed):
                self.around.pop()

    def statement(self, node: Any) -> Done:
        """One statement."""
        self.spend()
        if isinstance(node, cst.SimpleStatementLine):
            return self.block(node.body)
        handler: Callable[[Any], Done] | None = getattr(self, f"do_{type(node).__name__}", None)
        return handler(node) if handler is not None else None

    # -- simple statements --------------------------------------------------------------

    def do_Expr(self, node: cst.Expr) -> Done:
        value = self.ev(node.value)
        call = node.value
        if (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value in ("to", "cuda")
        ):
            self.note("dropped", call, name=call.func.attr.value, result=value)
        if isinstance(call, (cst.ListComp, cst.GeneratorExp)) and isinstance(value, Seq):
            inner = call.elt
            func = inner.func if isinstance(inner, cst.Call) else None
            if isinstance(func, cst.Attribute) and func.attr.value in ("to", "cuda"):
                for item in self.elements(value)[:1]:
                    self.note("dropped", inner, name=func.attr.value, result=item)
        if isinstance(value, Unknown) and value.key == "exit":
            return "raise"
        return None

    def do_Assign(self, node: cst.Assign) -> Done:
        value = self.ev(node.value)
        for target in node.targets:
            self.assign(target.target, value, node)
        return None

    def do_AnnAssign(self, node: cst.AnnAssign) -> Done:
        if node.value is not None:
            self.assign(node.target, self.ev(node.value), node)
        return None

    def assign(self, target: cst.CSTNode, value: Value, node: cst.CSTNode) -> None:
        """Give a target its value."""
        if isinstance(target, cst.Name):
            if isinstance(value, Tensor) and value.place == "cpu" and isinstance(node, cst.Assign):
                value = value.but(bound=node)
            self.bind(target.value, value)
            self.note("bind", node, name=target.value, args=(value,), data={"target": target})
        elif isinstance(target, cst.Attribute):
            self.store(node, self.ev(target.value), target.attr.value, value, target)
        elif isinstance(target, cst.Subscript):
            receiver = self.ev(target.value)
            index = self.index_of(target)
            if isinstance(receiver, (Dict, Seq)):
                self.note("keep", node, name="[]", receiver=receiver, args=(value,))
            if isinstance(receiver, Instance) and receiver.cls is not None:
                method = receiver.cls.find("__setitem__")
                if isinstance(method, Function):
                    self.call_function(
                        node, method.bind(receiver), [index[0] or Unknown(), value], {}
                    )
            self.set_item(target, receiver, index, value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            self._unpack(target, value, node)
        elif isinstance(target, cst.StarredElement):
            self.assign(target.value, value, node)

    def _unpack(self, target: cst.Tuple | cst.List, value: Value, node: cst.CSTNode) -> None:
        elements = target.elements
        starred = any(isinstance(e, cst.StarredElement) for e in elements)
        items = value.items if isinstance(value, Seq) else None
        if isinstance(value, Dict):
            items = [Const(k) for k in value.known()] or None
        if isinstance(value, Instance) and value.cls is not None and value.cls.fields:
            items = [value.fields.get(f, Unknown()) for f in value.cls.fields]
        if items is not None and len(items) == len(elements) and not starred:
            for element, item in zip(elements, items, strict=True):
                self.assign(element.value, item, node)
            return
        item = self.item_of(value, node)
        for element in elements:
            if isinstance(element, cst.StarredElement):
                self.assign(element.value, Seq("list", None, item), node)
            else:
                self.assign(element.value, item, node)

    def do_AugAssign(self, node: cst.AugAssign) -> Done:
        old = self.ev(node.target)
        value = self.ev(node.value)
        name = type(node.operator).__name__.removesuffix("Assign")
        if isinstance(old, Seq) and name == "Add":
            self.note("keep", node, name="+=", receiver=old, args=(self.item_of(value, node),))
            items = (
                [*old.items, *value.items]
                if old.items is not None
                and isinstance(value, Seq)
                and value.items is not None
                and not self.loops()
                else None
            )
            self.put(
                old.fields,
                "elem",
                None
                if items is not None
                else self.join_all([*self.elements(old), self.item_of(value, node)]),
            )
            self.put(old.fields, "items", items)
            return None
        tensor = self.tensor(old)
        result = self.binary(node, name, old, value)
        self.note(
            "augment",
            node,
            name=name,
            receiver=old,
            args=(value,),
            result=result,
            data={"target": node.target},
        )
        if tensor is not None and isinstance(result, Tensor):
            result = result.but(place=tensor.place, ndim=tensor.ndim, origin=tensor.origin)
        if isinstance(node.target, cst.Name):
            self.bind(node.target.value, result)
        else:
            self.assign(node.target, result, node)
        return None

    def do_Return(self, node: cst.Return) -> Done:
        value = Const(None) if node.value is None else self.ev(node.value)
        self.frames[-1].returns.append(value)
        return "return"

    def do_Raise(self, node: cst.Raise) -> Done:
        if node.exc is not None:
            self.ev(node.exc)
        return "raise"

    def do_Break(self, node: cst.Break) -> Done:
        return "break"

    def do_Continue(self, node: cst.Continue) -> Done:
        return "continue"

    def do_Assert(self, node: cst.Assert) -> Done:
        value = self.ev(node.test)
        self.host_read(node.test, value, "a condition")
        if isinstance(value, Guard) and value.truth:
            self.required += 1
        return None

    def do_Del(self, node: cst.Del) -> Done:
        targets = (
            [e.value for e in node.target.elements]
            if isinstance(node.target, cst.Tuple)
            else [node.target]
        )
        for target in targets:
            if isinstance(target, cst.Subscript):
                receiver = self.ev(target.value)
                if isinstance(receiver, (Seq, Dict)):
                    self._cleared(receiver)
                elif spelled(target.value):
                    for loop in self.loops():
                        loop.cleared.add(spelled(target.value))
        return None

    def do_Global(self, node: cst.Global) -> Done:
        self.scope.globals |= {item.name.value for item in node.names}
        return None

    def do_Nonlocal(self, node: cst.Nonlocal) -> Done:
        self.scope.globals |= {item.name.value for item in node.names}
        return None

    # -- imports and definitions --------------------------------------------------------

    # -- compound statements ------------------------------------------------------------

    def do_If(self, node: cst.If) -> Done:
        test = self.ev(node.test)
        self.host_read(node.test, test, "a condition")
        if isinstance(test, Guard):
            with self.within("guard", node, test=node.test):
                done = self.block(node.body) if test.truth else self._orelse(node)
            if not test.truth and self._ends(node.body):
                self.required += 1
            return done
        truth = self.truth(test)
        if truth is not None:
            return self.block(node.body) if truth else self._orelse(node)

        def first() -> Done:
            with self.within("if", node, test=node.test):
                return self.block(node.body)

        def second() -> Done:
            with self.within("if", node, test=node.test):
                return self._orelse(node)

        if self._asks_for_gpu(node):
            self.required += 1
        return self.fork(first, second)

    def _orelse(self, node: cst.If | cst.For | cst.While) -> Done:
        if node.orelse is None:
            return None
        return (
            self.do_If(node.orelse)
            if isinstance(node.orelse, cst.If)
            else self.block(node.orelse.body)
        )

    def _ends(self, body: cst.BaseSuite) -> bool:
        """Whether a block leaves: raises, returns or exits."""
        last = body.body[-1] if body.body else None
        if isinstance(last, cst.SimpleStatementLine):
            last = last.body[-1]
        if isinstance(last, (cst.Raise, cst.Return)):
            return True
        return (
            isinstance(last, cst.Expr)
            and isinstance(last.value, cst.Call)
            and spelled(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
        )

    def _asks_for_gpu(self, node: cst.If) -> bool:
        """`if args.cuda and not available: raise`: from here on the GPU is there if asked for."""
        return self._ends(node.body) and "is_available" in cst.Module([]).code_for_node(node.test)

    def loop(self, node: cst.For | cst.While, over: Value | None, body: Callable[[], Done]) -> Done:
        """One round of a loop."""
        made = Loop(node, over)
        if isinstance(over, Seq):
            made.rounds = over.extra.get("rounds")
        with self.within("loop", node, loop=made):
            self.note("loop", node, receiver=over, data={"loop": made})
            body()
        self.note("loop-end", node, receiver=over, data={"loop": made})
        return None

    def do_For(self, node: cst.For) -> Done:
        source = self.ev(node.iter)
        known = source.items if isinstance(source, Seq) else None
        few = known if known is not None and 1 < len(known) <= _FEW else None

        def body() -> Done:
            for item in few or [self.item_of(source, node)]:
                self.assign(node.target, item, node)
                done = self.block(node.body)
                if done in ("break", "return", "raise"):
                    return done
            return None

        self.loop(node, source, body)
        return self._orelse(node)

    def do_While(self, node: cst.While) -> Done:
        def body() -> Done:
            test = self.ev(node.test)
            self.host_read(node.test, test, "a condition")
            return self.block(node.body)

        return self.loop(node, None, body)

    def do_With(self, node: cst.With) -> Done:
        with ExitStack() as stack:
            saved = self.default_place
            for item in node.items:
                value = self.ev(item.item)
                for kind in self._context(item.item, value):
                    stack.enter_context(self.within(kind, node))
                if item.asname is not None:
                    self.assign(item.asname.name, value, node)
            done = self.block(node.body)
            self.default_place = saved
            return done

    def _context(self, node: cst.CSTNode, value: Value) -> list[str]:
        func = node.func if isinstance(node, cst.Call) else node
        path = ""
        found = self.ev(func) if isinstance(func, (cst.Name, cst.Attribute)) else value
        if isinstance(found, Lib):
            path = found.path
        if path in ("torch.no_grad", "torch.inference_mode"):
            return ["no_grad"]
        if path in ("torch.set_grad_enabled",):
            return ["no_grad?"]
        if path == "torch.enable_grad":
            return ["enable_grad"]
        if path.endswith("autocast"):
            return ["autocast"]
        place = self.device_place(value) if type(value).__name__ == "DeviceValue" else None
        if place is not None:
            self.default_place = place
        if "profile" in path:
            return ["profile"]
        return ["with"]

    def do_Try(self, node: cst.Try) -> Done:
        def attempt() -> Done:
            with self.within("try", node):
                done = self.block(node.body)
                if done is None and node.orelse is not None:
                    done = self.block(node.orelse.body)
                return done

        def after(handler: cst.ExceptHandler) -> Callable[[], Done]:
            def arm() -> Done:
                with self.within("except", node):
                    if handler.name is not None and isinstance(handler.name.name, cst.Name):
                        self.bind(handler.name.name.value, Unknown())
                    return self.block(handler.body)

            return arm

        done = attempt()
        if node.handlers:
            self.fork(lambda: None, *[after(h) for h in node.handlers])
        if node.finalbody is not None:
            self.block(node.finalbody.body)
        return done

    def do_Match(self, node: cst.Match) -> Done:
        self.ev(node.subject)

        def arm(case: cst.MatchCase) -> Callable[[], Done]:
            def run() -> Done:
                with self.within("if", node):
                    return self.block(case.body)

            return run

        return self.fork(*[arm(case) for case in node.cases], lambda: None)


__all__ = ["Module", "Statements", "Thing"]
