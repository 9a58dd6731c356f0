"""Expressions: what each gives, and what reading it tells."""

# A method for each kind of node is named after it, as LibCST names them.
# ruff: noqa: N802, D102, SIM905

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from hasten.script.flow.displays import Displays
from hasten.script.flow.values import (
    SOME,
    Const,
    DeviceValue,
    Dict,
    Function,
    Guard,
    Instance,
    Lib,
    Loader,
    Module,
    Optimizer,
    Seq,
    Tensor,
    Unknown,
    Value,
)

_BUILTINS = frozenset(
    "len range enumerate zip list tuple dict set map filter sum min max sorted reversed iter"
    " next float int bool str print isinstance getattr setattr hasattr super abs round any all"
    " type repr format open id vars callable exit quit delattr divmod pow frozenset object"
    " slice".split()
)
_CLOCKS = ("time.time", "time.perf_counter", "time.monotonic", "time.process_time")
_UNEQUAL = (cst.NotEqual, cst.IsNot, cst.NotIn)


def spelled(node: cst.CSTNode) -> str:
    """A dotted name as written, "" for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        outer = spelled(node.value)
        return f"{outer}.{node.attr.value}" if outer else ""
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        part = node.slice[0].slice
        if isinstance(part, cst.Index) and isinstance(part.value, cst.SimpleString):
            return f"{spelled(node.value)}.{part.value.raw_value}"
    return ""


class Expressions(Displays):
    """Evaluate expressions to abstract values."""

    def ev(self, node: cst.CSTNode) -> Value:
        """What this expression gives."""
        self.spend()
        handler: Callable[[Any], Value] | None = getattr(self, f"ev_{type(node).__name__}", None)
        if handler is not None:
            return handler(node)
        for child in node.children:
            if isinstance(child, cst.BaseExpression):
                self.ev(child)
        return Unknown()

    def ev_Name(self, node: cst.Name) -> Value:
        name = node.value
        home = self.scope.home(name)
        if home is not None:
            found = home.names[name]
            return found if isinstance(found, Value) else Unknown(name)
        if name in ("True", "False", "None"):
            return Const({"True": True, "False": False, "None": None}[name])
        if name == "__name__":
            return Const("__main__")
        return Lib(f"builtins.{name}") if name in _BUILTINS else Unknown(name)

    def ev_Integer(self, node: cst.Integer) -> Value:
        return Const(node.evaluated_value)

    def ev_Float(self, node: cst.Float) -> Value:
        return Const(node.evaluated_value)

    def ev_SimpleString(self, node: cst.SimpleString) -> Value:
        return Const(node.evaluated_value)

    def ev_ConcatenatedString(self, node: cst.ConcatenatedString) -> Value:
        self.ev(node.left)
        self.ev(node.right)
        return Const(node.evaluated_value) if node.evaluated_value is not None else Const("")

    def ev_FormattedString(self, node: cst.FormattedString) -> Value:
        text, whole = "", True
        for part in node.parts:
            if isinstance(part, cst.FormattedStringText):
                text += part.value
                continue
            if not isinstance(part, cst.FormattedStringExpression):
                continue
            value = self.ev(part.expression)
            self.host_read(part.expression, value, "formatting")
            if isinstance(value, Const):
                text += str(value.value)
            elif isinstance(value, DeviceValue) and not text:
                return value
            else:
                whole = False
        if text.startswith(("cuda", "xpu")) or whole:
            return Const(text)
        return Unknown()

    # -- comprehensions -----------------------------------------------------------------

    # -- operators ----------------------------------------------------------------------

    def ev_BinaryOperation(self, node: cst.BinaryOperation) -> Value:
        left, right = self.ev(node.left), self.ev(node.right)
        return self.binary(node, type(node.operator).__name__, left, right)

    def binary(self, node: cst.CSTNode, name: str, left: Value, right: Value) -> Value:
        """The result of an arithmetic operator."""
        one, other = self.tensor(left), self.tensor(right)
        if one is None and other is None:
            return self._plain_binary(node, name, left, right)
        operands = [("", left), ("", right)]
        strict = name in ("MatrixMultiply", "MatrixMultiplyAssign")
        self.meet(node, "@" if strict else "an operation", operands, strict=strict)
        return self.combine([left, right], node, ndim=SOME if strict else None)

    def _plain_binary(self, node: cst.CSTNode, name: str, left: Value, right: Value) -> Value:
        if isinstance(left, Const) and isinstance(right, Const):
            try:
                if name == "Add":
                    return Const(left.value + right.value)
                if name == "Modulo" and isinstance(left.value, str):
                    return Const(left.value)
                if name == "Multiply" and not isinstance(left.value, str):
                    return Const(left.value * right.value)
            except TypeError:
                return Unknown()
        if isinstance(left, Const) and isinstance(left.value, str) and name in ("Add", "Modulo"):
            return Const(left.value) if left.value.startswith(("cuda", "xpu")) else Unknown()
        if isinstance(left, Seq) and isinstance(right, Seq) and name == "Add":
            if left.items is not None and right.items is not None:
                return Seq(left.kind, [*left.items, *right.items])
            return Seq(left.kind, None, self.join_all(self.elements(left) + self.elements(right)))
        if isinstance(left, Seq) and name == "Multiply":
            return Seq(left.kind, None, self.join_all(self.elements(left)))
        if name == "Subtract" and isinstance(right, Unknown) and right.key in _CLOCKS:
            self.note("elapsed", node, receiver=right, args=(left,))
        if isinstance(left, DeviceValue) and name in ("Add", "Modulo"):
            return left
        graph = any(isinstance(v, Unknown) and v.graph for v in (left, right))
        return Unknown(graph=graph and not self.no_grad())

    def ev_UnaryOperation(self, node: cst.UnaryOperation) -> Value:
        value = self.ev(node.expression)
        if isinstance(node.operator, cst.Not):
            self.host_read(node.expression, value, "a condition")
            if isinstance(value, Guard):
                return Guard(not value.truth, value.sure)
            truth = self.truth(value)
            return Unknown() if truth is None else Const(not truth)
        if isinstance(value, Const) and isinstance(node.operator, cst.Minus):
            return Const(-value.value) if isinstance(value.value, (int, float)) else value
        return value

    def ev_BooleanOperation(self, node: cst.BooleanOperation) -> Value:
        left = self.ev(node.left)
        self.host_read(node.left, left, "a condition")
        both = isinstance(node.operator, cst.And)
        known = self.truth(left)
        if not isinstance(left, Guard) and known is not None and known is not both:
            return left
        right = self.ev(node.right)
        if not isinstance(left, Guard) and known is not None:
            return right
        guards = [v for v in (left, right) if isinstance(v, Guard)]
        if not guards:
            return self.join_all([left, right]) if not both else Unknown()
        if any(g.truth is not both for g in guards):
            return Guard(not both)
        return Guard(both, sure=len(guards) == 2)

    def ev_Comparison(self, node: cst.Comparison) -> Value:
        left = self.ev(node.left)
        result: Value = Unknown()
        for target in node.comparisons:
            right = self.ev(target.comparator)
            result = self._compared(node, left, target.operator, right)
            left = right
        return result if len(node.comparisons) == 1 else Unknown()

    def _compared(self, node: cst.CSTNode, left: Value, operator: Any, right: Value) -> Value:
        negative = isinstance(operator, _UNEQUAL)
        if isinstance(operator, (cst.Is, cst.IsNot)):
            for value, other in ((left, right), (right, left)):
                if isinstance(value, Const) and value.value is None:
                    if isinstance(other, Unknown):
                        return Unknown()
                    same = isinstance(other, Const) and other.value is None
                    return Const(same is not negative)
            return Unknown()
        for value, other in ((left, right), (right, left)):
            if (
                isinstance(value, DeviceValue)
                and isinstance(other, Const)
                and isinstance(other.value, str)
            ):
                if value.place == "dev":
                    hit = "cuda" in other.value
                    if other.value.startswith("cpu") or "cuda" in other.value or value.fallback:
                        return Guard(hit is not negative)
                elif value.place == "cpu":
                    return Const(other.value.startswith("cpu") is not negative)
                return Unknown()
        if self.tensor(left) is not None or self.tensor(right) is not None:
            if isinstance(operator, (cst.In, cst.NotIn)):
                return Unknown()
            self.meet(node, "a comparison", [("", left), ("", right)], strict=False)
            return self.combine([left, right], node).but(graph=False)
        if (
            isinstance(left, Const)
            and isinstance(right, Const)
            and isinstance(operator, (cst.Equal, cst.NotEqual))
        ):
            return Const((left.value == right.value) is not negative)
        if isinstance(left, Lib) and left.path == "sys.platform":
            return Unknown()
        return Unknown()

    def ev_IfExp(self, node: cst.IfExp) -> Value:
        test = self.ev(node.test)
        self.host_read(node.test, test, "a condition")
        if isinstance(test, Guard):
            with self.within("guard", node, test=node.test):
                taken = self.ev(node.body if test.truth else node.orelse)
            other = node.orelse if test.truth else node.body
            opposite = isinstance(other, cst.Name) and other.value in ("True", "False")
            if isinstance(taken, Const) and isinstance(taken.value, bool) and opposite:
                return Guard(taken.value, test.sure)
            if (
                isinstance(taken, Const)
                and isinstance(taken.value, str)
                and taken.value.startswith("cuda")
            ):
                return DeviceValue("dev", fallback=True, node=node)
            if isinstance(taken, DeviceValue):
                return DeviceValue(taken.place, fallback=True, node=node)
            return taken
        truth = self.truth(test)
        if truth is not None:
            return self.ev(node.body if truth else node.orelse)
        with self.within("if", node, test=node.test):
            return self.join_all([self.ev(node.body), self.ev(node.orelse)])

    def truth(self, value: Value) -> bool | None:
        """Whether a condition holds, None when both may be."""
        if isinstance(value, Guard):
            return value.truth
        if isinstance(value, Const):
            return bool(value.value)
        if isinstance(value, (Module, Optimizer, Function, Loader, Lib)):
            return True if not isinstance(value, Lib) else None
        return None

    # -- the rest -----------------------------------------------------------------------

    def ev_Subscript(self, node: cst.Subscript) -> Value:
        value = self.ev(node.value)
        return self.subscript(node, value, self.index_of(node))

    def index_of(self, node: cst.Subscript) -> list[Value | None]:
        """The parts of an index; None for a slice."""
        parts: list[Value | None] = []
        for element in node.slice:
            part = element.slice
            if isinstance(part, cst.Index):
                found = self.ev(part.value)
                if (
                    isinstance(found, Seq)
                    and found.kind == "tuple"
                    and found.items is not None
                    and len(node.slice) == 1
                ):
                    parts += found.items
                else:
                    parts.append(found)
            elif isinstance(part, cst.Slice):
                for bound in (part.lower, part.upper, part.step):
                    if bound is not None:
                        self.ev(bound)
                parts.append(None)
        return parts

    def ev_Lambda(self, node: cst.Lambda) -> Value:
        return Function(node, self.scope, "<lambda>")

    def ev_NamedExpr(self, node: cst.NamedExpr) -> Value:
        value = self.ev(node.value)
        self.assign(node.target, value, node)
        return value

    def ev_Yield(self, node: cst.Yield) -> Value:
        inner = node.value
        if isinstance(inner, cst.From):
            source = self.ev(inner.item)
            self.frames[-1].yields.append(self.item_of(source, node))
        else:
            self.frames[-1].yields.append(Const(None) if inner is None else self.ev(inner))
        return Unknown()

    def ev_Await(self, node: cst.Await) -> Value:
        return self.ev(node.expression)

    def ev_Attribute(self, node: cst.Attribute) -> Value:
        return self.attribute(node, self.ev(node.value), node.attr.value)

    def ev_Call(self, node: cst.Call) -> Value:
        if isinstance(node.func, cst.Attribute):
            receiver = self.ev(node.func.value)
            args, kwargs, loose = self.arguments(node)
            return self.call_attribute(node, receiver, node.func.attr.value, args, kwargs, loose)
        func = self.ev(node.func)
        args, kwargs, loose = self.arguments(node)
        return self.call(node, func, args, kwargs, loose)

    def arguments(self, node: cst.Call) -> tuple[list[Value], dict[str, Value], bool]:
        """Positional and named arguments, and whether there may be more than these."""
        args: list[Value] = []
        kwargs: dict[str, Value] = {}
        loose = False
        for arg in node.args:
            value = self.ev(arg.value)
            if arg.star == "*":
                if isinstance(value, Seq) and value.items is not None:
                    args += value.items
                else:
                    args.append(self.item_of(value, arg))
                    loose = True
            elif arg.star == "**":
                if isinstance(value, Dict):
                    kwargs.update({k: v for k, v in value.known().items() if isinstance(k, str)})
                    loose = loose or value.fields["elem"] is not None
                else:
                    loose = True
            elif arg.keyword is not None:
                kwargs[arg.keyword.value] = value
            else:
                args.append(value)
        return args, kwargs, loose


__all__ = ["Expressions", "Instance", "Tensor", "spelled"]
