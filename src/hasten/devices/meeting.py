"""Do tensors meet on one device? ``same_device``, and the message that mends it where not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hasten.devices import runtime
from hasten.devices.naming import argument_names
from hasten.devices.places import Kind, Place, places
from hasten.errors import DeviceMismatch

SHOWN = 10
"""Offending tensors that a message names; the error's ``tensors`` holds all."""


def same_device(*objs: Any, **named: Any) -> torch.device | None:
    """The one device that all tensors of the objects lie on; None if there are no tensors.

    Looks into whatever ``hasten.move`` looks into, into modules (parameters, buffers, and tensors
    and modules that hide in plain attributes, lists and dictionaries, where ``Module.to`` does
    not see them) and into optimizers' states. As on CUDA, a CPU tensor without dimensions
    agrees with any device. A model that is spread over several devices on purpose does not meet.

    Args:
        objs: models, batches, losses, optimizers, …; named in messages as the caller wrote them.
        named: the same with names of your own: ``same_device(teacher=models[0])``.

    Raises:
        DeviceMismatch: names each tensor by its path and device, and says what to do.
    """
    roots = dict(zip(argument_names(len(objs)), objs, strict=True))
    if len(roots) < len(objs):  # the same expression twice
        roots = {f"argument {place}": obj for place, obj in enumerate(objs, 1)}
    found = places({**roots, **named})
    strict = [place for place in found if not _agrees_with_any(place)] or found
    counts = Counter(place.device for place in strict)
    if len(counts) <= 1:
        return next(iter(counts), None)
    raise _mismatch(strict, counts)


def _agrees_with_any(place: Place) -> bool:
    return place.scalar and runtime.is_host(place.device)


def _mismatch(found: list[Place], counts: Counter[torch.device]) -> DeviceMismatch:
    target = _meeting_place(counts)
    strays = [place for place in found if place.device != target]
    lines = [
        f"tensors that must meet on one device lie on {len(counts)}: "
        + ", ".join(f"{count} on {device}" for device, count in counts.most_common())
    ]
    for place in strays[:SHOWN]:
        lines.append(f"  {place.path} is on {place.device} ({place.describe()})")
    if len(strays) > SHOWN:
        lines.append(f"  … and {len(strays) - SHOWN} more that are not on {target}")
    mending = list(dict.fromkeys(_mend(place, target) for place in strays))
    lines += ["What to do:", *(f"  {line}" for line in mending[:SHOWN])]
    return DeviceMismatch("\n".join(lines), {place.path: str(place.device) for place in found})


def _meeting_place(counts: Counter[torch.device]) -> torch.device:
    """Where they should meet: who put anything on an accelerator means to compute there."""
    real = {d: n for d, n in counts.items() if d.type != "meta"}
    away = {d: n for d, n in real.items() if not runtime.is_host(d)}
    among = away or real or dict(counts)
    return max(among, key=lambda device: among[device])


def _mend(place: Place, target: torch.device) -> str:
    to, root, owner, name = f"'{target}'", place.root, place.owner, place.name
    if place.device.type == "meta" and place.kind is Kind.DATA:
        return f"{root} has no numbers: create it on {target}, not on meta"
    if place.device.type == "meta" and place.kind is Kind.REGISTERED:
        return _code(root, "{}.to_empty(device=" + to + "), then load or initialise its weights")
    match place.kind:
        case Kind.REGISTERED:
            return _code(root, "{}.to(" + to + ")")
        case Kind.DATA:
            return _code(root, "{0} = hasten.move({0}, " + to + ")")
        case Kind.STATE:
            return _code(root, "hasten.move({}, " + to + ")  # the optimizer's state, in place")
        case Kind.OPTIMIZED:
            return f"move the model whose parameters {root} holds to {to}, before making {root}"
        case Kind.HIDDEN:
            return f"self.{name} of {owner} is no registered module: move it too, with .to({to})"
        case _:
            return f"in {owner}.__init__: {_registration(place)}"


def _registration(place: Place) -> str:
    """The line of a module's ``__init__`` that makes ``Module.to`` see what it holds."""
    name = place.name
    match place.kind:
        case Kind.LISTED_PARAMETER:
            return (
                f"self.{name} = nn.ParameterList(…) (ParameterDict for a dictionary), so that "
                ".to(device) and the optimizer see them"
            )
        case Kind.LISTED_TENSOR:
            return (
                f'register each tensor of self.{name} as a buffer (self.register_buffer("{name}_0"'
                ", …)), or nn.ParameterList if they are trained"
            )
        case Kind.HIDDEN_IN_LIST:
            return (
                f"self.{name} = nn.ModuleList(…) in place of the plain list, so that .to(device) "
                "and the optimizer see its modules"
            )
        case Kind.HIDDEN_IN_DICT:
            return (
                f"self.{name} = nn.ModuleDict(…) in place of the plain dictionary, so that "
                ".to(device) and the optimizer see its modules"
            )
        case _:
            return (
                f'self.register_buffer("{name}", …) in place of self.{name} = …, so that '
                ".to(device) takes it along"
            )


def _code(root: str, line: str) -> str:
    """A line of code about ``root``; about ``…`` where the caller gave it no name."""
    return line.format("…") + f"  # {root}" if root.startswith("argument ") else line.format(root)
