"""Modules: what they hold, where they lie, how they move, and what calling them gives."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.expressions import Expressions
from hasten.script.flow.joining import place_of_name
from hasten.script.flow.values import (
    Const,
    DeviceValue,
    Dict,
    Function,
    Guard,
    Instance,
    Module,
    ParameterOf,
    Seq,
    Tensor,
    Unknown,
    Value,
)

PLACE = "#place"  # of a library module's own parameters
_PAIRS = {"LSTM": 2, "GRU": 1, "RNN": 1}


class Modules(Expressions):
    """Model `nn.Module`s of the library and of the script."""

    def device_place(self, value: Value | None) -> Any:
        """The place that a device argument names."""
        if isinstance(value, DeviceValue):
            return value.place
        if isinstance(value, Const):
            if isinstance(value.value, str):
                return place_of_name(value.value)
            if isinstance(value.value, int) and not isinstance(value.value, bool):
                return "dev"
        if isinstance(value, Unknown):
            last = value.key.rsplit(".", 1)[-1].lower()
            if last in (
                "device",
                "dev",
                "gpu",
                "gpu_id",
                "rank",
                "local_rank",
                "cuda",
                "torch_device",
            ):
                return "dev"
        return None

    def children(self, module: Module) -> list[Value]:
        """The modules registered in it, one level down."""
        found: list[Value] = [v for k, v in module.fields.items() if isinstance(v, Module)]
        if "wraps" in module.extra:
            found.append(module.extra["wraps"])
        return found

    def tree(self, module: Module) -> list[Module]:
        """It and all modules registered below it."""
        found: list[Module] = []
        todo = [module]
        while todo:
            one = todo.pop()
            if one not in found:
                found.append(one)
                todo += [c for c in self.children(one) if isinstance(c, Module)]
        return found

    def place_of(self, value: Value) -> Any:
        """Where its parameters lie: one place, or None when mixed, unknown or without any."""
        if not isinstance(value, Module):
            return None
        places = set()
        for module in self.tree(value):
            if PLACE in module.fields:
                places.add(module.fields[PLACE])
            for found in module.fields.values():
                if isinstance(found, Tensor) and found.registered:
                    places.add(found.place)
        return places.pop() if len(places) == 1 else None

    def move_module(
        self, node: cst.CSTNode, module: Module, place: Any, inside: bool = False
    ) -> None:
        """Move parameters, buffers and registered modules, in place."""
        if not inside:
            self.note(
                "move", node, receiver=module, data={"place": place, "from": self.place_of(module)}
            )
        for one in self.tree(module):
            own = one.cls.find("_apply") if one.cls is not None else None
            if own is not None:
                for key, found in list(one.fields.items()):
                    if isinstance(found, Tensor):
                        self.put(one.fields, key, found.but(place=None))
            if PLACE in one.fields:
                self.put(one.fields, PLACE, place)
            moved = one.extra.setdefault("moved", {})
            self.put(moved, place, node)
            for key, found in list(one.fields.items()):
                if isinstance(found, Tensor) and found.registered:
                    self.put(one.fields, key, found.but(place=place))

    def new_module(
        self, node: cst.CSTNode, lib: str, args: list[Value], kwargs: dict[str, Value], loose: bool
    ) -> Value:
        """A module of `torch.nn`."""
        name = lib.rsplit(".", 1)[-1]
        module = Module(lib, origin=self.origin("module", node))
        place = self.device_place(kwargs["device"]) if "device" in kwargs else self.default_place
        if name in tables.WITH_PARAMETERS:
            self.put(module.fields, PLACE, place)
        if lib in tables.PARALLEL:
            module.extra["wraps"] = args[0] if args else kwargs.get("module", Unknown())
            self.note("parallel", node, name=lib, receiver=module, args=tuple(args), kwargs=kwargs)
            if isinstance(module.extra["wraps"], Module):
                return module
            return Unknown("model", place=getattr(module.extra["wraps"], "place", None), graph=True)
        if name in tables.CONTAINERS:
            self._fill(module, args, loose)
        if name in tables.LOSSES:
            for key in tables.WEIGHTED:
                given = kwargs.get(key) or (
                    args[0] if key == "weight" and args and name != "KLDivLoss" else None
                )
                tensor = self.tensor(given)
                if tensor is not None:
                    self.put(module.fields, key, tensor.but(registered=True))
        return module

    def _fill(self, module: Module, args: list[Value], loose: bool) -> None:
        found = args
        if len(args) == 1 and isinstance(args[0], Seq):
            items = args[0].items
            found = items if items is not None else []
            if items is None and args[0].fields["elem"] is not None:
                self.put(module.fields, "*", args[0].fields["elem"])
        elif len(args) == 1 and isinstance(args[0], Dict):
            for key, value in args[0].known().items():
                self.put(module.fields, str(key), value)
            if args[0].fields["elem"] is not None:
                self.put(module.fields, "*", args[0].fields["elem"])
            return
        for index, value in enumerate(found):
            if isinstance(value, Seq) and value.items is not None and len(value.items) == 2:
                value = value.items[1]  # OrderedDict's pairs
            self.put(module.fields, "*" if loose and index == len(found) - 1 else str(index), value)

    # -- calling ------------------------------------------------------------------------

    def flat(self, values: list[Value]) -> list[Tensor]:
        """All tensors in these, through tuples, lists and dicts."""
        found: list[Tensor] = []
        todo = list(values)
        while todo:
            value = todo.pop(0)
            tensor = self.tensor(value)
            if tensor is not None:
                found.append(tensor)
            elif isinstance(value, Seq):
                todo += self.elements(value)
            elif isinstance(value, Dict):
                todo += value.values()
        return found

    # -- methods ------------------------------------------------------------------------

    def module_method(
        self,
        node: cst.CSTNode,
        module: Module,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method that every `nn.Module` has."""
        if name in ("to", "cuda", "cpu", "xpu", "to_empty"):
            target = kwargs.get("device") or (args[0] if args else None)
            if name == "to" or name == "to_empty":
                tensor = self.tensor(target)
                place = tensor.place if tensor is not None else self.device_place(target)
                if place is None and (target is None or _is_dtype(target)):
                    return module
            else:
                place = "cpu" if name == "cpu" else "dev"
            self.move_module(node, module, place)
            return module
        if name in ("parameters", "buffers"):
            return Seq(
                "iter",
                None,
                ParameterOf(module),
                origin=self.origin("parameter", node, owner=module),
            )
        if name in ("named_parameters", "named_buffers"):
            return Seq("iter", None, Seq("tuple", [Unknown("name"), ParameterOf(module)]))
        if name == "state_dict":
            return Dict({}, ParameterOf(module), origin=self.origin("state", node, owner=module))
        if name in ("children", "modules", "values"):
            return Seq("iter", None, self.join_all(self.children(module) or [Unknown()]))
        if name in ("named_children", "named_modules", "items"):
            return Seq(
                "iter",
                None,
                Seq(
                    "tuple", [Unknown("name"), self.join_all(self.children(module) or [Unknown()])]
                ),
            )
        if name in ("register_buffer", "register_parameter") and args:
            value = (
                args[1] if len(args) > 1 else kwargs.get("tensor", kwargs.get("param", Const(None)))
            )
            tensor = self.tensor(value)
            if isinstance(args[0], Const):
                self.put(
                    module.fields,
                    args[0].value,
                    tensor.but(registered=True) if tensor is not None else value,
                )
            return Const(None)
        if name in ("add_module", "register_module") and len(args) > 1:
            self.put(module.fields, args[0].value if isinstance(args[0], Const) else "*", args[1])
            return Const(None)
        if name in ("append", "insert", "extend") and args:
            value = args[-1]
            if name == "extend":
                value = self.item_of(value, node)
            count = sum(1 for k in module.fields if isinstance(k, str) and k.isdigit())
            key = str(count) if not self.loops() else "*"
            self.put(module.fields, key, value)
            return module
        if name == "train" or name == "eval":
            training = name == "train" and not (
                args and isinstance(args[0], Const) and args[0].value is False
            )
            for one in self.tree(module):
                self.put(
                    one.extra.setdefault("mode", {}), "training", "train" if training else "eval"
                )
            self.note("mode", node, name="train" if training else "eval", receiver=module)
            return module
        if name == "forward":
            return self.call_module(node, module, args, kwargs)
        if name in (
            "requires_grad_",
            "half",
            "float",
            "double",
            "bfloat16",
            "apply",
            "share_memory",
            "compile",
            "zero_grad",
            "type",
        ):
            if name == "apply" and args and isinstance(args[0], Function):
                for one in self.tree(module)[:6]:
                    self.call(node, args[0], [one], {}, False)
            return module if name != "zero_grad" else Const(None)
        if name == "load_state_dict":
            return Unknown("keys")
        if module.cls is None and not module.lib.startswith("torch.nn."):
            self.note("module-call", node, receiver=module, args=tuple(args), kwargs=kwargs)
            return Unknown("output", graph=not self.no_grad())
        return Unknown(name)

    # -- what other floors of the flow give ---------------------------------------------


def _is_dtype(value: Value) -> bool:
    if isinstance(value, Guard):
        return True
    path = getattr(value, "path", "")
    return str(path).startswith("torch.") or (isinstance(value, Unknown) and "type" in value.key)


__all__ = ["PLACE", "Instance", "Modules"]
