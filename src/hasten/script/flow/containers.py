"""Methods of lists, dicts, optimizers, scalers, loaders and of what is not known."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.script.flow.loading import Loading
from hasten.script.flow.values import (
    Const,
    DeviceValue,
    Dict,
    Function,
    Instance,
    Loader,
    Module,
    Optimizer,
    Scaler,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)


class Containers(Loading):
    """Model what holds other values."""

    def seq_method(
        self, node: cst.CSTNode, seq: Seq, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A method of a list, tuple, set or iterator."""
        if name in ("append", "appendleft", "add", "insert") and args:
            value = args[-1]
            self.note("keep", node, name=name, receiver=seq, args=(value,))
            if seq.items is not None and not self.loops() and name == "append":
                self.put(seq.fields, "items", [*seq.items, value])
            else:
                self.put(seq.fields, "elem", self.join_all([*self.elements(seq), value]))
                self.put(seq.fields, "items", None)
            return Const(None)
        if name in ("extend", "update") and args:
            item = self.item_of(args[0], node)
            self.note("keep", node, name=name, receiver=seq, args=(item,))
            self.put(seq.fields, "elem", self.join_all([*self.elements(seq), item]))
            self.put(seq.fields, "items", None)
            return Const(None)
        if name in ("clear",):
            self._cleared(seq)
            self.put(seq.fields, "items", None)
            return Const(None)
        if name in ("pop", "popleft", "next"):
            if name != "next":
                self._cleared(seq)
            return self.item_of(seq, node)
        if name in ("copy", "__iter__"):
            return Seq(seq.kind, seq.items, seq.fields["elem"], origin=seq.origin)
        if name == "to":
            return seq
        return Unknown(name)

    def _cleared(self, value: Value) -> None:
        value.extra["cleared"] = True  # type: ignore[attr-defined]

    def dict_method(
        self, node: cst.CSTNode, value: Dict, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A method of a dict."""
        if name == "items":
            known = value.known()
            if known and value.fields["elem"] is None and len(known) <= 6:
                return Seq("iter", [Seq("tuple", [Const(k), v]) for k, v in known.items()])
            return Seq(
                "iter",
                None,
                Seq("tuple", [Unknown("key"), self.join_all(value.values() or [Unknown()])]),
            )
        if name == "values":
            return Seq("iter", None, self.join_all(value.values() or [Unknown()]))
        if name == "keys":
            return Seq("iter", [Const(k) for k in value.known()] or None, Unknown("key"))
        if name in ("get", "pop", "setdefault") and args:
            if name == "pop":
                self._cleared(value)
            if (
                isinstance(args[0], Const)
                and (found := value.fields.get(("items", args[0].value))) is not None
            ):
                return found  # type: ignore[no-any-return]
            if name == "setdefault" and len(args) > 1:
                self.set_item(node, value, [args[0]], args[1])
            elem = value.fields["elem"]
            if elem is not None:
                return elem  # type: ignore[no-any-return]
            return args[1] if len(args) > 1 else Unknown()
        if name == "update":
            for key, item in kwargs.items():
                self.put(value.fields, ("items", key), item)
            if args and isinstance(args[0], Dict):
                for key, item in args[0].known().items():
                    self.put(value.fields, ("items", key), item)
                if args[0].fields["elem"] is not None:
                    self.put(value.fields, "elem", args[0].fields["elem"])
            elif args:
                self.put(value.fields, "elem", Unknown())
            return Const(None)
        if name == "clear":
            self._cleared(value)
            return Const(None)
        if name == "copy":
            return Dict(dict(value.known()), value.fields["elem"], origin=value.origin)
        return Unknown(name)

    # -- training -----------------------------------------------------------------------

    def optimizer_method(
        self,
        node: cst.CSTNode,
        optimizer: Optimizer,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of an optimizer."""
        if name == "step":
            self.optimizer_step(node, optimizer)
            closure = args[0] if args else kwargs.get("closure")
            return (
                self.call(node, closure, [], {}, False)
                if isinstance(closure, Function)
                else Const(None)
            )
        if name == "zero_grad":
            self.note("zero-grad", node, receiver=optimizer)
        if name == "load_state_dict":
            places = {m: self.place_of(m) for m in optimizer.extra.get("modules", [])}
            self.note("optimizer-load", node, receiver=optimizer, data={"places": places})
        if name == "state_dict":
            return Dict({}, Unknown(), origin=self.origin("state", node, owner=optimizer))
        if name == "param_groups":
            return Unknown()
        return Unknown(name)

    def optimizer_step(self, node: cst.CSTNode, optimizer: Value) -> None:
        """An optimizer steps here."""
        for loop in self.loops():
            loop.has_step = True
        self.note("step", node, receiver=optimizer)

    def scaler_method(
        self,
        node: cst.CSTNode,
        scaler: Scaler,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of a gradient scaler."""
        self.note("scaler", node, name=name, receiver=scaler, args=tuple(args))
        if name == "scale" and args:
            return args[0]
        if name == "step" and args:
            self.optimizer_step(node, args[0])
        if name == "state_dict":
            return Dict({}, Unknown(), origin=self.origin("state", node, owner=scaler))
        return Unknown(name)

    def thing_method(
        self,
        node: cst.CSTNode,
        thing: Thing,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of some other library object."""
        if thing.lib == "argparse":
            if name == "parse_args":
                made = Instance(None, origin=self.origin("other", node))
                made.fields.update(thing.extra.get("options", {}))
                return made
            if name == "parse_known_args":
                return Seq(
                    "tuple", [self.thing_method(node, thing, "parse_args", args, kwargs), Unknown()]
                )
            if name == "add_argument":
                self._option(thing, args, kwargs)
            if name in ("add_argument_group", "add_mutually_exclusive_group"):
                return thing
            return Unknown(name)
        if thing.lib == "distribution":
            place = thing.extra.get("place")
            graph = bool(thing.extra.get("graph")) and not self.no_grad()
            if name in ("sample", "rsample", "log_prob", "entropy"):
                self._meet_distribution(node, thing, name, args)
                return Tensor(place, None, graph and name != "sample")
        if thing.lib == "logger":
            return Const(None)
        return Unknown(name)

    def _meet_distribution(
        self, node: cst.CSTNode, thing: Thing, name: str, args: list[Value]
    ) -> None:
        own = Tensor(thing.extra.get("place"), -1)
        self.meet(node, f"{name}(...)", [("", own), *[("", a) for a in args]], strict=False)

    def _option(self, parser: Thing, args: list[Value], kwargs: dict[str, Value]) -> None:
        names = [a.value for a in args if isinstance(a, Const) and isinstance(a.value, str)]
        long = next((n for n in names if n.startswith("--")), names[0] if names else "")
        dest = kwargs.get("dest")
        key = dest.value if isinstance(dest, Const) else long.lstrip("-").replace("-", "_")
        default = kwargs.get("default")
        options = parser.extra.setdefault("options", {})
        if isinstance(default, DeviceValue):
            options[key] = default
        else:
            options[key] = Unknown(f"args.{key}")

    def loader_method(
        self,
        node: cst.CSTNode,
        loader: Loader,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of a loader."""
        return self.batch(loader, node) if name in ("__next__", "next") else Unknown(name)

    def const_method(
        self,
        node: cst.CSTNode,
        value: Value,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of a string or number."""
        if isinstance(value, Const) and isinstance(value.value, str):
            if name == "format":
                for arg, given in zip(args, getattr(node, "args", ()), strict=False):
                    self.host_read(given, arg, "formatting")
                if value.value.startswith(("cuda", "xpu")):
                    return Const(value.value)
            if name == "startswith":
                return Unknown()
        if (
            isinstance(value, DeviceValue)
            and name == "startswith"
            and args
            and isinstance(args[0], Const)
        ):
            return self._compared(node, value, cst.Equal(), args[0])
        return Unknown(name)

    # -- what is not known --------------------------------------------------------------

    def instance_method(
        self,
        node: cst.CSTNode,
        value: Instance,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method that an object of the script has from a library, or from nowhere known."""
        if value.extra.get("optimizer"):
            if name == "step":
                self.optimizer_step(node, value)
            return Const(None)
        return self.unknown_method(node, Unknown(self.cls_key(value, "self")), name, args, kwargs)

    def unknown_method(
        self,
        node: cst.CSTNode,
        receiver: Value,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of something unknown."""
        known = receiver if isinstance(receiver, Unknown) else Unknown()
        if name == "backward":
            if "accelerator" in known.key or "fabric" in known.key:
                self.note("managed", node, name=known.key)
            self.note_backward(node, args[0] if args else known, known)
            return Const(None)
        if name in ("to", "cuda", "cpu"):
            return self._unknown_move(node, known, name, args, kwargs)
        if name == "step" and "sched" not in known.key.lower():
            self.optimizer_step(
                node, args[0] if args and isinstance(args[0], (Optimizer, Unknown)) else known
            )
            if args and isinstance(args[0], Function):
                self.call(node, args[0], [], {}, False)
            return Const(None)
        if name == "zero_grad":
            self.note("zero-grad", node, receiver=known)
            return Const(None)
        if name in ("item", "tolist", "numpy") and known.place == "dev":
            self.host_read(node, Tensor("dev", None, known.graph), f".{name}()")
            return Unknown()
        if name in ("detach", "item", "tolist", "numpy", "argmax"):
            return Unknown(known.key, known.place)
        if name in ("train", "eval"):
            self.note("mode", node, name=name, receiver=known)
            return known
        if name == "unscale_":
            self.note("scaler", node, name=name, receiver=known, args=tuple(args))
        self.escape(node, [*args, *kwargs.values()])
        graph = known.graph and not self.no_grad()
        return Unknown("", place=None, graph=graph)

    def _unknown_move(
        self,
        node: cst.CSTNode,
        known: Unknown,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        target: Any = kwargs.get("device") or (args[0] if args else None)
        place: Any = "cpu" if name == "cpu" else "dev"
        if name == "to":
            tensor = self.tensor(target)
            place = tensor.place if tensor is not None else self.device_place(target)
        for module in known.options:
            self.move_module(node, module, place)
        if place is None and name == "to":
            return Unknown(known.key, known.place, known.origin, graph=known.graph)
        self.note("unknown-move", node, name=name, receiver=known, kwargs=kwargs,
                  data={"to": place, "from": known.place})  # fmt: skip
        return Unknown(known.key, place, known.origin, graph=known.graph, options=known.options)


__all__ = ["Containers", "Module"]
