"""Batches of which a part was moved: which part stayed, and the line that leaves it behind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from hasten.script.rehearsal import syntax
from hasten.script.rehearsal.origins import Origin, Origins, address
from hasten.script.rehearsal.places import Place, Stack

_FRAMES = 6  # of the user's, in which the batch is looked for
_ITEMS = 64  # parts of one container that are looked at


class Left(NamedTuple):
    """A part that was left on the CPU, and where others beside it were moved."""

    path: str
    moved: Stack


def beside(
    tensor: torch.Tensor, origin: Origin | None, frames: list[FrameType], origins: Origins
) -> Left | None:
    """A batch, a dict or a tuple say, that holds this host tensor and others that were moved.

    Args:
        tensor: on the CPU.
        origin: how it came to be; a tensor made by the code that moves the others is none of them.
        frames: the user's frames, innermost first.
        origins: knows where device tensors arrived.
    """
    memory = address(tensor)
    if not memory or origin is None:
        return None
    for frame in frames[:_FRAMES]:
        for name, value in list(frame.f_locals.items()):
            held = list(_parts(name, value)) if not name.startswith("__") else []
            mine = next((p for p, t in held if t is tensor or _shares(t, memory)), None)
            if mine is None:
                continue
            arrived = (origins.arrived.get(address(t)) for _, t in held if t.device.type != "cpu")
            stack = next((places for places in arrived if places), None)
            if stack and not (origin.stack and _call(origin.stack[0]) in _mover(stack)):
                return Left(mine, stack)
    return None


def _shares(tensor: torch.Tensor, memory: int) -> bool:
    return tensor.device.type == "cpu" and address(tensor) == memory


def _mover(stack: Stack) -> list[tuple[str, str, int]]:
    """The call that moves: the innermost, and the one around it of a comprehension."""
    inner = 2 if stack[0].function.endswith(("comp>", "<genexpr>", "<lambda>")) else 1
    return [_call(place) for place in stack[:inner]]


def _call(place: Place) -> tuple[str, str, int]:
    return place.file, place.function, place.frame


def _parts(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", held) for key, held in list(value.items())[:_ITEMS]]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f"{path}.{name}", held) for name, held in zip(value._fields, value, strict=True)]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", held) for index, held in enumerate(value[:_ITEMS])]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f"{path}.{name}", held) for name, held in list(vars(value).items())]
    else:
        return
    for inner, held in items:
        if isinstance(held, torch.Tensor):
            yield inner, held
        elif depth:
            yield from _parts(inner, held, depth - 1)


def left_at(left: Left, tensor: torch.Tensor, frames: list[FrameType]) -> tuple[str, int]:
    """The file and line of the user's that leave a part of a batch behind.

    In this order: where it stands unmoved beside those that are moved, where the code that moves
    takes it out of the batch, where a mover gives back what it does not know, the move itself.
    """
    at = left.moved[0]
    keys = re.findall(r"\['(\w+)'\]|\.(\w+)", left.path)
    for key in reversed([a or b for a, b in keys]):
        line = syntax.left_beside(at.file, at.line, key)
        if line is not None:
            return at.file, line
    calls = {(place.frame, place.function): place for place in left.moved}
    for frame in frames:
        if (id(frame), frame.f_code.co_qualname) not in calls:
            continue
        for name in _names(tensor, frame):
            line = syntax.taken_apart(frame.f_code.co_filename, frame.f_lineno, name)
            if line is not None:
                return frame.f_code.co_filename, line
        break
    return at.file, syntax.passed_on(at.file, at.line) or at.line


def _names(tensor: torch.Tensor, frame: FrameType) -> list[str]:
    """The variables of a frame that hold a tensor."""
    memory = address(tensor)
    found = []
    for name, value in list(frame.f_locals.items()):
        whole = [value] if isinstance(value, torch.Tensor) else [t for _, t in _parts(name, value)]
        if any(part is tensor or _shares(part, memory) for part in whole):
            found.append(name)
    return found
