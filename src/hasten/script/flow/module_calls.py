"""What calling a module gives, and what it must not be given."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.facts import Mix
from hasten.script.flow.modules import PLACE, Modules
from hasten.script.flow.values import (
    SOME,
    Dict,
    Function,
    Module,
    Seq,
    Tensor,
    Unknown,
    Value,
)


class ModuleCalls(Modules):
    """Model calls of modules."""

    def call_module(
        self, node: cst.CSTNode, module: Module, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """`module(...)`."""
        self.note("module-call", node, receiver=module, args=tuple(args), kwargs=kwargs,
                  data={"place": self.place_of(module), **self.mode_of(module)})  # fmt: skip
        if module.cls is not None:
            forward = module.cls.find("forward") or module.cls.find("__call__")
            if isinstance(forward, Function):
                return self.call_function(node, forward.bind(module), args, kwargs)
        if "wraps" in module.extra:
            return self._parallel(node, module, args, kwargs)
        name = module.lib.rsplit(".", 1)[-1]
        if name == "Sequential":
            return self._sequential(node, module, args, kwargs)
        if module.lib.startswith("torch.nn.") and name in tables.LOSSES:
            return self._loss(node, module, args, kwargs)
        inputs = [*args, *kwargs.values()]
        flat = self.flat(inputs)
        place = self.place_of(module)
        if place is not None:
            self._meet_module(node, module, place, flat)
        graph = not self.no_grad() and (place is not None or any(t.graph for t in flat))
        out_place = place or next((t.place for t in flat if t.place is not None), None)
        if any(t.place == "dev" for t in flat):
            out_place = "dev"  # a mismatch was reported; go on as if it were mended
        ndim: int | None = SOME
        if name in tables.SAME_NDIM and flat and flat[0].ndim is not None:
            ndim = flat[0].ndim
        if place is None and not module.lib.startswith("torch.nn."):
            return Unknown("output", graph=graph)
        origin = next((t.origin for t in flat if t.place == "cpu"), None)
        if place == "cpu" and not flat:  # it lies there because the module does
            origin = module.origin
        out = Tensor(out_place, ndim, graph, origin if out_place == "cpu" else None)
        if name == "LSTM":
            return Seq("tuple", [out, Seq("tuple", [out, out])])
        if name in ("GRU", "RNN", "LSTMCell", "MultiheadAttention"):
            return Seq("tuple", [out, out])
        if module.lib.startswith("torch.nn."):
            return out
        return Unknown("output", place="dev" if out_place == "dev" else None, graph=graph)

    def mode_of(self, module: Module) -> dict[str, Any]:
        """Whether it is in training mode, and whether that makes a difference to it."""
        tree = self.tree(module)
        named = [m for m in tree if m.lib.rsplit(".", 1)[-1] in tables.TRAIN_MODE]
        modes = {m.extra.get("mode", {}).get("training", "unset") for m in named}
        return {"mode": modes.pop() if len(modes) == 1 else None, "sensitive": bool(named),
                "layer": named[0].lib.rsplit(".", 1)[-1] if named else ""}  # fmt: skip

    def _meet_module(
        self, node: cst.CSTNode, module: Module, place: Any, flat: list[Tensor]
    ) -> None:
        there = next((t for t in flat if t.place == "dev"), None)
        if place == "cpu" and there is not None:
            seen = self.note("mix", node, name="a module")
            own = Tensor("cpu", SOME, origin=module.origin, registered=True)
            self.facts.mixes.append(Mix(seen, own, there, "a module", "module", module))
        if place == "dev":
            dev = Tensor("dev", SOME, registered=True)
            for tensor in flat:
                if tensor.place == "cpu" and tensor.ndim != 0:
                    seen = self.note("mix", node, name="a module")
                    self.facts.mixes.append(Mix(seen, tensor, dev, "a module", "input", module))

    def _parallel(
        self, node: cst.CSTNode, module: Module, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        inner = module.extra["wraps"]
        if not isinstance(inner, Module):
            return Unknown("output", graph=True)
        place = self.place_of(inner)
        if place == "dev":  # it scatters its inputs over the devices by itself
            args = [self.placed(a, "dev") for a in args]
            kwargs = {k: self.placed(v, "dev") for k, v in kwargs.items()}
        return self.call_module(node, inner, args, kwargs)

    def placed(self, value: Value, place: Any) -> Value:
        """The same, its tensors moved."""
        tensor = self.tensor(value)
        if tensor is not None:
            return tensor.but(place=place, pending=None)
        if isinstance(value, Seq):
            items = value.items
            elem = value.fields["elem"]
            return Seq(
                value.kind,
                None if items is None else [self.placed(v, place) for v in items],
                None if elem is None else self.placed(elem, place),
                origin=value.origin,
            )
        if isinstance(value, Dict):
            elem = value.fields["elem"]
            known = {k: self.placed(v, place) for k, v in value.known().items()}
            return Dict(known, None if elem is None else self.placed(elem, place))
        return value

    def _sequential(
        self, node: cst.CSTNode, module: Module, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        value: Value = args[0] if args else Unknown()
        for key, child in list(module.fields.items()):
            if key == PLACE:
                continue
            if isinstance(child, Module):
                value = self.call_module(node, child, [value], {})
            elif isinstance(child, Value):
                value = self.call(node, child, [value], {}, False)
        return value

    def _loss(
        self, node: cst.CSTNode, module: Module, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        operands = [
            ("target" if i else "input", v) for i, v in enumerate([*args, *kwargs.values()])
        ]
        strict = module.lib.endswith(("CrossEntropyLoss", "NLLLoss", "CTCLoss"))
        if not module.lib.endswith("CTCLoss"):
            self.meet(node, "the loss", operands, strict=strict)
        tensors = [t for t in (self.tensor(v) for _, v in operands) if t is not None]
        there = next((t for t in tensors if t.place == "dev"), None)
        for key in tables.WEIGHTED:
            weight = self.tensor(module.fields.get(key))
            if (
                weight is not None
                and weight.place == "cpu"
                and there is not None
                and weight.ndim != 0
            ):
                seen = self.note("mix", node, name="the loss")
                self.facts.mixes.append(Mix(seen, weight, there, "the loss", "weight", module))
        return self.combine([v for _, v in operands], node).but(ndim=0)
