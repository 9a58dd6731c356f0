"""Changes of shape, for a batch or one image: random parts resized, and what turns and shears."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .transform_base import (
    PixelTransform,
    Random,
    in_parts,
    like,
    need,
    ratio,
    whole,
    within,
)


class RandomResizedCrop(PixelTransform):
    """A random part of each image, resized, antialiased, by a triangle as Pillow's.

    The part has a ratio of width to height of 3:4 to 4:3 times the image's own; where it would not
    fit, it is cut to the image. Its edges may lie within pixels.

    Args:
        size: side of the square that comes out, in pixels; None keeps the images' size.
        least_area: that the part has of the image's area: above 0, at most 1.

    Raises:
        UsageError: a setting is out of its range.
    """

    def __init__(self, size: int | None = None, *, least_area: float = 0.35) -> None:
        self.size = None if size is None else whole(size, "RandomResizedCrop's size", least=1)
        self.least_area = within(least_area, "RandomResizedCrop's least_area", 1e-4, 1)

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Four columns are drawn."""
        drawn = need(rng, self).uniform(4)
        area = self.least_area + (1 - self.least_area) * drawn[:, 0]
        shape = ratio(drawn[:, 1], 4 / 3)
        taps: list[Tensor] = []
        for length, share, place in (
            (images.shape[2], (area * shape).sqrt(), drawn[:, 2]),
            (images.shape[3], (area / shape).sqrt(), drawn[:, 3]),
        ):
            size = share.clamp(max=1) * length
            taps += _taps(place * (length - size), size, length, self.size or length)
        return in_parts(_resampled, images, *taps)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`hasten.vision.transforms.from_config`."""
        return {"name": "random_resized_crop", "size": self.size, "least_area": self.least_area}

    def __repr__(self) -> str:
        return f"RandomResizedCrop({self.size}, least_area={self.least_area})"


def _taps(start: Tensor, size: Tensor, length: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Which pixels make each one that comes out, and by how much: int64, float32 [B, K, outputs].

    Args:
        start: float32 [B], where the part begins.
        size: float32 [B], of the part, in pixels.
        length: of the image, in pixels.
        outputs: pixels that come out.
    """
    step = (size / outputs)[:, None, None]
    reach = step.clamp(min=1)
    most = math.ceil(2 * max(length / outputs, 1.0)) + 1
    places = torch.arange(outputs, device=start.device, dtype=torch.float32)[None, None]
    centre = start[:, None, None] + (places + 0.5) * step
    number = torch.arange(most, device=start.device, dtype=torch.float32)[None, :, None]
    pixel = (centre - reach - 0.5).ceil() + number
    weight = (1 - (pixel + 0.5 - centre).abs() / reach).clamp(min=0)
    weight = weight * ((pixel >= 0) & (pixel < length))
    total = weight[:, 0]
    for tap in range(1, most):  # in this order in every batch
        total = total + weight[:, tap]
    return pixel.clamp(0, length - 1).long(), weight / total[:, None]


def _resampled(
    images: Tensor, rows: Tensor, row_weights: Tensor, columns: Tensor, column_weights: Tensor
) -> Tensor:
    values = images.to(torch.float32)
    values = _along(values, 2, rows[:, :, None, :, None], row_weights[:, :, None, :, None])
    values = _along(values, 3, columns[:, :, None, None], column_weights[:, :, None, None])
    return like(values, images)


def _along(values: Tensor, axis: int, pixels: Tensor, weights: Tensor) -> Tensor:
    """The sum over taps (axis 1 of the last two) of weighted pixels, tap after tap."""
    shape = list(values.shape)
    shape[axis] = pixels.shape[axis + 1]
    done = values.gather(axis, pixels[:, 0].expand(shape)) * weights[:, 0]
    for tap in range(1, pixels.shape[1]):
        done += values.gather(axis, pixels[:, tap].expand(shape)) * weights[:, tap]
    return done


def moved(
    images: Tensor,
    *,
    half_turn: Tensor,
    shear: tuple[Tensor, Tensor],
    shift: tuple[Tensor, Tensor],
) -> Tensor:
    """Images turned, sheared and shifted, each by its own amounts; what comes in is reflected.

    Images whose amounts are all 0 keep their bits.

    Args:
        images: uint8 or floating point [B, C, H, W].
        half_turn: float32 [B], the tangent of half the angle.
        shear: across and down, each float32 [B], of the side.
        shift: across and down, each float32 [B], of the side.
    """
    square = half_turn * half_turn
    cosine, sine = (1 - square) / (1 + square), 2 * half_turn / (1 + square)
    height, width = images.shape[2:]
    # From a pixel of the result to the place it comes from, in units of half a side.
    first = (cosine + shear[0] * sine, shear[0] * cosine - sine, -2 * shift[0])
    second = (sine + shear[1] * cosine, cosine - shear[1] * sine, -2 * shift[1])
    aspect = height / width
    first = (first[0], first[1] * aspect, first[2])
    second = (second[0] / aspect, second[1], second[2])
    map_ = torch.stack([torch.stack(first, 1), torch.stack(second, 1)], 1)
    same = (half_turn == 0) & (shear[0] == 0) & (shear[1] == 0) & (shift[0] == 0) & (shift[1] == 0)
    return in_parts(_sampled, images, map_, same)


def _sampled(images: Tensor, map_: Tensor, same: Tensor) -> Tensor:
    height, width = images.shape[2:]
    device = images.device
    down = (torch.arange(height, device=device) * 2 + 1).to(torch.float32) / height - 1
    across = (torch.arange(width, device=device) * 2 + 1).to(torch.float32) / width - 1
    grid = torch.stack(
        [
            across[None, None] * row[:, 0, None, None]
            + down[None, :, None] * row[:, 1, None, None]
            + row[:, 2, None, None]
            for row in map_.unbind(1)
        ],
        3,
    )
    values = torch.nn.functional.grid_sample(
        images.to(torch.float32), grid, padding_mode="reflection", align_corners=False
    )
    return torch.where(same[:, None, None, None], images, like(values, images))
