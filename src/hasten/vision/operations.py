"""RandAugment's basics: a few operations for each image, drawn from a list of usual ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .colour import recoloured
from .geometry import moved
from .transform_base import (
    PixelTransform,
    Random,
    in_parts,
    need,
    spread,
    top,
    whole,
    within,
)

NAMES = (
    "nothing",
    "brightness",
    "contrast",
    "saturation",
    "hue",
    "posterize",
    "solarize",
    "turn",
    "shear_across",
    "shear_down",
    "shift_across",
    "shift_down",
)
"""The operations that there are; each is as likely as another."""

_TURN_RADIANS, _SHEAR, _SHIFT = math.radians(30), 0.3, 0.45  # at magnitude 1
_COLOUR, _HUE_TURN, _POSTERIZE_BITS = 0.9, 0.25, 4


class RandomOperations(PixelTransform):
    """So many operations for each image, each with a random strength up to ``magnitude``.

    Shapes change first, by one resampling however many operations change them; then colours; then
    ``solarize`` (turn over what is brighter than a threshold) and ``posterize`` (fewer levels).

    Args:
        count: of operations for each image.
        magnitude: of the strongest, 0..1. At 1 an image is turned by up to 30 degrees, sheared by
            0.3, shifted by 0.45 of its side; brightness, contrast and saturation change by up to
            0.9, hue by up to a quarter turn; four bits of eight are left.

    Raises:
        UsageError: a setting is out of its range.
    """

    def __init__(self, count: int = 2, magnitude: float = 0.3) -> None:
        self.count = whole(count, "RandomOperations' count", least=1)
        self.magnitude = within(magnitude, "RandomOperations' magnitude", 0, 1)

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Two columns are drawn for each of the operations."""
        drawn = need(rng, self).uniform(2 * self.count)
        strengths = {name: torch.zeros_like(drawn[:, 0]) for name in NAMES}
        for number in range(self.count):
            which = (drawn[:, 2 * number] * len(NAMES)).long().clamp(max=len(NAMES) - 1)
            strength = self.magnitude * spread(drawn[:, 2 * number + 1])
            for place, name in enumerate(NAMES):
                strengths[name] = strengths[name] + torch.where(which == place, strength, 0.0)
        return self._applied(images, strengths)

    def _applied(self, images: Tensor, by: dict[str, Tensor]) -> Tensor:
        images = moved(
            images,
            half_turn=math.tan(_TURN_RADIANS / 2) * by["turn"],
            shear=(_SHEAR * by["shear_across"], _SHEAR * by["shear_down"]),
            shift=(_SHIFT * by["shift_across"], _SHIFT * by["shift_down"]),
        )
        images = recoloured(
            images,
            brightness=(1 + _COLOUR * by["brightness"]).clamp(min=0),
            contrast=(1 + _COLOUR * by["contrast"]).clamp(min=0),
            saturation=(1 + _COLOUR * by["saturation"]).clamp(min=0),
            half_turn=math.tan(math.pi * _HUE_TURN) * by["hue"],
        )
        threshold = 1 - by["solarize"].abs().clamp(max=1)
        steps = 2 ** (8 - (_POSTERIZE_BITS * by["posterize"].abs().clamp(max=1)).round())
        return in_parts(_levelled, images, threshold, steps)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`hasten.vision.transforms.from_config`."""
        return {"name": "random_operations", "count": self.count, "magnitude": self.magnitude}

    def __repr__(self) -> str:
        return f"RandomOperations({self.count}, magnitude={self.magnitude})"


def _levelled(images: Tensor, threshold: Tensor, steps: Tensor) -> Tensor:
    """Solarized above the threshold (1: not at all) and cut to so many levels (256: not at all)."""
    brightest = top(images)
    threshold, steps = threshold[:, None, None, None], steps[:, None, None, None]
    over = (images >= threshold * brightest) & (threshold < 1)
    images = torch.where(over, brightest - images, images).to(images.dtype)
    if images.is_floating_point():
        levels = (images.to(torch.float32) * 255 / 256 * steps).floor() / steps * 256 / 255
        return torch.where(steps < 256, levels.to(images.dtype), images)
    each = (256 / steps).to(torch.int32)
    return (images.to(torch.int32).div(each, rounding_mode="floor") * each).to(images.dtype)
