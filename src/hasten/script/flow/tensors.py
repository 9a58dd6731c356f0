"""Methods of tensors, and functions of torch that make or combine them."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.facts import Mix
from hasten.script.flow.module_calls import ModuleCalls
from hasten.script.flow.values import (
    SOME,
    Const,
    DeviceValue,
    Dict,
    Guard,
    Lib,
    LibMethod,
    ParameterOf,
    Seq,
    Tensor,
    Unknown,
    Value,
)


class Tensors(ModuleCalls):
    """Model tensors."""

    def make_tensor(
        self, node: cst.CSTNode, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A factory of torch: `torch.zeros(...)` and its like."""
        device = kwargs.get("device")
        if isinstance(device, Const) and device.value is None:
            device = None
        place: Any = self.default_place if device is None else self.device_place(device)
        if name in tables.LIKE:
            like = self.tensor(args[0]) if args else None
            if device is None:
                place = (
                    like.place
                    if like is not None
                    else getattr(args[0], "place", None)
                    if args
                    else None
                )
            return Tensor(
                place,
                like.ndim if like else None,
                origin=like.origin if like and place == "cpu" else None,
            )
        if name in ("from_numpy", "frombuffer", "from_file"):
            place = "cpu"
        if name == "scalar_tensor":
            ndim: int | None = 0
        elif name in tables.SCALAR_MAKERS:
            ndim = self._ndim_of_data(args[0] if args else Unknown())
        elif name in tables.ONE_DIMENSION:
            ndim = 1
        elif name in ("from_numpy", "tril_indices", "triu_indices", "eye"):
            ndim = SOME
        else:
            ndim = self._ndim_of_shape(name, args, kwargs)
        pinned = isinstance(kwargs.get("pin_memory"), Const)
        origin = self.origin("factory", node, name=name)
        made = Tensor(place, ndim, origin=origin, pinned=pinned)
        self.note("factory", node, name=name, args=tuple(args), kwargs=kwargs, result=made)
        return made

    def _ndim_of_shape(self, name: str, args: list[Value], kwargs: dict[str, Value]) -> int | None:
        sizes = list(args)
        if name == "randint":
            sizes = [a for a in args if isinstance(a, Seq)] or (
                [kwargs["size"]] if "size" in kwargs else []
            )
        elif name == "full":
            sizes = args[:1]
        elif name == "normal":
            sizes = [a for a in args if isinstance(a, Seq)]
        if not sizes and "size" in kwargs:
            sizes = [kwargs["size"]]
        if not sizes:
            return None
        if len(sizes) == 1:
            one = sizes[0]
            if isinstance(one, Seq):
                return len(one.items) if one.items is not None else SOME
            if isinstance(one, Const):
                return 1
            if isinstance(one, Unknown) and one.key.rsplit(".", 1)[-1] in ("shape", "size"):
                return SOME
            return SOME  # one unknown argument: a number is one dimension, a shape seldom none
        return len(sizes)

    def _ndim_of_data(self, data: Value) -> int | None:
        if isinstance(data, Const):
            return 0
        if isinstance(data, Seq):
            if data.items is not None and data.items:
                inner = self._ndim_of_data(data.items[0])
                return 1 + inner if inner is not None and inner >= 0 else SOME
            return SOME
        tensor = self.tensor(data)
        return tensor.ndim if tensor is not None else None

    # -- methods ------------------------------------------------------------------------

    def tensor_method(
        self,
        node: cst.CSTNode,
        receiver: Value,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """`tensor.name(...)`."""
        tensor = self.tensor(receiver)
        assert tensor is not None
        if name in ("to", "cuda", "cpu", "xpu"):
            return self._moved(node, receiver, tensor, name, args, kwargs)
        if name in ("item", "tolist", "numpy", "__float__"):
            return self._to_host(node, tensor, name)
        if name in ("detach", "clone", "detach_"):
            made = self.snapshot(receiver, node)
            graph = made.graph and name == "clone" and not self.no_grad()
            return made.but(graph=graph, registered=False)
        if name == "backward":
            self.note_backward(node, tensor, receiver)
            return Const(None)
        if name in tables.NEW:
            place = self.device_place(kwargs["device"]) if "device" in kwargs else tensor.place
            return Tensor(
                place,
                self._ndim_of_shape(name, args, kwargs),
                origin=self.origin("factory", node) if place == "cpu" else None,
            )
        if name in (
            "size",
            "dim",
            "numel",
            "ndimension",
            "nelement",
            "element_size",
            "stride",
            "data_ptr",
            "storage",
            "is_contiguous",
            "get_device",
            "is_floating_point",
            "register_hook",
            "retain_grad",
            "dense_dim",
        ):
            return (
                Unknown("shape" if name == "size" else name)
                if not (name == "size" and not args)
                else Seq("tuple", None, Unknown("n"))
            )
        if name == "is_pinned":
            return Unknown()
        if name in ("copy_", "set_", "type_as", "expand_as", "view_as", "reshape_as"):
            if name == "type_as":
                other = self.tensor(args[0]) if args else None
                return tensor.but(place=other.place if other is not None else None)
            return tensor.but(graph=tensor.graph or any(t.graph for t in self.flat(args)))
        if name == "pin_memory":
            return tensor.but(pinned=True)
        if name == "requires_grad_":
            return tensor
        if name == "nonzero":
            self.host_read(node, tensor, ".nonzero()")
        return self._operation(node, name, [receiver, *args], kwargs)

    def _moved(
        self,
        node: cst.CSTNode,
        receiver: Value,
        tensor: Tensor,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Tensor:
        target = kwargs.get("device", kwargs.get("other")) or (args[0] if args else None)
        if name == "to":
            other = self.tensor(target)
            place: Any = other.place if other is not None else self.device_place(target)
            if other is None and place is None and _no_device(target):
                return tensor.but(pending=None)
        else:
            place = "cpu" if name == "cpu" else "dev"
        waits = kwargs.get("non_blocking") or (
            args[0]
            if name == "cuda"
            and args
            and isinstance(args[0], Const)
            and isinstance(args[0].value, bool)
            else None
        )
        loose = not (isinstance(waits, Const) and not waits.value) and waits is not None
        data = {"from": tensor.place, "to": place, "non_blocking": loose}
        seen = self.note("tensor-move", node, name=name, receiver=tensor, kwargs=kwargs, data=data)
        if place == "cpu" and tensor.place == "dev" and not loose:
            self.note(
                "sync", node, name=f".{name}()" if name == "cpu" else '.to("cpu")', receiver=tensor
            )
        if isinstance(receiver, ParameterOf):
            tensor = self.snapshot(receiver, node)
        origin = (
            tensor.origin
            if place == "cpu" and tensor.place == "cpu"
            else self.origin("moved", node, inner=tensor.origin)
        )
        pending = seen.node if place == "cpu" and loose and tensor.place == "dev" else None
        return tensor.but(
            place=place, origin=origin, registered=False, pending=pending, pinned=False
        )

    def _to_host(self, node: cst.CSTNode, tensor: Tensor, name: str) -> Value:
        if tensor.pending is not None:
            self.note("early", node, name=name, receiver=tensor, data={"move": tensor.pending})
        if name == "numpy":
            if tensor.place == "dev":
                self.note("numpy", node, receiver=tensor)
            return Unknown("array")
        self.host_read(node, tensor, f".{name}()")
        return Unknown("number") if name != "tolist" else Seq("list", None, Unknown("number"))

    def note_backward(self, node: cst.CSTNode, tensor: Value, receiver: Value) -> None:
        """A backward pass runs here: the loops around it are training loops."""
        loops = self.loops()
        if loops:
            loops[-1].backward.append(node)
        for loop in loops:
            loop.has_backward = True
        self.note("backward", node, receiver=receiver)

    # -- functions ----------------------------------------------------------------------

    def torch_function(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A function of torch or torch.nn.functional on tensors."""
        name = path.rsplit(".", 1)[-1]
        if name in ("as_tensor", "asarray", "tensor") and args and self.tensor(args[0]) is not None:
            tensor = self.tensor(args[0])
            assert tensor is not None
            if "device" in kwargs:
                return tensor.but(place=self.device_place(kwargs["device"]))
            return tensor.but(place="cpu") if name == "tensor" else tensor
        if name in tables.FACTORIES or name in tables.LIKE or name in ("as_tensor", "asarray"):
            return self.make_tensor(node, name, args, kwargs)
        if name == "normal" and not self.flat(args):
            return self.make_tensor(node, name, args, kwargs)
        if name in tables.ANY_DEVICE:
            return Unknown(name)
        return self._operation(node, name, args, kwargs)

    def _operation(
        self, node: cst.CSTNode, name: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        weights = [
            (key, kwargs[key])
            for key in tables.WEIGHTED
            if (key in kwargs and "loss" in name) or (key in kwargs and "entropy" in name)
        ]
        values = [v for k, v in kwargs.items() if k not in dict(weights)]
        operands: list[tuple[str, Value]] = []
        for value in [*args, *values]:
            if isinstance(value, Seq):
                operands += [("", v) for v in self.elements(value)]
            else:
                operands.append(("", value))
        strict = name in tables.STRICT
        if name not in tables.IN_PLACE_ANY:
            self.meet(node, f"{name}(...)", operands, strict=strict)
            self._meet_weights(node, name, operands, weights)
        result = self.combine([v for _, v in operands], node)
        if name in tables.REDUCTIONS:
            result = self._reduced(name, result, args, kwargs)
        elif strict or name in tables.RESHAPES or name in ("unbind", "split", "chunk"):
            result = result.but(
                ndim=SOME
                if result.ndim != 0
                or name in ("stack", "unsqueeze", "view", "reshape", "expand", "repeat")
                else None
            )
        elif name == "squeeze":
            result = result.but(ndim=None)
        elif name not in tables.SAME_SHAPE and result.ndim not in (0, SOME):
            result = result.but(ndim=result.ndim if result.ndim is None else SOME)
        if "loss" in name or "entropy" in name:
            mode = kwargs.get("reduction")
            result = result.but(
                ndim=0 if not (isinstance(mode, Const) and mode.value == "none") else SOME
            )
        if name in tables.NO_GRAPH:
            result = result.but(graph=False)
        if name == "requires_grad_":
            result = result.but(graph=True)
        if name in tables.PAIRS and (
            "dim" in kwargs
            or name in ("sort", "topk", "mode")
            or (len(args) > 1 and self.tensor(args[1]) is None)
        ):
            return Seq("tuple", [result, result.but(graph=False)])
        if name in (
            "unbind",
            "split",
            "chunk",
            "meshgrid",
            "tensor_split",
            "broadcast_tensors",
            "where",
        ) and not (name == "where" and len(args) > 1):
            return Seq("tuple", None, result)
        if name in ("equal", "allclose", "is_nonzero"):
            for value in args:
                self.host_read(node, value, f"{name}()")
            return Unknown("flag")
        return result

    def _meet_weights(
        self,
        node: cst.CSTNode,
        name: str,
        operands: list[tuple[str, Value]],
        weights: list[tuple[str, Value]],
    ) -> None:
        there = next(
            (
                t
                for t in (self.tensor(v) for _, v in operands)
                if t is not None and t.place == "dev"
            ),
            None,
        )
        for _, value in weights:
            weight = self.tensor(value)
            if (
                there is not None
                and weight is not None
                and weight.place == "cpu"
                and weight.ndim != 0
            ):
                seen = self.note("mix", node, name="the loss")
                self.facts.mixes.append(Mix(seen, weight, there, "the loss", "weight"))

    def _reduced(
        self, name: str, result: Tensor, args: list[Value], kwargs: dict[str, Value]
    ) -> Tensor:
        keep = kwargs.get("keepdim") or kwargs.get("keepdims")
        if keep is not None:
            return result
        dims = kwargs.get("dim") or kwargs.get("axis") or (args[1] if len(args) > 1 else None)
        if dims is None:
            return result.but(ndim=0)
        if result.ndim is not None and result.ndim > 1 and isinstance(dims, Const):
            return result.but(ndim=result.ndim - 1)
        if (
            result.ndim == SOME
            and isinstance(dims, Const)
            and isinstance(dims.value, int)
            and dims.value > 0
        ):
            return result  # there was a dimension before that one
        return result.but(ndim=0 if result.ndim == 1 else None)


def _no_device(target: Value | None) -> bool:
    """Whether the argument of `.to` is a dtype or memory format rather than a device."""
    if target is None or isinstance(target, (Lib, LibMethod)):
        return True
    if isinstance(target, Unknown):
        return any(word in target.key for word in ("type", "format", "float"))
    return isinstance(target, Guard)


__all__ = ["DeviceValue", "Dict", "Tensors"]
