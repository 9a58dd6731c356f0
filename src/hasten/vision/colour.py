"""Changes of colour and light, for a batch or one image: all of them are one linear map a pixel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .transform_base import (
    PixelTransform,
    Random,
    finite,
    in_parts,
    like,
    need,
    ratio,
    spread,
    within,
)

_LUMA = (0.299, 0.587, 0.114)
_THOUSANDTHS = (299, 587, 114)
_MOST_HUE = 0.45  # of a turn: the tangent of half the angle has to be finite
_STEPS = 65535  # floating-point images are summed as whole numbers of so many steps


def _turning() -> list[list[float]]:
    """What turns colours by a quarter round the axis of greys, and leaves their light (YIQ)."""
    to_yiq = np.array([_LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
    quarter = np.array([(0, 0, 0), (0, 0, -1), (0, 1, 0)])
    matrix: list[list[float]] = (np.linalg.inv(to_yiq) @ quarter @ to_yiq).tolist()
    return matrix


_TURN = _turning()


class ColourJitter(PixelTransform):
    """Change brightness, contrast, saturation and hue, each by a random amount.

    Args:
        brightness: the light is multiplied by 1 - brightness to 1 + brightness.
        contrast: the distance from the image's mean light, likewise.
        saturation: the distance from grey, likewise; grey images have none.
        hue: colours are turned by up to this share of a turn either way: at most 0.45.

    Raises:
        UsageError: a strength is out of its range.
    """

    def __init__(
        self,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
    ) -> None:
        self.brightness = within(brightness, "ColourJitter's brightness", 0, 1)
        self.contrast = within(contrast, "ColourJitter's contrast", 0, 1)
        self.saturation = within(saturation, "ColourJitter's saturation", 0, 1)
        self.hue = within(hue, "ColourJitter's hue", 0, _MOST_HUE)

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Four columns are drawn."""
        drawn = spread(need(rng, self).uniform(4))
        return recoloured(
            images,
            brightness=1 + self.brightness * drawn[:, 0],
            contrast=1 + self.contrast * drawn[:, 1],
            saturation=1 + self.saturation * drawn[:, 2],
            half_turn=math.tan(math.pi * self.hue) * drawn[:, 3],
        )

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`hasten.vision.transforms.from_config`."""
        return {"name": "colour_jitter", **self._settings()}

    def _settings(self) -> dict[str, float]:
        names = ("brightness", "contrast", "saturation", "hue")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"ColourJitter({', '.join(f'{k}={v}' for k, v in self._settings().items())})"


def recoloured(
    images: Tensor,
    *,
    brightness: Tensor,
    contrast: Tensor,
    saturation: Tensor,
    half_turn: Tensor,
) -> Tensor:
    """Images with colours changed, each by its own factors (1 leaves them), clipped at the end.

    Args:
        images: uint8 [B, C, H, W], or floating-point ones of 0..1; of 1 or 3 channels the
            latter's colours change, of others all are treated as grey.
        brightness: float32 [B].
        contrast: float32 [B].
        saturation: float32 [B].
        half_turn: float32 [B], the tangent of half the angle by which colours turn.
    """
    strength = brightness * contrast
    offset = (1 - contrast) * brightness * _mean_light(images)
    if images.shape[1] != 3:
        return in_parts(_scaled, images, strength, offset)
    square = half_turn * half_turn
    cosine, sine = (1 - square) / (1 + square), 2 * half_turn / (1 + square)
    rows = []
    for row in range(3):
        columns = []
        for column in range(3):
            light = _LUMA[column]
            colour = (1.0 if row == column else 0.0) - light
            chroma = saturation * (cosine * colour + sine * _TURN[row][column])
            columns.append(strength * (light + chroma))
        rows.append(torch.stack(columns, 1))
    return in_parts(_mixed, images, torch.stack(rows, 1), offset)


def _scaled(images: Tensor, strength: Tensor, offset: Tensor) -> Tensor:
    values = images.to(torch.float32, copy=True)
    values *= strength[:, None, None, None]
    values += offset[:, None, None, None]
    return like(values, images)


def _mixed(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    planes = images.to(torch.float32).unbind(1)
    factors = matrix[:, :, :, None, None]
    # Multiplied and added one by one: a matrix product may round otherwise in another batch.
    values = torch.stack([planes[0]] * 3, 1).mul_(factors[:, :, 0])
    for number in (1, 2):
        values += planes[number][:, None] * factors[:, :, number]
    values += offset[:, None, None, None]
    return like(values, images)


def _mean_light(images: Tensor) -> Tensor:
    """float32 [B], of sums of whole numbers: the same in whatever order they are added up."""
    pixels = images.shape[2] * images.shape[3]
    exact = images
    divisor = float(pixels)
    if images.is_floating_point():
        exact = (images.to(torch.float32) * _STEPS).round().to(torch.int32)
        divisor *= _STEPS
    sums = exact.sum((2, 3), dtype=torch.int64)
    if images.shape[1] != 3:
        return sums.sum(1).to(torch.float32) / (divisor * images.shape[1])
    light = sums[:, 0] * _THOUSANDTHS[0]
    for channel in (1, 2):
        light = light + sums[:, channel] * _THOUSANDTHS[channel]
    return light.to(torch.float32) / (1000 * divisor)


class RandomErasing(PixelTransform):
    """Blank a rectangle in some of the images.

    Args:
        probability: that an image gets one.
        least_area: of the rectangle, of the image's.
        most_area: likewise.
        fill: value of its pixels.

    Raises:
        UsageError: a setting is out of its range.
    """

    def __init__(
        self,
        probability: float = 0.25,
        *,
        least_area: float = 0.02,
        most_area: float = 0.33,
        fill: float = 0,
    ) -> None:
        self.probability = within(probability, "RandomErasing's probability", 0, 1)
        self.least_area = within(least_area, "RandomErasing's least_area", 0, 1)
        self.most_area = within(most_area, "RandomErasing's most_area", self.least_area, 1)
        self.fill = finite(fill, "RandomErasing's fill")

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Five columns are drawn."""
        drawn = need(rng, self).uniform(5)
        height, width = images.shape[2:]
        area = self.least_area + (self.most_area - self.least_area) * drawn[:, 1]
        shape = ratio(drawn[:, 2], 10 / 3)
        inside = drawn[:, 0] < self.probability
        masks = []
        for length, share, place in (
            (height, (area * shape).sqrt(), drawn[:, 3]),
            (width, (area / shape).sqrt(), drawn[:, 4]),
        ):
            size = (share * length).round().clamp(max=length)
            start = (place * (length - size + 1)).floor().clamp(max=length - 1)
            at = torch.arange(length, device=images.device)[None]
            masks.append((at >= start[:, None]) & (at < (start + size)[:, None]))
        rectangle = masks[0][:, None, :, None] & masks[1][:, None, None, :]
        return images.masked_fill(rectangle & inside[:, None, None, None], self.fill)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`hasten.vision.transforms.from_config`."""
        return {
            "name": "random_erasing",
            "probability": self.probability,
            "least_area": self.least_area,
            "most_area": self.most_area,
            "fill": self.fill,
        }

    def __repr__(self) -> str:
        return (
            f"RandomErasing({self.probability}, least_area={self.least_area}, "
            f"most_area={self.most_area}, fill={self.fill})"
        )
