"""What a name may hold: tensors with their place, modules, devices, loaders, containers.

A place is ``"cpu"`` (surely the host), ``"dev"`` (the accelerator that the script chose; it may be
CUDA) or None (not known). Only "surely host" against "surely accelerator" is ever called a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import libcst as cst

Place = Literal["cpu", "dev"]
SOME = -1  # a number of dimensions that is not known, but not zero
Env = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a value came to be.

    Attributes:
        kind: factory, batch, attribute, field, copy, parameter, module, data or other.
        node: the expression or statement that made it.
        calls: the nodes of the calls that were under way, outermost first.
        owner: the module or instance that it belongs to, if any.
        inner: for an attribute, where its value was made.
        inside: names of the functions that were under way, outermost first.
    """

    kind: str
    node: cst.CSTNode
    calls: tuple[cst.CSTNode, ...] = ()
    owner: Any = None
    name: str = ""
    inner: Origin | None = None
    inside: tuple[str, ...] = ()
    in_init: bool = False
    loops: tuple[Any, ...] = ()


class Value:
    """The root of all that a name may hold."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Unknown(Value):
    """Nothing is known, save perhaps how it was spelled and where it lies."""

    key: str = ""
    place: Place | None = None
    origin: Origin | None = None
    graph: bool = False
    argument: bool = False
    options: tuple[Any, ...] = ()  # modules, one of which it is


@dataclass(frozen=True, eq=False)
class Const(Value):
    """A literal: number, string, bool or None."""

    value: Any


@dataclass(frozen=True, eq=False)
class Guard(Value):
    """A condition that holds where there is a GPU (`truth` True) or where there is none."""

    truth: bool = True
    sure: bool = True


@dataclass(frozen=True, eq=False)
class Lib(Value):
    """Something of a library, by its full name: ``torch.nn.Linear``."""

    path: str


@dataclass(frozen=True, eq=False)
class LibMethod(Value):
    """A method of a library's value, not yet called."""

    receiver: Value
    name: str
    node: cst.CSTNode


@dataclass(frozen=True, eq=False)
class DeviceValue(Value):
    """A device; `fallback` says that the script falls back to another where there is no GPU."""

    place: Place | None
    fallback: bool = False
    node: cst.CSTNode | None = None


@dataclass(frozen=True, eq=False)
class Tensor(Value):
    """A tensor: where it lies, how many dimensions, whether it carries a graph."""

    place: Place | None = None
    ndim: int | None = None
    graph: bool = False
    origin: Origin | None = None
    registered: bool = False
    pinned: bool = False
    pending: cst.CSTNode | None = None
    bound: cst.CSTNode | None = None

    def but(self, **changes: Any) -> Tensor:
        """The same tensor with some fields changed."""
        return replace(self, **changes)


class Heap(Value):
    """A thing with identity whose fields change; `fields` is written through the journal only."""

    __slots__ = ("extra", "fields", "origin")

    def __init__(self, origin: Origin | None = None) -> None:
        self.fields: dict[Any, Any] = {}
        self.origin = origin
        self.extra: dict[str, Any] = {}


class Module(Heap):
    """An `nn.Module`: of the library (`lib`), of the script (`cls`), or neither."""

    __slots__ = ("cls", "lib")

    def __init__(self, lib: str = "", cls: ClassValue | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.lib = lib
        self.cls = cls


class Instance(Heap):
    """An object of one of the script's own classes, or a namespace (`cls` None)."""

    __slots__ = ("cls",)

    def __init__(self, cls: ClassValue | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.cls = cls


class Seq(Heap):
    """A list, tuple, set or iterator: its items where they are known, else one for all."""

    __slots__ = ("kind",)

    def __init__(
        self, kind: str, items: list[Value] | None, elem: Value | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        self.kind = kind
        self.fields["items"] = items
        self.fields["elem"] = elem

    @property
    def items(self) -> list[Value] | None:
        """The items in order, None when their number is not known."""
        return self.fields["items"]  # type: ignore[no-any-return]


class Dict(Heap):
    """A dict: what is under the keys that are known, and one value for all others."""

    __slots__ = ()

    def __init__(self, items: dict[Any, Value], elem: Value | None = None, **more: Any) -> None:
        super().__init__(**more)
        for key, value in items.items():
            self.fields["items", key] = value
        self.fields["elem"] = elem

    def known(self) -> dict[Any, Value]:
        """The values under known keys."""
        return {k[1]: v for k, v in self.fields.items() if isinstance(k, tuple) and v is not None}

    def values(self) -> list[Value]:
        """Everything it may hold."""
        elem = self.fields["elem"]
        return [*self.known().values(), *([elem] if elem is not None else [])]


class Optimizer(Heap):
    """An optimizer of `torch.optim` (or what looks like one)."""

    __slots__ = ("lib",)

    def __init__(self, lib: str, **more: Any) -> None:
        super().__init__(**more)
        self.lib = lib


class Loader(Heap):
    """A `DataLoader`; `settings` has its arguments by name."""

    __slots__ = ("dataset", "settings")

    def __init__(self, dataset: Value, settings: Mapping[str, Value], **more: Any) -> None:
        super().__init__(**more)
        self.dataset = dataset
        self.settings = settings


class Scaler(Heap):
    """A gradient scaler."""

    __slots__ = ()


class Thing(Heap):
    """Some other object of a library that has to be told apart: scheduler, sampler, timer, file."""

    __slots__ = ("lib", "parts")

    def __init__(self, lib: str, parts: tuple[Value, ...] = (), **more: Any) -> None:
        super().__init__(**more)
        self.lib = lib
        self.parts = parts


@dataclass(frozen=True, eq=False)
class ParameterOf(Value):
    """A parameter of a module, without saying which: it lies where the module lies."""

    module: Module


@dataclass(eq=False)
class Function(Value):
    """A function, method or lambda of the script."""

    node: cst.FunctionDef | cst.Lambda
    scope: Scope
    name: str
    owner: ClassValue | None = None
    bound: Value | None = None
    marks: tuple[str, ...] = ()
    defaults: dict[str, Value] = field(default_factory=dict)

    def bind(self, receiver: Value) -> Function:
        """The method of this receiver."""
        return replace(self, bound=receiver)


@dataclass(eq=False)
class ClassValue(Value):
    """A class of the script, with its own names and its bases."""

    node: cst.ClassDef
    name: str
    bases: tuple[Value, ...]
    names: dict[str, Value]
    fields: tuple[str, ...] = ()  # annotated, in order
    marks: tuple[str, ...] = ()

    def find(self, name: str) -> Value | None:
        """What the class or a base of the script has under this name."""
        if name in self.names:
            return self.names[name]
        for base in self.bases:
            if isinstance(base, ClassValue) and (found := base.find(name)) is not None:
                return found
        return None

    def libraries(self) -> set[str]:
        """Full names of the library classes that it is derived from."""
        found = set()
        for base in self.bases:
            if isinstance(base, Lib):
                found.add(base.path)
            elif isinstance(base, ClassValue):
                found |= base.libraries()
        return found

    def is_module(self) -> bool:
        """Whether it is an `nn.Module`."""
        return any(
            path.startswith("torch.nn.") or path.endswith((".LightningModule", ".PreTrainedModel"))
            for path in self.libraries()
        )

    def is_dataset(self) -> bool:
        """Whether it is a data set of `torch.utils.data`, or of torchvision."""
        return any(
            path.startswith(("torch.utils.data.", "torchvision.datasets."))
            and "Sampler" not in path
            for path in self.libraries()
        )


@dataclass(eq=False)
class Scope:
    """The names of a function, class body or file, and those around it."""

    names: Env
    outer: Scope | None = None
    globals: set[str] = field(default_factory=set)

    def home(self, name: str) -> Scope | None:
        """The scope that binds this name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope
            scope = scope.outer
        return None
