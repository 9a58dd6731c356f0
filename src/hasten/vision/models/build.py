"""From a model's name to the model, and from a checkpoint's description back to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hasten.errors import CheckpointError, UsageError
from hasten.vision.models.external import (
    from_file,
    from_timm,
    from_torchvision,
    names_a_file,
    suggest,
)
from hasten.vision.models.lesson import Lesson
from hasten.vision.models.resnet import resnet18, resnet34, resnet50
from hasten.vision.models.small import Small

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "lesson": Lesson,
    "small": Small,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}

# What a checkpoint may ask for before its weights are seen; more is a mistake or an attack.
_LIMITS = {"classes": 1_000_000, "channels": 1024, "image_size": 16_384}


def names() -> list[str]:
    """The names of hasten's own models, smallest first."""
    return list(_BUILDERS)


def create(name: str, *, classes: int, channels: int = 1, image_size: int = 28) -> nn.Module:
    """Build a model with fresh weights, on the CPU in float32.

    Args:
        name: one of ``names()``, ``timm:NAME``, ``torchvision:NAME``, or
            ``path/to/file.py:factory`` (the file is run; ``factory`` is called with those of
            ``classes``, ``channels`` and ``image_size`` that it takes).
        classes: number of classes; the model gives scores [B, classes].
        channels: of the images.
        image_size: side of the images, in pixels; they are [B, channels, image_size, image_size].

    Raises:
        UsageError: no such model, a library that is not installed, a file or function that is not
            there or gives no module, or images that the model cannot take.
    """
    for what, value in (("classes", classes), ("channels", channels), ("image_size", image_size)):
        if value < 1:
            raise UsageError(f"{what} must be 1 or more, not {value}")
    if names_a_file(name):
        return from_file(name, classes=classes, channels=channels, image_size=image_size)
    library, colon, rest = name.partition(":")
    if colon and library == "timm":
        return from_timm(rest, classes=classes, channels=channels, image_size=image_size)
    if colon and library == "torchvision":
        return from_torchvision(rest, classes=classes, channels=channels, image_size=image_size)
    if name not in _BUILDERS:
        raise UsageError(
            f"no model named {name!r}{suggest(name, names())}; there are {', '.join(names())}, "
            "timm:NAME, torchvision:NAME and path/to/file.py:factory"
        )
    return _BUILDERS[name](classes=classes, channels=channels, image_size=image_size)


def describe(name: str, *, classes: int, channels: int, image_size: int) -> dict[str, Any]:
    """What a checkpoint keeps of a model so that it can be built again: JSON values."""
    return {"name": name, "classes": classes, "channels": channels, "image_size": image_size}


def from_description(description: dict[str, Any], *, allow_file: str | None = None) -> nn.Module:
    """Build the model that a checkpoint describes, with fresh weights.

    Args:
        description: from ``describe``.
        allow_file: the ``path/to/file.py:factory`` that the person asked for; a description that
            names a file is built from this one, and from no other.

    Raises:
        UsageError: the description names a file, which is code, and ``allow_file`` is not given.
        CheckpointError: the description is broken.
    """
    name = description.get("name")
    wrong = [
        key
        for key, limit in _LIMITS.items()
        if type(description.get(key)) is not int or not 1 <= description[key] <= limit
    ]
    if not isinstance(name, str) or wrong:
        raise CheckpointError(
            f"the checkpoint describes its model as {description!r}, which cannot be: "
            f"{', '.join(wrong) or 'name'}"
        )
    if names_a_file(name):
        if allow_file is None:
            raise UsageError(
                f"the model was made by {name}, and a checkpoint never runs code by itself: "
                f"pass --model {name} to allow it"
            )
        name = allow_file
    return create(name, **{key: description[key] for key in _LIMITS})
