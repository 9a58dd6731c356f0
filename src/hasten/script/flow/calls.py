"""Calls: functions and classes of the script, built-ins, and the library's objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.containers import Containers
from hasten.script.flow.state import Frame
from hasten.script.flow.values import (
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
    ParameterOf,
    Scaler,
    Scope,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)

_DEEPEST = 14
_OFTEN = 24
_GRAD_OFF = ("torch.no_grad", "torch.inference_mode")


class Calls(Containers):
    """Follow calls."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: dict[Any, int] = {}

    def call_attribute(
        self,
        node: cst.Call,
        receiver: Value,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
        loose: bool,
    ) -> Value:
        """`receiver.name(...)`."""
        if isinstance(receiver, Lib):
            return self.call(node, self.attribute(node.func, receiver, name), args, kwargs, loose)
        self.note("method", node, name=name, receiver=receiver, args=tuple(args), kwargs=kwargs)
        for loop in self.loops():
            loop.calls.add(name)
        if isinstance(receiver, (Tensor, ParameterOf)):
            result = self.tensor_method(node, receiver, name, args, kwargs)
            if name == "backward":
                self._has_graph(node, receiver)
            return result
        if isinstance(receiver, (Module, Instance)):
            func = self.attribute(node.func, receiver, name)
            if isinstance(func, LibMethod):
                return self.method(node, func.receiver, name, args, kwargs, loose)
            return self.call(node, func, args, kwargs, loose)
        if isinstance(receiver, ClassValue):
            found = receiver.find(name)
            if isinstance(found, Function):
                bound = found.bind(receiver) if "classmethod" in found.marks else found
                return self.call_function(node, bound, args, kwargs)
            if name == "__init__" and args:
                return Const(None)
        result = self.method(node, receiver, name, args, kwargs, loose)
        if name == "backward":
            self._has_graph(node, receiver)
        return result

    def _has_graph(self, node: cst.Call, receiver: Value) -> None:
        """What `backward` is called on has a graph, whatever else is known of it."""
        base = node.func.value if isinstance(node.func, cst.Attribute) else None
        if not isinstance(base, cst.Name) or not isinstance(receiver, (Tensor, Unknown)):
            return
        home = self.scope.home(base.value)
        if home is not None and not receiver.graph:
            self.put(home.names, base.value, dataclasses.replace(receiver, graph=True))

    def call(
        self,
        node: cst.CSTNode,
        func: Value,
        args: list[Value],
        kwargs: dict[str, Value],
        loose: bool,
    ) -> Value:
        """`func(...)`."""
        if isinstance(func, Lib):
            for loop in self.loops():
                loop.calls.add(func.path.rsplit(".", 1)[-1])
            result = self.call_library(node, func.path, args, kwargs, loose)
            self.note(
                "call",
                node,
                name=func.path,
                args=tuple(args),
                kwargs=kwargs,
                result=result,
                data={"loose": loose},
            )
            return result
        if isinstance(func, Function):
            return self.call_function(node, func, args, kwargs)
        if isinstance(func, ClassValue):
            return self.instantiate(node, func, args, kwargs)
        if isinstance(func, Module):
            return self.call_module(node, func, args, kwargs)
        if isinstance(func, LibMethod):
            return self.method(node, func.receiver, func.name, args, kwargs, loose)
        if isinstance(func, Instance) and func.cls is not None:
            method = func.cls.find("__call__")
            if isinstance(method, Function):
                return self.call_function(node, method.bind(func), args, kwargs)
        return self.call_unknown(node, func, args, kwargs)

    def call_unknown(
        self, node: cst.CSTNode, func: Value, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """A call of something that nothing is known of; functions given to it may be called."""
        self.note(
            "unknown-call",
            node,
            name=getattr(func, "key", ""),
            receiver=func,
            args=tuple(args),
            kwargs=kwargs,
        )
        self.escape(node, [*args, *kwargs.values()])
        graph = isinstance(func, Unknown) and func.graph and not self.no_grad()
        place = func.place if isinstance(func, Unknown) and func.graph else None
        return Unknown("", place=place, graph=graph)

    def escape(self, node: cst.CSTNode, values: list[Value]) -> None:
        """These go where reading cannot follow: functions may be called, modules moved."""
        for value in values:
            if isinstance(value, Function) and not self.entered.get(value.node):
                self.call_function(node, value, [], {}, guess=True)
            found = [value, *self.elements(value), *getattr(value, "options", ())]
            for module in found:
                if isinstance(module, Module) and self.place_of(module) == "cpu":
                    self.move_module(node, module, None, inside=True)

    # -- functions of the script --------------------------------------------------------

    def call_function(
        self,
        node: cst.CSTNode,
        func: Function,
        args: list[Value],
        kwargs: dict[str, Value],
        *,
        guess: bool = False,
    ) -> Value:
        """Follow a function of the script; with `guess` its parameters are not known."""
        depth = sum(
            1
            for frame in self.frames
            if frame.function is not None and frame.function.node is func.node
        )
        if depth > 1 or len(self.frames) > _DEEPEST or self.entered.get(func.node, 0) > _OFTEN:
            return Unknown(graph=False)
        self.entered[func.node] = self.entered.get(func.node, 0) + 1
        if func.bound is not None and "staticmethod" not in func.marks:
            args = [func.bound, *args]
        scope = Scope({}, func.scope)
        outer_scope, self.scope = self.scope, scope
        frame = Frame(func, node)
        self.frames.append(frame)
        try:
            self._bind_parameters(func, args, kwargs)
            return self._run(func, frame)
        finally:
            self.frames.pop()
            self.scope = outer_scope

    def _run(self, func: Function, frame: Frame) -> Value:
        if isinstance(func.node, cst.Lambda):
            return self.ev(func.node.body)
        off = any(mark in _GRAD_OFF for mark in func.marks)
        if off:
            with self.within("no_grad", func.node):
                self.block(func.node.body)
        else:
            self.block(func.node.body)
        if frame.yields:
            return Seq("iter", None, self.join_all(frame.yields))
        if "contextlib.contextmanager" in func.marks:
            return Unknown()
        return self.join_all(frame.returns) if frame.returns else Const(None)

    def _bind_parameters(self, func: Function, args: list[Value], kwargs: dict[str, Value]) -> None:
        params = func.node.params
        names = self.scope.names
        left = list(args)
        given = dict(kwargs)
        for param in (*params.posonly_params, *params.params):
            name = param.name.value
            if left:
                names[name] = left.pop(0)
            elif name in given:
                names[name] = given.pop(name)
            else:
                names[name] = func.defaults.get(name) or Unknown(name, argument=True)
        if isinstance(params.star_arg, cst.Param):
            known = left if left or not self.assumed else None
            names[params.star_arg.name.value] = Seq(
                "tuple", known, None if known is not None else Unknown()
            )
        for param in params.kwonly_params:
            name = param.name.value
            found = given.pop(name, None)
            names[name] = (
                found
                if found is not None
                else func.defaults.get(name) or Unknown(name, argument=True)
            )
        if params.star_kwarg is not None:
            names[params.star_kwarg.name.value] = Dict(
                dict(given), Unknown() if self.assumed else None
            )

    # -- classes of the script ----------------------------------------------------------

    def instantiate(
        self, node: cst.CSTNode, cls: ClassValue, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        """An object of a class of the script."""
        libraries = cls.libraries()
        if any(p.startswith("enum.") for p in libraries):
            return Unknown()
        made: Module | Instance
        origin = self.origin("module" if cls.is_module() else "other", node)
        if cls.is_module():
            lib = next(
                (p for p in libraries if p.startswith("torch.nn.") and p != "torch.nn.Module"), ""
            )
            made = Module(lib, cls, origin=origin)
            if lib.rsplit(".", 1)[-1] in tables.WITH_PARAMETERS:
                self.put(made.fields, "#place", self.default_place)
        else:
            made = Instance(cls, origin=origin)
        if any(p.startswith("torch.optim.") for p in libraries):
            made.extra["optimizer"] = True
        init = cls.find("__init__")
        if isinstance(init, Function):
            self.call_function(node, init.bind(made), args, kwargs)
        else:
            for name, value in zip(cls.fields, args, strict=False):
                self.put(made.fields, name, value)
            for name, value in kwargs.items():
                self.put(made.fields, name, value)
            if args or kwargs:
                where = dict.fromkeys(cls.fields, (node, True))
                made.extra.setdefault("assigned", {}).update(where)
            if isinstance(made, Module) and made.lib.rsplit(".", 1)[-1] in tables.CONTAINERS:
                self._fill(made, args, False)
        post = cls.find("__post_init__")
        if isinstance(post, Function):
            self.call_function(node, post.bind(made), [], {})
        return made

    # -- things of the library ----------------------------------------------------------

    def method(
        self,
        node: cst.CSTNode,
        receiver: Value,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
        loose: bool,
    ) -> Value:
        """A method of something of a library."""
        if isinstance(receiver, (Tensor, ParameterOf)):
            return self.tensor_method(node, receiver, name, args, kwargs)
        if isinstance(receiver, Module):
            if (
                receiver.cls is not None
                and receiver.cls.find(name) is None
                and self._is_super(name)
            ):
                return Const(None)
            return self.module_method(node, receiver, name, args, kwargs)
        handlers: dict[type, Callable[..., Value]] = {
            Seq: self.seq_method,
            Dict: self.dict_method,
            Optimizer: self.optimizer_method,
            Scaler: self.scaler_method,
            Thing: self.thing_method,
            Loader: self.loader_method,
            Const: self.const_method,
            DeviceValue: self.const_method,
            Guard: self.const_method,
        }
        handler = handlers.get(type(receiver))
        if handler is not None:
            return handler(node, receiver, name, args, kwargs)
        if isinstance(receiver, Instance):
            return self.instance_method(node, receiver, name, args, kwargs)
        return self.unknown_method(node, receiver, name, args, kwargs)

    def _is_super(self, name: str) -> bool:
        return name in ("__init__", "__setattr__", "__post_init__")
