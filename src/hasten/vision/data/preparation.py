"""How an image file becomes the square that a model sees: where it is cut, and how large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hasten.errors import CheckpointError, UsageError
from hasten.vision.cutting import Crop
from hasten.vision.decode import decode_crop

LARGEST_SIZE = 4096
LEAST_AREA = 0.35
"""Of the image that a random part of it has."""
_RATIO = math.log(4 / 3)  # a random part is up to this much wider than high, or higher than wide
_TRIES = 10
_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The fixed way to a model's input, for validation and prediction: a square from the middle.

    Raises:
        UsageError: a setting is out of its range.
    """

    size: int
    """Side of the square, in pixels: 1..4096."""
    channels: int = 3
    """3 for RGB, 1 for grey."""
    crop_fraction: float = 1.0
    """Side of the part that is kept, of the image's shorter side: above 0, at most 1."""

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int):
            raise UsageError(f"the image size is a whole number of pixels, not {self.size!r}")
        if not 1 <= self.size <= LARGEST_SIZE:
            raise UsageError(f"the image size is within 1..{LARGEST_SIZE} pixels, not {self.size}")
        if self.channels not in (1, 3):
            raise UsageError(f"images have 1 or 3 channels, not {self.channels!r}")
        if not 0 < self.crop_fraction <= 1:
            raise UsageError(f"crop_fraction is above 0, at most 1, not {self.crop_fraction!r}")

    def __call__(self, source: bytes | str | Path, *, name: str | None = None) -> Tensor:
        """Read one image.

        Args:
            source: the file's path or its contents.
            name: what messages call it; by default its path.

        Returns:
            uint8 [channels, size, size].

        Raises:
            DataError: it cannot be used (a :class:`hasten.vision.decode.ImageError`).
        """
        return decode_crop(source, self.crop, size=self.size, channels=self.channels, name=name)

    def crop(self, height: int, width: int) -> Crop:
        """The square in the middle of an image of this height and width in pixels."""
        side = max(1, round(min(height, width) * self.crop_fraction))
        return Crop(top=(height - side) // 2, left=(width - side) // 2, height=side, width=side)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :meth:`from_config`."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Preparation:
        """Rebuild what :meth:`to_config` gave, as read from a checkpoint's JSON.

        Raises:
            CheckpointError: it is not usable.
        """
        try:
            return cls(**config)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the stored preparation of images {config!r:.200} cannot be used: {error}"
            ) from error


def random_crop(height: int, width: int, key: int) -> Crop:
    """A random part of an image, mirrored half of the time, that follows from ``key`` alone.

    It has at least ``LEAST_AREA`` of the image's area and a ratio of width to height of 3:4 to
    4:3; where no such part fits into a very long image, it is the largest from the middle.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        key: 64 bits.
    """
    mirror = _draw(key, 1) < 0.5
    for first in range(2, 2 + 2 * _TRIES, 2):
        area = height * width * (LEAST_AREA + (1 - LEAST_AREA) * _draw(key, first))
        ratio = math.exp(_RATIO * (2 * _draw(key, first + 1) - 1))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            top = int(_draw(key, first + 2) * (height - high + 1))
            left = int(_draw(key, first + 3) * (width - wide + 1))
            return Crop(top=top, left=left, height=high, width=wide, mirror=mirror)
    longest = math.exp(_RATIO)
    wide = max(1, min(width, round(height * longest)))
    high = max(1, min(height, round(width * longest)))
    return Crop(
        top=(height - high) // 2, left=(width - wide) // 2, height=high, width=wide, mirror=mirror
    )


def _draw(key: int, number: int) -> float:
    """The ``number``-th draw in [0, 1) from a key, by splitmix64.

    numpy's generators take ten microseconds to be made, for each image.
    """
    state = (key + number * 0x9E3779B97F4A7C15) & _MASK
    word = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return ((word ^ (word >> 31)) >> 11) * 2.0**-53
