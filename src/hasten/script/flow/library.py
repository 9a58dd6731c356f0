"""Functions and classes of libraries: built-ins, torch, and the few others that matter."""

from __future__ import annotations

import copy as copying

import libcst as cst

from hasten.script.flow import tables
from hasten.script.flow.builtin import Builtins
from hasten.script.flow.loading import LOADER
from hasten.script.flow.values import (
    SOME,
    Const,
    DeviceValue,
    Dict,
    Function,
    Guard,
    Instance,
    Lib,
    Module,
    Optimizer,
    ParameterOf,
    Scaler,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)

_AVAILABLE = (
    "torch.cuda.is_available",
    "torch.accelerator.is_available",
    "torch.cuda.is_initialized",
)
_LEAVES = ("sys.exit", "builtins.exit", "builtins.quit", "os._exit")
_PASSES = ("tqdm", "track", "progress", "islice", "cycle", "trange")


class Library(Builtins):
    """Model what libraries give."""

    def call_library(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value], loose: bool
    ) -> Value:
        """A call of something of a library, by its full name."""
        if path.startswith("builtins."):
            return self.builtin(node, path[9:], args, kwargs)
        if path in _AVAILABLE:
            return Guard()
        if path in ("torch.cuda.device_count", "torch.accelerator.device_count"):
            return Unknown("device_count")
        if path in (
            "torch.backends.mps.is_available",
            "torch.mps.is_available",
            "torch.xpu.is_available",
        ):
            return Guard(False)
        if path.startswith("torch."):
            return self._torch(node, path, args, kwargs, loose)
        return self._other(node, path, args, kwargs, loose)

    def _torch(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value], loose: bool
    ) -> Value:
        name = path.rsplit(".", 1)[-1]
        if path == "torch.device":
            return self._device(node, args)
        if path == "torch.accelerator.current_accelerator":
            return DeviceValue("dev", fallback=True)
        if name in tables.LEGACY and path.count(".") <= 2:
            place = "dev" if path.startswith("torch.cuda.") else "cpu"
            ndim = self._ndim_of_data(args[0]) if args and isinstance(args[0], Seq) else SOME
            made = Tensor(place, ndim, origin=self.origin("factory", node, name=name))  # type: ignore[arg-type]
            self.note("factory", node, name=name, result=made)
            return made
        if path in LOADER:
            return self.make_loader(node, path, args, kwargs, loose)
        if path in ("torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.Buffer"):
            tensor = self.tensor(args[0] if args else kwargs.get("data"))
            return (tensor or Tensor(None, SOME)).but(
                registered=True, graph=path != "torch.nn.Buffer"
            )
        if path.startswith(
            ("torch.nn.functional.", "torch.nn.utils.", "torch.nn.init.", "torch.nn.attention.")
        ):
            return self._nn_function(node, path, args, kwargs)
        if path.startswith("torch.nn.") and name[:1].isupper():
            return self.new_module(node, path, args, kwargs, loose)
        if path.startswith("torch.optim."):
            return self._optim(node, path, args, kwargs)
        if name == "GradScaler":
            made_scaler = Scaler(origin=self.origin("other", node))
            self.note("scaler-made", node, receiver=made_scaler, kwargs=kwargs)
            return made_scaler
        if path == "torch.load":
            place = self.device_place(
                kwargs.get("map_location") or (args[1] if len(args) > 1 else None)
            )
            return Unknown("checkpoint", place=place, origin=self.origin("load", node))
        if path == "torch.compile" and args:
            return args[0]
        if path.startswith("torch.jit.") and args:
            return args[0]
        if path == "torch.set_default_device":
            self.default_place = self.device_place(args[0] if args else None)
            return Const(None)
        if path in ("torch.set_default_tensor_type",):
            self.default_place = None  # type: ignore[assignment]
            return Const(None)
        if path.startswith("torch.utils.data."):
            return self._dataset(node, path, args, kwargs)
        if path == "torch.Generator":
            return Unknown("generator")
        if path.startswith("torch.distributions."):
            thing = Thing("distribution", tuple(args))
            flat = self.flat([*args, *kwargs.values()])
            places = {t.place for t in flat if t.ndim != 0}
            thing.extra["place"] = places.pop() if len(places) == 1 else None
            thing.extra["graph"] = any(t.graph for t in flat)
            self.meet(node, f"{name}(...)", [("", t) for t in flat], strict=False)
            return thing
        if path in ("torch.autograd.grad",):
            return Seq("tuple", None, Tensor(None))
        if path == "torch.autograd.backward" and args:
            self.note_backward(node, args[0], args[0])
            return Const(None)
        if path.count(".") == 1 or path.startswith(tables.FUNCTIONAL[1:]):
            return self.torch_function(node, path, args, kwargs)
        if path.startswith("torch.hub.load"):
            return Module("torch.hub.load", origin=self.origin("module", node))
        return Unknown(name)

    def _device(self, node: cst.CSTNode, args: list[Value]) -> Value:
        given = args[0] if args else Unknown()
        if isinstance(given, DeviceValue):
            return DeviceValue(given.place, fallback=True, node=node)
        if isinstance(given, Const):
            return DeviceValue(self.device_place(given), node=node)
        return DeviceValue("dev", fallback=True, node=node)

    def _optim(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        name = path.rsplit(".", 1)[-1]
        if path.startswith("torch.optim.swa_utils.AveragedModel") and args:
            return self._copied(node, args[0])
        if ".lr_scheduler." in path or path.startswith("torch.optim.swa_utils"):
            return Thing("scheduler", tuple(args), origin=self.origin("other", node))
        if not name[:1].isupper():
            return Unknown(name)
        optimizer = Optimizer(path, origin=self.origin("optimizer", node))
        given = args[0] if args else kwargs.get("params", Unknown())
        modules = self._modules_of(given)
        optimizer.extra["modules"] = modules
        places = {m: self.place_of(m) for m in modules}
        self.note("optimizer", node, name=path, receiver=optimizer, result=optimizer, kwargs=kwargs,
                  data={"modules": modules, "places": places})  # fmt: skip
        return optimizer

    def _modules_of(self, value: Value) -> list[Module]:
        found: list[Module] = []
        todo: list[Value] = [value]
        for _ in range(60):
            if not todo:
                break
            one = todo.pop()
            if isinstance(one, ParameterOf):
                if one.module not in found:
                    found.append(one.module)
            elif isinstance(one, Seq):
                todo += self.elements(one)
            elif isinstance(one, Dict):
                todo += one.values()
        return found

    def _dataset(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        name = path.rsplit(".", 1)[-1]
        if name == "random_split" and args:
            return Seq("list", None, Thing("torch.utils.data.Subset", (args[0],)))
        if name == "DistributedSampler":
            thing = Thing(path, tuple(args), origin=self.origin("other", node))
            thing.extra["shuffle"] = kwargs.get(
                "shuffle", args[3] if len(args) > 3 else Const(True)
            )
            return thing
        return Thing(path, tuple(args), origin=self.origin("other", node))

    def _nn_function(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        name = path.rsplit(".", 1)[-1]
        if path.startswith("torch.nn.functional."):
            if name == "cross_entropy" and len(args) > 2:
                kwargs = {**kwargs, "weight": args[2]}
                args = args[:2]
            return self.torch_function(node, path, args, kwargs)
        if name == "pack_padded_sequence":
            lengths = self.tensor(kwargs.get("lengths") or (args[1] if len(args) > 1 else None))
            if lengths is not None and lengths.place == "dev":
                self.note("packed", node, receiver=lengths)
            flat = self.flat(args[:1])
            return flat[0] if flat else Unknown("packed")
        if name == "pad_packed_sequence" and args:
            flat = self.flat(args[:1])
            return Seq("tuple", [flat[0] if flat else Unknown(), Tensor("cpu", 1)])
        if name in ("pad_sequence", "pack_sequence") and args:
            flat = self.flat(args[:1])
            return self.combine(list(flat), node).but(ndim=SOME) if flat else Unknown()
        if name in ("clip_grad_norm_", "clip_grad_value_"):
            self.note("clip", node, name=name, args=tuple(args))
            return Tensor(None, 0)
        return Unknown(name) if not path.startswith("torch.nn.init.") else Const(None)

    # -- other libraries ----------------------------------------------------------------

    def _other(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value], loose: bool
    ) -> Value:
        name = path.rsplit(".", 1)[-1]
        if path in ("copy.deepcopy", "copy.copy") and args:
            return self._copied(node, args[0])
        if path in _LEAVES:
            return Unknown("exit")
        if (path.startswith(tables.MODEL_MAKERS) and not name[:1].isupper()) or (
            path.startswith("torchvision.models.") and name.islower()
        ):
            module = Module(path, origin=self.origin("module", node))
            self.put(module.fields, "#place", self.default_place)
            return module
        if path.startswith("torchvision.datasets."):
            thing = Thing(path, tuple(args), origin=self.origin("other", node))
            thing.extra["transform"] = kwargs.get("transform")
            thing.extra["pair"] = "transform" in kwargs
            return thing
        if name in _PASSES and args:
            return args[0]
        if path == "argparse.ArgumentParser":
            return Thing("argparse")
        if path == "types.SimpleNamespace":
            made = Instance(None, origin=self.origin("other", node))
            made.fields.update(kwargs)
            return made
        if path.startswith("collections."):
            if name in ("defaultdict", "Counter"):
                listed = bool(args) and isinstance(args[0], Lib) and args[0].path == "builtins.list"
                origin = self.origin("other", node)
                return Dict({}, Seq("list", None, origin=origin) if listed else None, origin=origin)
            if name == "OrderedDict":
                return args[0] if args else Dict({}, None, origin=self.origin("other", node))
            if name == "deque":
                made_seq = Seq("list", None, None, origin=self.origin("other", node))
                made_seq.extra["cleared"] = "maxlen" in kwargs or len(args) > 1
                return made_seq
        if path == "logging.getLogger":
            return Thing("logger")
        if path == "functools.partial" and args and isinstance(args[0], (Function, Lib)):
            return args[0]
        if path.startswith(("itertools.chain",)):
            found = [self.item_of(a, node) for a in args]
            return (
                Seq("iter", None, self.join_all(found))
                if len(found) == 1
                else Seq("iter", list(found))
            )
        if path.startswith("itertools.") and name == "zip_longest":
            return self.builtin(node, "zip", args, kwargs)
        if path.startswith("itertools."):
            return Seq("iter", None, Unknown("n"))
        if name == "GradScaler":
            return Scaler(origin=self.origin("other", node))
        if path.startswith("numpy."):
            for arg, given in zip(args, getattr(node, "args", ()), strict=False):
                tensor = self.tensor(arg)
                if (
                    tensor is not None
                    and tensor.place == "dev"
                    and name not in ("shape", "ndim", "size", "isscalar")
                ):
                    self.note("numpy", given, receiver=tensor)
                elif isinstance(arg, Seq) and name in ("concatenate", "stack", "vstack"):
                    for item in self.flat([arg]):
                        if item.place == "dev":
                            self.note("numpy", given, receiver=item)
            return Unknown("array")
        if path.startswith(("time.", "math.", "os.", "random.", "json.", "logging.")):
            for arg, given in zip(args, getattr(node, "args", ()), strict=False):
                self.host_read(
                    given, arg, f"{path}(...)" if not path.startswith("logging.") else "formatting"
                )
            return Unknown(path, origin=self.origin("time", node))
        return self.call_unknown(node, Unknown(path), args, kwargs)

    def _copied(self, node: cst.CSTNode, value: Value) -> Value:
        if isinstance(value, Module):
            made = Module(value.lib, value.cls, origin=self.origin("module", node, owner=value))
            made.extra = {k: v for k, v in value.extra.items() if k not in ("moved", "mode")}
            for key, found in value.fields.items():
                made.fields[key] = self._copied(node, found) if isinstance(found, Module) else found
            if "wraps" in made.extra:
                made.extra["wraps"] = self._copied(node, made.extra["wraps"])
            made.extra["copied-from"] = value
            return made
        if isinstance(value, Dict):
            # deepcopy(model.state_dict()): tensors as they lie now.
            known = {
                k: self.snapshot(v, node) if isinstance(v, ParameterOf) else v
                for k, v in value.known().items()
            }
            elem = value.fields["elem"]
            return Dict(known, self.snapshot(elem, node) if isinstance(elem, ParameterOf) else elem)
        if isinstance(value, Seq):
            copied = copying.copy(value)
            copied.fields = dict(value.fields)
            return copied
        return self.snapshot(value, node) if isinstance(value, ParameterOf) else value

    # -- built-ins ----------------------------------------------------------------------

    def thing_method(
        self,
        node: cst.CSTNode,
        thing: Thing,
        name: str,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        """A method of a library object; `super()` is one of them."""
        if thing.lib == "super":
            value, owner = thing.parts
            for base in owner.bases:  # type: ignore[attr-defined]
                found = getattr(base, "find", lambda _: None)(name)
                if isinstance(found, Function):
                    return self.call_function(node, found.bind(value), args, kwargs)
            if name == "__init__":
                if isinstance(value, Instance) and value.extra.get("optimizer") and args:
                    groups = self.groups(self._modules_of(args[0]))
                    self.put(value.fields, "param_groups", groups)
                if (
                    isinstance(value, Module)
                    and value.lib
                    and value.lib.rsplit(".", 1)[-1] in tables.CONTAINERS
                ):
                    self._fill(value, args, False)
                return Const(None)
            if isinstance(value, Module):
                if name == "forward" and value.lib:
                    return Tensor(self.place_of(value), SOME, not self.no_grad())
                return self.module_method(node, value, name, args, kwargs)
            return Unknown(name)
        return super().thing_method(node, thing, name, args, kwargs)
