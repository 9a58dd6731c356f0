"""Moving nested data to a device: ``move``, and what it says of things that it cannot move."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hasten.devices import runtime
from hasten.devices.walking import Walk

T = TypeVar("T")


class NotMovedWarning(UserWarning):
    """Something in the nest stays where it was; the message names its path and its type."""


def move(obj: T, device: torch.device | str | int, *, non_blocking: bool | None = None) -> T:
    """The same nest with every tensor on ``device``; nothing is copied that is there already.

    Looks into tuples, lists, namedtuples, mappings, dataclasses, attrs classes, namespaces and
    deques, keeping their types, and into anything with a ``.to(device)``. A container none of
    whose tensors moved comes back as the same object; the given one is never changed, except
    that an ``nn.Module`` and an optimizer's state are moved in place, as ``Module.to`` does, and
    an object's own ``.to`` may do as it likes. A tensor that occurs twice is moved once. Strings,
    numbers, None and sets are left alone.

    NumPy arrays stay in host memory. They, iterators, and objects that hold tensors but cannot
    be moved are named in a ``NotMovedWarning``, once for each type in a process.

    Args:
        obj: any nest.
        device: where to; a name needs no index.
        non_blocking: whether the host goes on while a copy runs. None does so where it is safe
            and of use: from pinned memory to a device that overlaps copies. Copies to the host
            always block, since what they bring may be read at once.

    Raises:
        UsageError: a container holds itself.
        RuntimeError: the device has no memory left, or refuses the tensor's dtype.
    """
    if _is_there(obj, device):
        return obj
    walk = _Move(device, non_blocking)
    moved = walk.visit(obj, "")
    for path, what, advice in walk.left:
        warnings.warn(
            f"hasten.move leaves {path or 'the object'} where it is: {what}. {advice}",
            NotMovedWarning,
            stacklevel=2,
        )
    return moved  # type: ignore[no-any-return]


def _is_there(obj: object, device: object) -> bool:
    """Whether it is plainly in place: a tensor, or a plain container of nothing but tensors.

    Most batches are two tensors; of those that a loader has moved already no walk is due.
    """
    kind = type(obj)
    if kind is torch.Tensor:
        return obj.device == device  # type: ignore[attr-defined, no-any-return]
    if kind is tuple or kind is list:
        items = obj
    elif kind is dict:
        items = obj.values()  # type: ignore[attr-defined]
    else:
        return False
    for item in items:  # type: ignore[attr-defined]  # noqa: SIM110  (a generator costs more)
        if type(item) is not torch.Tensor or item.device != device:
            return False
    return True


_said: set[type] = set()
"""Types that were named in a warning already: a batch of each step would repeat it."""


class _Move(Walk):
    """One call of ``move``: where to, and what stays."""

    name = "hasten.move"

    def __init__(self, device: torch.device | str | int, non_blocking: bool | None) -> None:
        super().__init__()
        self.device = runtime.with_index(torch.device(device))
        overlap = runtime.can_overlap(self.device)
        self.non_blocking = overlap and non_blocking is not False
        self.pinned_only = non_blocking is None
        self.left: list[tuple[str, str, str]] = []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            return tensor
        overlap = self.non_blocking
        if overlap and self.pinned_only:
            overlap = runtime.is_host(tensor.device) and tensor.is_pinned()
        return tensor.to(self.device, non_blocking=overlap)

    def container(self, obj: Any, path: str) -> Any:
        if isinstance(obj, PackedSequence):
            packed: Any = obj  # its annotations know less than its method takes
            return packed.to(self.device, non_blocking=self.non_blocking)
        if isinstance(obj, nn.Module):
            return obj.to(self.device)
        if isinstance(obj, torch.optim.Optimizer):
            return self.optimizer(obj, path)
        if callable(getattr(obj, "to", None)):
            return self.own(obj, path)
        return super().container(obj, path)

    def optimizer(self, obj: torch.optim.Optimizer, path: str) -> Any:
        for place, group in enumerate(obj.param_groups):
            # Step counters stay on the host, unless the kernels of the optimizer read them.
            counters_too = bool(group.get("fused") or group.get("capturable"))
            for number, parameter in enumerate(group["params"]):
                state = obj.state.get(parameter, {})
                where = f"{path}.state[param_groups[{place}]['params'][{number}]]"
                for name, value in state.items():
                    counter = isinstance(value, torch.Tensor) and value.dim() == 0
                    if counters_too or not counter:
                        state[name] = self.visit(value, f"{where}[{name!r}]")
        return obj

    def own(self, obj: Any, path: str) -> Any:
        """Move by the object's own ``to``, which may work in place and return nothing."""
        try:
            try:
                moved = obj.to(self.device, non_blocking=self.non_blocking)
            except TypeError:
                moved = obj.to(self.device)
        except (TypeError, ValueError, AttributeError) as error:
            # A ``to`` of another meaning, such as a quantity's conversion of units.
            self.stays(obj, path, f"its own .to({self.device}) failed: {error}")
            return obj
        return obj if moved is None else moved

    def unknown(self, obj: Any, path: str) -> None:
        kind = type(obj)
        if kind in _said:
            return
        if kind.__name__ == "ndarray" and kind.__module__ in {"numpy", "cupy"}:
            self.stays(obj, path, "", "Make it a tensor first: torch.as_tensor(array).")
        elif isinstance(obj, Iterator):
            self.stays(obj, path, "an iterator cannot be looked into without using it up")
        elif held := _held_tensor(obj):
            self.stays(obj, path, f"it holds a tensor ({held}) and has no .to(device)")

    def stays(self, obj: Any, path: str, why: str, advice: str = "") -> None:
        kind = type(obj)
        if kind in _said:
            return
        _said.add(kind)
        advice = advice or "Give its class a method to(device), or move its tensors yourself."
        title = f"{kind.__module__}.{kind.__qualname__}"
        self.left.append((path, f"a {title}" + (f", {why}" if why else ""), advice))


def _held_tensor(obj: Any) -> str | None:
    """Path of a tensor within an object that ``move`` cannot rebuild; looks two levels deep."""
    for path, value in _parts(obj):
        if isinstance(value, torch.Tensor):
            return path
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            for inner, item in _parts(value):
                if isinstance(item, torch.Tensor):
                    return path + inner
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{place}]", value) for place, value in enumerate(obj))
    elif isinstance(obj, (set, frozenset)):
        yield from (("{…}", value) for value in obj)
    else:
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())
        for kind in type(obj).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(obj, name):
                    yield f".{name}", getattr(obj, name)
