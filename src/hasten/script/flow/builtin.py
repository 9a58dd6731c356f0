"""Built-in functions."""

from __future__ import annotations

import libcst as cst

from hasten.script.flow.calls import Calls
from hasten.script.flow.values import (
    Const,
    DeviceValue,
    Dict,
    Instance,
    Lib,
    Loader,
    Module,
    ParameterOf,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)


class Builtins(Calls):
    """Model built-in functions."""

    def builtin(
        self, node: cst.CSTNode, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A built-in function."""
        given = list(getattr(node, "args", ()))
        first = args[0] if args else Unknown()
        if name in ("enumerate",):
            return Seq("iter", None, Seq("tuple", [Unknown("i"), self.item_of(first, node)]))
        if name == "zip":
            known = [a.items for a in args if isinstance(a, Seq)]
            sizes = {len(k) for k in known if k is not None}
            if (
                known
                and len(known) == len(args)
                and None not in known
                and len(sizes) == 1
                and sizes.pop() <= 6
            ):
                rows = zip(*[k for k in known if k is not None], strict=True)
                return Seq("iter", [Seq("tuple", list(row)) for row in rows])
            return Seq("iter", None, Seq("tuple", [self.item_of(a, node) for a in args]))
        if name in ("list", "tuple", "set", "frozenset", "sorted", "reversed", "iter"):
            return self._as_sequence(node, name, first, bool(args))
        if name == "next":
            if (
                isinstance(first, Seq)
                and first.kind == "iter"
                and isinstance(first.extra.get("loader"), Loader)
            ):
                return self.batch(first.extra["loader"], node)
            return self.item_of(first, node)
        if name == "dict":
            return (
                Dict(dict(kwargs), None, origin=self.origin("other", node))
                if not args or not isinstance(first, Dict)
                else self.dict_method(node, first, "copy", [], {})
            )
        if name == "map" and len(args) > 1:
            result = self.call(node, first, [self.item_of(a, node) for a in args[1:]], {}, False)
            return Seq("iter", None, result)
        if name == "filter" and len(args) > 1:
            return Seq("iter", None, self.item_of(args[1], node))
        if name in ("float", "int", "bool", "str", "repr", "format", "round"):
            if isinstance(first, DeviceValue) and name == "str":
                return first
            part = given[0] if given else node
            if (tensor := self.tensor(first)) is not None and tensor.pending is not None:
                self.note("early", node, name=name, receiver=tensor, data={"move": tensor.pending})
            self.host_read(part, first, f"{name}(...)")
            return Unknown("number")
        if name in ("print",):
            for part, value in zip(given, args, strict=False):
                if (tensor := self.tensor(value)) is not None and tensor.pending is not None:
                    self.note(
                        "early", node, name=name, receiver=tensor, data={"move": tensor.pending}
                    )
                self.host_read(part, value, "print(...)")
            return Const(None)
        if name in ("sum", "min", "max"):
            return self._reduce(node, name, args, kwargs)
        if name == "range":
            whole = Seq("iter", None, Unknown("i"))
            bounds = [a.value for a in args if isinstance(a, Const) and isinstance(a.value, int)]
            if len(bounds) == len(args) and args:
                whole.extra["rounds"] = len(range(*bounds)) if len(bounds) < 3 or bounds[2] else 0
            return whole
        if (
            name == "getattr"
            and len(args) > 1
            and isinstance(args[1], Const)
            and isinstance(args[1].value, str)
        ):
            return self.attribute(node, first, args[1].value)
        if name == "setattr" and len(args) > 2:
            if isinstance(args[1], Const) and isinstance(args[1].value, str):
                self.store(node, first, args[1].value, args[2], node)
            elif isinstance(first, Module) and isinstance(args[2], Module):
                self.put(first.fields, "*", args[2])
            return Const(None)
        if name == "super":
            home = self.scope.home("self")
            return self._super(home.names["self"]) if home is not None else Unknown()
        if name == "vars":
            return Unknown()
        if name in ("isinstance", "hasattr") and len(args) > 1:
            return self._is(name, first, args[1])
        if name == "len":
            return Unknown("n")
        if name == "abs" and self.tensor(first) is not None:
            return first
        return Unknown(name)

    def _is(self, name: str, value: Value, kind: Value) -> Value:
        """`isinstance(value, kind)` or `hasattr(value, "to")`, where both are known."""
        if name == "hasattr":
            asked = kind.value if isinstance(kind, Const) else None
            if asked == "to" and isinstance(value, (Tensor, ParameterOf, Module)):
                return Const(True)
            return Const(False) if asked == "to" and isinstance(value, (Seq, Dict)) else Unknown()
        kinds = self.elements(kind) if isinstance(kind, Seq) else [kind]
        paths = {k.path.rsplit(".", 1)[-1] for k in kinds if isinstance(k, Lib)}
        if len(paths) != len(kinds):
            if isinstance(value, (Module, Instance)) and value.cls in kinds:
                return Const(True)
            return Unknown()
        own: set[str] = set()
        if isinstance(value, (Tensor, ParameterOf)):
            own = {"Tensor", "Parameter"} if getattr(value, "registered", True) else {"Tensor"}
        elif isinstance(value, Dict):
            own = {"dict", "Mapping", "MutableMapping", "OrderedDict"}
        elif isinstance(value, Seq):
            own = {value.kind, "Sequence", "Iterable"}
        elif isinstance(value, Const) and isinstance(value.value, (str, int, float)):
            own = {type(value.value).__name__}
        elif isinstance(value, Module):
            names = value.cls.libraries() if value.cls is not None else {value.lib}
            own = {n.rsplit(".", 1)[-1] for n in names} | {"Module"}
            if not paths & own:
                return Unknown()
        else:
            return Unknown()
        return Const(bool(paths & own))

    def _super(self, value: Value) -> Value:
        if isinstance(value, (Module, Instance)) and value.cls is not None:
            inside = next(
                (
                    f.function
                    for f in reversed(self.frames)
                    if f.function is not None and f.function.owner is not None
                ),
                None,
            )
            return Thing("super", (value, inside.owner if inside and inside.owner else value.cls))
        return Unknown()

    def _as_sequence(self, node: cst.CSTNode, name: str, first: Value, given: bool) -> Value:
        kind = (
            "iter" if name in ("iter", "reversed") else name if name in ("tuple", "set") else "list"
        )
        origin = self.origin("other", node)
        if not given:
            return Seq(kind, [], origin=origin)
        if isinstance(first, Seq):
            return Seq(kind, first.items, first.fields["elem"], origin=origin)
        if isinstance(first, Loader):
            made = Seq(kind, None, self.batch(first, node), origin=origin)
            made.extra["loader"] = first
            return made
        return Seq(kind, None, self.item_of(first, node), origin=origin)

    def _reduce(
        self, node: cst.CSTNode, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        values = self.elements(args[0]) if len(args) == 1 else args
        tensors = [v for v in values if self.tensor(v) is not None]
        if tensors:
            if name != "sum" and not self.no_grad():
                self.host_read(node, tensors[0], f"{name}(...)")
            return self.combine(list(values), node)
        graph = any(isinstance(v, Unknown) and v.graph for v in values)
        return Unknown("number", graph=graph)
