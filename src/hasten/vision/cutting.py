"""Cutting a square out of a picture as it is stored: which rows and columns, turned how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import scratch
from .resizing import square_of

# Of a picture as it is stored, for each EXIF orientation: swap its axes, then turn rows, columns.
UPRIGHT = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
Scale = tuple[float, float]
"""Pixels there are for each pixel of the picture: down, across."""

_BITS_BEFORE = np.array([0, 8, 16], np.uint32)[:, None, None]
"""In a word of four bytes, those before each channel."""

_PLAIN_COLOURS_FROM = 1.5  # pixels for each one wanted; below that plain colours may show


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A part of an upright image, in its pixels."""

    top: int
    left: int
    height: int
    width: int
    mirror: bool = False
    """Mirror it left to right."""


class Picture(Protocol):
    """A picture that can be cut: a file's header, or a copy."""

    height: int
    """Stored pixels down."""
    width: int
    """Stored pixels across."""
    orientation: int
    """EXIF orientation 1..8."""

    def scale_for(self, shortest: int, size: int) -> int:
        """Eighths of the size to decode at, so that ``shortest`` pixels serve for ``size``."""
        ...

    def pixels(
        self, scale: int, *, plain_colours: bool, brief: bool = False
    ) -> tuple[NDArray[np.uint8], Scale]:
        """Pixels as they are stored, uint8 [H, W, C], and the scale that they came out at.

        Where they are needed for a ``brief`` time only, they may lie in memory that this thread's
        next picture takes, and beside red, green and blue there may be a fourth byte of no meaning.
        """
        ...


@dataclass(slots=True)
class Copy:
    """A decoded picture at the size that is needed at most, not turned upright."""

    content: NDArray[np.uint8]
    """uint8 [H, W, C]."""
    height: int
    """Of the picture that it was made of, in its pixels."""
    width: int
    """Likewise."""
    orientation: int

    def scale_for(self, shortest: int, size: int) -> int:
        """Whole: it is decoded."""
        return 8

    def pixels(
        self, scale: int, *, plain_colours: bool, brief: bool = False
    ) -> tuple[NDArray[np.uint8], Scale]:
        """What it holds."""
        high, wide = self.content.shape[:2]
        return self.content, (high / self.height, wide / self.width)


def upright_size(picture: Picture | Copy) -> tuple[int, int]:
    """Height and width after turning it upright."""
    if picture.orientation >= 5:
        return picture.width, picture.height
    return picture.height, picture.width


def plain_colours(picture: Picture | Copy, size: int) -> bool:
    """Whether a JPEG's colours, which most store at half the size, need no smoothing.

    It does not show where the picture is shrunk afterwards. It depends on the picture alone, not
    on the part, so that a decoded copy serves for every part.
    """
    return min(picture.height, picture.width) >= _PLAIN_COLOURS_FROM * size


def cut(
    picture: Picture | Copy,
    choose: Callable[[int, int], Crop],
    size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Decode a part of a picture to a square, as cheaply as its quality allows.

    Args:
        picture: to cut.
        choose: given the upright image's height and width, says which part.
        size: side of the square, in pixels.
        out: host memory to write it to; left alone where its shape or type is another.

    Returns:
        uint8 [C, size, size]: ``out``, or else one of its own, contiguous.
    """
    swap, turn_rows, turn_columns = UPRIGHT[picture.orientation]
    height, width = upright_size(picture)
    crop = choose(height, width)
    rows, columns = (crop.top, crop.top + crop.height), (crop.left, crop.left + crop.width)
    if turn_rows:
        rows = height - rows[1], height - rows[0]
    if turn_columns:
        columns = width - columns[1], width - columns[0]
    if swap:
        rows, columns = columns, rows
    wanted = picture.scale_for(min(crop.height, crop.width), size)
    plain = plain_colours(picture, size)
    pixels, scale = picture.pixels(wanted, plain_colours=plain, brief=True)
    reduced = [
        (edges[0] * share, edges[1] * share)
        for edges, share in zip((rows, columns), scale, strict=True)
    ]
    square = square_of(pixels, reduced[0], reduced[1], size)
    if swap:
        square = square.swapaxes(0, 1)
    if turn_rows:
        square = square[::-1]
    if turn_columns != crop.mirror:
        square = square[:, ::-1]
    channels = min(square.shape[2], 3)
    if out is None or out.shape != (channels, size, size) or out.dtype != torch.uint8:
        out = torch.empty((channels, size, size), dtype=torch.uint8, device="cpu")
    _lay_apart(square, out.numpy())
    return out


def _lay_apart(square: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    """Write [S, S, C] as [C, S, S]; of four channels the first three.

    By numpy: each thread that calls torch for this would get a pool of torch's threads.
    """
    if square.shape[2] != 4:
        np.copyto(planes, square.transpose(2, 0, 1))
        return
    # By whole pixels, which the processor does many of at once: twice as fast as by bytes. All in
    # one call, as after each a thread waits for the interpreter's lock.
    words = square.view("<u4")[:, :, 0]
    if not words.flags.c_contiguous:
        turned = _words("turned", words.shape)
        np.copyto(turned, words)
        words = turned
    np.right_shift(words[None], _BITS_BEFORE, out=planes, casting="unsafe")


def _words(purpose: str, shape: tuple[int, ...]) -> NDArray[np.uint32]:
    return scratch.empty(purpose, (*shape, 4)).view("<u4")[..., 0]
