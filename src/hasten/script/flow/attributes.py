"""Attributes, items and what operations on tensors give."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.facts import Mix
from hasten.script.flow.joining import join
from hasten.script.flow.state import State
from hasten.script.flow.values import (
    SOME,
    ClassValue,
    Const,
    DeviceValue,
    Dict,
    Function,
    Guard,
    Instance,
    Lib,
    LibMethod,
    Loader,
    Module,
    Optimizer,
    Origin,
    ParameterOf,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)


class Attributes(State):
    """Read and write what belongs to a value."""

    def __init__(self) -> None:
        super().__init__()
        self.loose: dict[Any, Any] = {}  # attributes of unknown objects, by how they are spelled

    # -- attributes ---------------------------------------------------------------------

    def attribute(self, node: cst.CSTNode, value: Value, name: str) -> Value:
        """What `value.name` gives."""
        if isinstance(value, Lib):
            return self._library(value, name)
        if isinstance(value, (Module, Instance)):
            return self._object(node, value, name)
        if isinstance(value, (Tensor, ParameterOf)):
            return self._of_tensor(node, value, name)
        if isinstance(value, DeviceValue):
            return value if name == "type" else Unknown(name)
        if isinstance(value, ClassValue):
            found = value.find(name)
            return found if found is not None else Unknown(f"{value.name}.{name}")
        if isinstance(value, Unknown):
            key = f"{value.key}.{name}"
            if value.key and key in self.loose:
                return self.loose[key]  # type: ignore[no-any-return]
            if name == "device":
                place = value.place or (
                    "dev" if value.key in ("accelerator", "fabric", "trainer") else None
                )
                return DeviceValue(place, fallback=True)
            return Unknown(
                key,
                value.place if name == "module" else None,
                graph=value.graph and name not in ("shape", "dtype"),
            )
        if isinstance(value, Loader) and name == "dataset":
            return value.dataset
        if isinstance(value, (Seq, Dict, Optimizer, Loader, Thing, Const)) or hasattr(
            value, "fields"
        ):
            if isinstance(value, Optimizer) and name == "param_groups":
                return self.groups(value.extra.get("modules", []))
            fields = getattr(value, "fields", {})
            if name in fields and isinstance(fields[name], Value):
                return fields[name]  # type: ignore[no-any-return]
            return LibMethod(value, name, node)
        return Unknown(name)

    def groups(self, modules: list[Module]) -> Value:
        """What `optimizer.param_groups` holds: parameters of these modules."""
        one: Value = ParameterOf(modules[0]) if len(modules) == 1 else Unknown("parameter")
        params = Seq("list", None, one)
        return Seq("list", None, Dict({"params": params}, Unknown("setting")))

    def _library(self, value: Lib, name: str) -> Value:
        path = f"{value.path}.{name}"
        if path in self.loose:
            return self.loose[path]  # type: ignore[no-any-return]
        if path in ("torch.has_cuda",):
            return Guard()
        return Lib(path)

    def _object(self, node: cst.CSTNode, value: Module | Instance, name: str) -> Value:
        if name in value.fields:
            return self._field(value, name)
        if isinstance(value, Module) and name == "module" and "wraps" in value.extra:
            value.extra["unwrapped"] = True
            return value.extra["wraps"]  # type: ignore[no-any-return]
        if name == "__class__":
            return value.cls or Unknown()
        if value.cls is not None:
            found = value.cls.find(name)
            if isinstance(found, Function):
                if "property" in found.marks or "functools.cached_property" in found.marks:
                    return self.call_function(node, found.bind(value), [], {})
                if "staticmethod" in found.marks:
                    return found
                return found.bind(value)
            if found is not None:
                return found
        if isinstance(value, Module):
            if name in ("weight", "bias", "in_proj_weight") or name.startswith(
                ("weight_", "bias_")
            ):
                return ParameterOf(value)
            if name == "device":
                return DeviceValue(self.place_of(value), fallback=True)
            if value.cls is None and value.lib and not value.lib.startswith("torch.nn."):
                if name in tables.MODULE_METHODS or "#place" not in value.fields:
                    return LibMethod(value, name, node)
                # A layer of a library's model, as far as anybody knows.
                part = Module(f"{value.lib}.{name}", origin=value.origin)
                part.fields["#place"] = value.fields["#place"]
                self.put(value.fields, name, part)
                return part
            if value.cls is None and name not in tables.MODULE_METHODS:
                return Unknown(name)
            return LibMethod(value, name, node)
        key = self.cls_key(value, name)
        if value.cls is not None and name in value.cls.fields:
            return Unknown(key)
        return (
            Unknown(key)
            if value.cls is None or not value.cls.libraries()
            else LibMethod(value, name, node)
        )

    def cls_key(self, value: Instance | Module, name: str) -> str:
        """How an unknown attribute is spelled."""
        return f"{value.cls.name if value.cls else 'args'}.{name}"

    def _field(self, value: Module | Instance, name: str) -> Value:
        found = value.fields[name]
        if isinstance(found, Tensor) and not found.registered and found.place == "cpu":
            node, in_init = value.extra.get("assigned", {}).get(name, (None, False))
            kind = "attribute" if isinstance(value, Module) else "field"
            if node is not None and (
                found.origin is None or found.origin.kind not in ("attribute", "batch", "field")
            ):
                origin = Origin(
                    kind, node, owner=value, name=name, inner=found.origin, in_init=in_init
                )
                return found.but(origin=origin)
        return found if isinstance(found, Value) else Unknown(name)

    def _of_tensor(self, node: cst.CSTNode, value: Tensor | ParameterOf, name: str) -> Value:
        tensor = self.tensor(value)
        assert tensor is not None
        if name == "device":
            return DeviceValue(tensor.place, fallback=True)
        if name == "data" or name == "grad":
            return self.snapshot(value, node).but(graph=False)
        if name in ("T", "mT", "H", "real", "imag"):
            return tensor
        if name == "shape":
            return Seq("tuple", None, Unknown("shape"))
        if name == "is_cuda":
            return (
                Guard()
                if tensor.place == "dev"
                else Const(False)
                if tensor.place == "cpu"
                else Unknown()
            )
        if name in ("ndim", "dtype", "requires_grad", "layout", "grad_fn", "is_leaf"):
            return Unknown(name)
        return LibMethod(value, name, node)

    def snapshot(self, value: Value, node: cst.CSTNode) -> Tensor:
        """A copy of a tensor as it lies now; of a parameter it says whose it was."""
        tensor = self.tensor(value) or Tensor()
        if isinstance(value, ParameterOf):
            origin = self.origin("copy", node, owner=value.module)
            return tensor.but(origin=origin, registered=False)
        return tensor

    def store(
        self, node: cst.CSTNode, receiver: Value, name: str, value: Value, target: cst.CSTNode
    ) -> None:
        """`receiver.name = value`."""
        if isinstance(receiver, (Module, Instance)):
            self.put(receiver.fields, name, value)
            inside = [f.function.name for f in self.frames if f.function is not None]
            assigned = receiver.extra.setdefault("assigned", {})
            assigned[name] = (node, "__init__" in inside)
            self.note("store", node, name=name, receiver=receiver, args=(value,))
        elif isinstance(receiver, Lib):
            self.put(self.loose, f"{receiver.path}.{name}", value)
        elif isinstance(receiver, Unknown) and receiver.key:
            self.put(self.loose, f"{receiver.key}.{name}", value)
        elif isinstance(receiver, ClassValue):
            self.put(receiver.names, name, value)
        elif hasattr(receiver, "fields"):
            self.put(receiver.fields, name, value)

    # -- items --------------------------------------------------------------------------

    def item_of(self, value: Value, node: cst.CSTNode) -> Value:
        """What one round of a loop over it gives."""
        if isinstance(value, Seq):
            found = self.elements(value)
            return self.join_all(found) if found else Unknown()
        if isinstance(value, Loader):
            return self.batch(value, node)
        tensor = self.tensor(value)
        if tensor is not None:
            ndim = tensor.ndim
            return tensor.but(ndim=ndim - 1 if ndim is not None and ndim > 0 else None)
        if isinstance(value, Module):
            children = self.children(value)
            return self.join_all(children) if children else Unknown()
        if isinstance(value, Dict):
            keys = list(value.known())
            return Const(keys[0]) if len(keys) == 1 else Unknown("key")
        if isinstance(value, Instance) and value.cls is not None:
            for name in ("__iter__", "__getitem__"):
                method = value.cls.find(name)
                if isinstance(method, Function):
                    args: list[Value] = [Unknown()] if name == "__getitem__" else []
                    got = self.call_function(node, method.bind(value), args, {})
                    return got if name == "__getitem__" else self.item_of(got, node)
        if isinstance(value, Unknown):
            return Unknown("", origin=self.origin("loop", node))
        return Unknown()

    def subscript(self, node: cst.CSTNode, value: Value, index: list[Value | None]) -> Value:
        """What `value[index]` gives."""
        first = index[0] if index else None
        tensor = self.tensor(value)
        if tensor is not None:
            mixed = self.meet_index(node, tensor, index)
            place = "dev" if mixed else tensor.place  # reported: go on as if it were mended
            return tensor.but(ndim=_ndim_after(tensor.ndim, index), place=place)
        if isinstance(value, Seq):
            items = value.items
            if first is None:
                return Seq(value.kind, None, self.item_of(value, node), origin=value.origin)
            if isinstance(first, Const) and isinstance(first.value, int) and items is not None:
                if -len(items) <= first.value < len(items):
                    return items[first.value]
                return Unknown()
            return self.item_of(value, node)
        if isinstance(value, Dict):
            if (
                isinstance(first, Const)
                and (known := value.fields.get(("items", first.value))) is not None
            ):
                return known  # type: ignore[no-any-return]
            if value.fields["elem"] is not None and isinstance(first, Const):
                return value.fields["elem"]  # type: ignore[no-any-return]
            return self.join_all(value.values()) if value.values() else Unknown()
        if isinstance(value, Module):
            if isinstance(first, Const) and str(first.value) in value.fields:
                return value.fields[str(first.value)]  # type: ignore[no-any-return]
            return self.item_of(value, node)
        if isinstance(value, Instance) and value.cls is not None:
            method = value.cls.find("__getitem__")
            if isinstance(method, Function):
                return self.call_function(node, method.bind(value), [first or Unknown()], {})
        if isinstance(value, (Lib, ClassValue)):
            return value
        if isinstance(value, Unknown):
            key = f"{value.key}.{first.value}" if isinstance(first, Const) else ""
            if key in self.loose:
                return self.loose[key]  # type: ignore[no-any-return]
            return Unknown(key, value.place, value.origin, graph=value.graph)
        return Unknown()

    def meet_index(self, node: cst.CSTNode, base: Tensor, index: list[Value | None]) -> bool:
        """A tensor on the CPU cannot be indexed by one on the device (the reverse is allowed)."""
        mixed = False
        if base.place != "cpu":
            return mixed
        for part in index:
            tensor = self.tensor(part)
            if tensor is not None and tensor.place == "dev" and tensor.ndim not in (0, None):
                seen = self.note("mix", node, name="indexing")
                self.facts.mixes.append(Mix(seen, base, tensor, "indexing", "index"))
                mixed = True
        return mixed

    def set_item(
        self, node: cst.CSTNode, receiver: Value, index: list[Value | None], value: Value
    ) -> None:
        """`receiver[index] = value`."""
        first = index[0] if index else None
        tensor = self.tensor(receiver)
        if tensor is not None:
            self.meet_index(node, tensor, index)
        elif isinstance(receiver, Dict):
            if isinstance(first, Const):
                self.put(receiver.fields, ("items", first.value), value)
            else:
                old = receiver.fields["elem"]
                self.put(receiver.fields, "elem", value if old is None else join(old, value))
        elif isinstance(receiver, Seq):
            items = receiver.items
            if (
                isinstance(first, Const)
                and isinstance(first.value, int)
                and items is not None
                and -len(items) <= first.value < len(items)
            ):
                changed = list(items)
                changed[first.value] = value
                self.put(receiver.fields, "items", changed)
            else:
                self.put(receiver.fields, "elem", self.join_all([*self.elements(receiver), value]))
                self.put(receiver.fields, "items", None)
        elif isinstance(receiver, Unknown) and receiver.key and isinstance(first, Const):
            self.put(self.loose, f"{receiver.key}.{first.value}", value)
        elif isinstance(receiver, Module) and isinstance(first, Const):
            self.put(receiver.fields, str(first.value), value)

    # -- tensors ------------------------------------------------------------------------

    def join_all(self, values: list[Value]) -> Value:
        """One value for all of these."""
        if not values:
            return Unknown()
        result = values[0]
        for value in values[1:]:
            result = join(result, value)
        return result

    def combine(self, values: list[Value], node: cst.CSTNode, ndim: int | None = None) -> Tensor:
        """The tensor that an operation on these gives."""
        tensors = [t for t in map(self.tensor, values) if t is not None]
        opaque = any(isinstance(v, Unknown) for v in values)
        places = {t.place for t in tensors}
        place: Any
        if "dev" in places:
            place = "dev"
        elif places == {"cpu"}:
            # What is unknown may be on the device only where this one has no dimensions.
            place = "cpu" if not opaque or any(t.ndim not in (0, None) for t in tensors) else None
        else:
            place = None
        if ndim is None and tensors:
            sizes = [t.ndim for t in tensors]
            if all(s is not None and s >= 0 for s in sizes) and not opaque:
                ndim = max(s for s in sizes if s is not None)
            elif any(s is not None and s != 0 for s in sizes):
                ndim = SOME
        graph = not self.no_grad() and (
            any(t.graph for t in tensors) or any(isinstance(v, Unknown) and v.graph for v in values)
        )
        host = [t for t in tensors if t.place == "cpu" and t.ndim != 0] or tensors
        origin = host[0].origin if host else None
        if origin is None:
            origin = next((t.origin for t in tensors if t.origin is not None), None)
        return Tensor(place, ndim, graph, origin)

    def host_read(self, node: cst.CSTNode, value: Value | None, how: str) -> None:
        """Reading this on the host waits for the device, if it lies there."""
        tensor = self.tensor(value)
        if tensor is not None and tensor.place == "dev":
            self.note("sync", node, name=how, receiver=tensor)


def _ndim_after(ndim: int | None, index: list[Value | None]) -> int | None:
    if ndim is None:
        return None
    if any(isinstance(part, (Tensor, ParameterOf)) for part in index):
        return SOME
    if not all(part is None or isinstance(part, Const) for part in index):
        return (
            None
            if ndim != SOME and len(index) >= ndim
            else (SOME if any(p is None for p in index) else None)
        )
    numbers = sum(
        isinstance(p, Const) and isinstance(p.value, int) and not isinstance(p.value, bool)
        for p in index
    )
    added = sum(isinstance(p, Const) and p.value is None for p in index)
    if ndim == SOME:
        return SOME if any(p is None for p in index) or added or not numbers else None
    return max(ndim - numbers + added, 0)
