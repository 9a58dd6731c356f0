"""Follow a file from its first line, then what nothing in it calls: the facts for the rules."""

from __future__ import annotations

import libcst as cst

from hasten.script.flow.facts import Facts
from hasten.script.flow.state import OutOfBudget
from hasten.script.flow.statements import Statements
from hasten.script.flow.values import (
    ClassValue,
    DeviceValue,
    Function,
    Module,
    Scope,
    Unknown,
    Value,
)

_DEVICE_NAMES = ("device", "dev")


def follow(module: cst.Module) -> Facts:
    """What a file does with devices, as far as reading it tells."""
    flow = Statements()
    try:
        flow.block(module.body)
        _follow_uncalled(flow)
    except (OutOfBudget, RecursionError):
        flow.facts.gave_up = True
    return flow.facts


def _follow_uncalled(flow: Statements) -> None:
    """Functions that the file defines and nothing in it calls: their arguments are not known."""
    flow.assumed = True
    flow.journals.clear()
    flow.around.clear()
    for function in sorted(flow.facts.functions, key=_first):
        if flow.entered.get(function.node):
            continue
        if function.name == "__init__" and function.owner is not None:
            _receiver(flow, function.owner)
            continue
        flow.scope = Scope({}, function.scope)
        bound = function
        if function.owner is not None and "staticmethod" not in function.marks:
            bound = function.bind(_receiver(flow, function.owner))
        flow.call_function(function.node, bound, _arguments(bound), {})


def _first(function: Function) -> bool:
    """Functions that read like a main program go first, since they call the others."""
    return not function.name.startswith(("main", "train", "run", "fit"))


def _receiver(flow: Statements, cls: ClassValue) -> Value:
    """An object of a class that nothing makes: a module is taken to have been moved."""
    cache = getattr(flow, "_receivers", None)
    if cache is None:
        cache = {}
        flow._receivers = cache  # type: ignore[attr-defined]
    if cls not in cache:
        init = cls.find("__init__")
        args = _arguments(init)[1:] if isinstance(init, Function) else []
        made = flow.instantiate(cls.node, cls, args, {})
        if isinstance(made, Module):
            flow.move_module(cls.node, made, "dev", inside=True)
        cache[cls] = made
    return cache[cls]  # type: ignore[no-any-return]


def _arguments(function: Function) -> list[Value]:
    params = function.node.params
    names = [p.name.value for p in (*params.posonly_params, *params.params)]
    if function.bound is not None and names:
        names = names[1:]
    return [
        DeviceValue("dev", fallback=True) if name in _DEVICE_NAMES
        else Unknown(name, argument=True)
        for name in names
    ]  # fmt: skip
