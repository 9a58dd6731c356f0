"""What a name may hold after two ways of getting there."""

from __future__ import annotations

from hasten.script.flow.values import (
    Const,
    DeviceValue,
    Guard,
    Lib,
    Module,
    Place,
    Tensor,
    Unknown,
    Value,
)

GPU_NAMES = ("cuda", "mps", "xpu", "hip", "gpu")


def place_of_name(name: str) -> Place | None:
    """The place that a device string names."""
    if name.startswith("cpu"):
        return "cpu"
    return "dev" if name.startswith(GPU_NAMES) else None


def join(one: Value, other: Value) -> Value:
    """A value that says no more than both do. A thing that may also be None stays the thing."""
    if one is other:
        return one
    if isinstance(one, Const) and isinstance(other, Const):
        if one.value == other.value and type(one.value) is type(other.value):
            return one
        if one.value is None:
            return other
        if other.value is None:
            return one
        if isinstance(one.value, str) and isinstance(other.value, str):
            places = {place_of_name(one.value), place_of_name(other.value)}
            if places == {"cpu", "dev"}:
                return DeviceValue("dev", fallback=True)
        return Unknown(origin=None)
    if isinstance(one, Const) and one.value is None and not isinstance(other, Guard):
        return other
    if isinstance(other, Const) and other.value is None and not isinstance(one, Guard):
        return one
    if isinstance(one, (DeviceValue, Const)) and isinstance(other, (DeviceValue, Const)):
        return _devices(one, other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _tensors(one, other)
    if isinstance(one, Module) and isinstance(other, Module):
        for outer, inner in ((one, other), (other, one)):
            if outer.extra.get("wraps") is inner:
                if outer.extra.get("unwrapped"):  # `model.module if parallel else model`
                    plain: Value = inner
                    return plain
                outer.extra["maybe"] = True
                return outer
        if one.lib and one.lib == other.lib and not one.fields and not other.fields:
            return one
    options = (*_options(one), *_options(other))
    if options:
        return Unknown(options=options)
    if isinstance(one, Lib) and isinstance(other, Lib) and one.path == other.path:
        return one
    graph = getattr(one, "graph", False) is True and getattr(other, "graph", False) is True
    return Unknown(graph=graph)


def _options(value: Value) -> tuple[Module, ...]:
    if isinstance(value, Module):
        return (value,)
    return value.options if isinstance(value, Unknown) else ()


def _devices(one: DeviceValue | Const, other: DeviceValue | Const) -> Value:
    places = []
    for value in (one, other):
        if isinstance(value, DeviceValue):
            places.append(value.place)
        elif isinstance(value.value, str):
            places.append(place_of_name(value.value))
        else:
            return Unknown()
    if "dev" in places:
        return DeviceValue("dev", fallback=True)
    return DeviceValue("cpu") if places == ["cpu", "cpu"] else DeviceValue(None)


def _tensors(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(
        place=one.place if one.place == other.place else None,
        ndim=one.ndim if one.ndim == other.ndim else None,
        graph=one.graph and other.graph,
        origin=one.origin or other.origin,
        registered=one.registered and other.registered,
        pinned=one.pinned and other.pinned,
    )
