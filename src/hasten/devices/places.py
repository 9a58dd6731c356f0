"""Every tensor within some objects: its path, its device, and how it is held."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence


class Kind(enum.Enum):
    """How a tensor is held, which decides what moves it."""

    DATA = "data"
    """In a batch or any nest outside a module."""
    REGISTERED = "registered"
    """A parameter or a buffer: ``Module.to`` moves it."""
    ATTRIBUTE = "plain attribute of a module"
    LISTED_TENSOR = "in a plain container of a module"
    LISTED_PARAMETER = "parameter in a plain container of a module"
    HIDDEN_IN_LIST = "of a module in a plain list"
    HIDDEN_IN_DICT = "of a module in a plain dictionary"
    HIDDEN = "of a module that is not registered"
    OPTIMIZED = "held by an optimizer"
    STATE = "state of an optimizer"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one tensor was found."""

    path: str
    root: str
    """First part of the path: the object as the caller named it."""
    kind: Kind
    tensor: torch.Tensor
    owner: str = ""
    """Class of the module that holds it."""
    name: str = ""
    """Attribute of that module."""

    @property
    def device(self) -> torch.device:
        """Where the tensor lies."""
        return self.tensor.device

    @property
    def scalar(self) -> bool:
        """Whether the tensor has no dimensions."""
        return self.tensor.dim() == 0

    def describe(self) -> str:
        """Dtype, shape, and how it is held where that is out of the ordinary."""
        layout = f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}"
        usual = self.kind in {Kind.DATA, Kind.REGISTERED}
        return layout if usual else f"{layout}, {self.kind.value}"


def places(roots: Mapping[str, Any]) -> list[Place]:
    """Every tensor within the objects, each once, in the order in which they are met."""
    search = _Search()
    for root, obj in roots.items():
        search.root = root
        search.visit(obj, root)
    return search.found


_INNER = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_ALONE = (str, bytes, bytearray, int, float, complex, bool, type(None), type, torch.dtype)
_MAPPINGS = (Mapping,)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque, collections.UserList)


class _Search:
    def __init__(self) -> None:
        self.root = ""
        self.found: list[Place] = []
        self.seen: set[int] = set()
        self.kept: list[Any] = []  # so that no id in ``seen`` is given to another object
        self.names: dict[int, str] = {}  # paths of parameters, for the states of optimizers

    def visit(
        self, obj: Any, path: str, kind: Kind = Kind.DATA, owner: str = "", name: str = ""
    ) -> None:
        if isinstance(obj, _ALONE) or id(obj) in self.seen:
            return
        self.seen.add(id(obj))
        self.kept.append(obj)
        if isinstance(obj, torch.Tensor):
            listed = isinstance(obj, nn.Parameter) and kind is Kind.LISTED_TENSOR
            self.add(obj, path, Kind.LISTED_PARAMETER if listed else kind, owner, name)
        elif isinstance(obj, nn.Module):
            self.module(obj, path, kind, owner, name)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizer(obj, path)
        elif isinstance(obj, PackedSequence):  # its batch sizes stay on the CPU by design
            self.visit(obj.data, f"{path}.data", kind, owner, name)
        elif isinstance(obj, _MAPPINGS):
            for key, value in obj.items():
                self.visit(value, f"{path}[{key!r}]", kind, owner, name)
        elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
            for field, value in zip(obj._fields, obj, strict=True):
                self.visit(value, f"{path}.{field}", kind, owner, name)
        elif isinstance(obj, _SEQUENCES):
            for place, value in enumerate(obj):
                self.visit(value, f"{path}[{place}]", kind, owner, name)
        else:
            for field, value in _fields(obj):
                self.visit(value, f"{path}.{field}", kind, owner, name)

    def add(self, tensor: torch.Tensor, path: str, kind: Kind, owner: str, name: str) -> None:
        self.names[id(tensor)] = path
        self.found.append(Place(path, self.root, kind, tensor, owner, name))

    def module(self, module: nn.Module, path: str, kind: Kind, owner: str, name: str) -> None:
        registered = Kind.REGISTERED if kind is Kind.DATA else kind
        inside = list(module.named_modules(prefix=path))
        # Registered things first: a plain list that repeats them hides nothing.
        self.seen.update(id(part) for _, part in inside)
        for where, part in inside:
            for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is not None:
                    self.visit(tensor, f"{where}.{key}", registered, owner, name)
        for where, part in inside:
            for key, value in vars(part).items():
                if key in _INNER or "_hooks" in key or isinstance(value, _ALONE):
                    continue
                self.plain(value, f"{where}.{key}", type(part).__qualname__, key)

    def plain(self, value: Any, path: str, owner: str, name: str) -> None:
        """A plain attribute of a module: nothing in it follows ``Module.to``."""
        if isinstance(value, torch.Tensor):
            self.visit(value, path, Kind.ATTRIBUTE, owner, name)
        elif isinstance(value, nn.Module):
            self.visit(value, path, Kind.HIDDEN, owner, name)
        elif isinstance(value, (*_MAPPINGS, *_SEQUENCES)):
            hidden = Kind.HIDDEN_IN_DICT if isinstance(value, Mapping) else Kind.HIDDEN_IN_LIST
            inner = value.values() if isinstance(value, Mapping) else value
            modules = any(isinstance(item, nn.Module) for item in inner)
            self.visit(value, path, hidden if modules else Kind.LISTED_TENSOR, owner, name)
        elif dataclasses.is_dataclass(value):
            self.visit(value, path, Kind.LISTED_TENSOR, owner, name)

    def optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        for group, settings in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(settings["params"]):
                where = f"{path}.param_groups[{group}]['params'][{place}]"
                self.visit(parameter, where, Kind.OPTIMIZED)
        for parameter, state in optimizer.state.items():
            named = self.names.get(id(parameter), "parameter")
            for key, value in state.items():
                self.visit(value, f"{path}.state[{named}][{key!r}]", Kind.STATE)


def _fields(obj: Any) -> list[tuple[str, Any]]:
    """Attributes of an object that is made of them; tensors alone of any other object."""
    attributes = getattr(obj, "__dict__", {})
    if isinstance(obj, (types.SimpleNamespace, argparse.Namespace)):
        return list(attributes.items())
    if dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj)]
        names += [name for name in attributes if name not in names]
        return [(name, getattr(obj, name)) for name in names if hasattr(obj, name)]
    if isinstance(obj, types.ModuleType) or callable(obj):
        return []
    return [(key, value) for key, value in attributes.items() if isinstance(value, torch.Tensor)]
