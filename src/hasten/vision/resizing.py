"""From decoded pixels to the square that is wanted: a part of them, resized, antialiased.

Both ways release the interpreter lock.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Edges = tuple[float, float]


def square_of(
    pixels: NDArray[np.uint8], rows: Edges, columns: Edges, size: int
) -> NDArray[np.uint8]:
    """A part of an image as a square, antialiased (a triangle as wide as what a pixel covers).

    Args:
        pixels: uint8 [H, W, C], C of 1 or 3.
        rows: where the part begins and ends, in pixels; of a picture decoded at a reduced scale,
            these may lie within pixels.
        columns: likewise.
        size: side of the square, in pixels.

    Returns:
        uint8 [size, size, C].
    """
    top, bottom = _whole(rows, pixels.shape[0])
    left, right = _whole(columns, pixels.shape[1])
    part = pixels[top:bottom, left:right]
    # Of the part, in its own pixels, as Pillow has it: left, top, right, bottom.
    box = (
        max(columns[0] - left, 0.0),
        max(rows[0] - top, 0.0),
        min(columns[1] - left, right - left),
        min(rows[1] - top, bottom - top),
    )
    if box == (0.0, 0.0, float(right - left), float(bottom - top)):
        return resized_to(part, size, size)
    return _resized_box(part, box, size)


def resized(pixels: NDArray[np.uint8], size: int) -> Tensor:
    """A whole image as a square, antialiased: uint8 [H, W, C] -> uint8 [C, size, size]."""
    square = resized_to(pixels, size, size)
    return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))


def resized_to(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """A whole image at another size, antialiased: uint8 [H, W, C] -> uint8 [height, width, C]."""
    # A part of an image, or Pillow's memory, which torch would warn of. torch copies parts too, but
    # brings up a pool of threads for each thread that calls it.
    if not (pixels.flags.c_contiguous and pixels.flags.writeable):
        pixels = pixels.copy()
    done: NDArray[np.uint8] = np.empty((height, width, pixels.shape[2]), np.uint8)
    # On bytes in this layout torch has a vector kernel, some three times as fast as Pillow's;
    # torch.nn.functional.interpolate calls it too, but has no say in where its result goes.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _images(pixels), (height, width), False, None, None, out=_images(done)
    )
    return done


def _images(pixels: NDArray[np.uint8]) -> Tensor:
    """A view of [H, W, C] as [1, C, H, W]."""
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def _whole(edges: Edges, length: int) -> tuple[int, int]:
    """The pixels that edges touch; at least one."""
    first = min(math.floor(edges[0]), length - 1)
    return first, max(min(math.ceil(edges[1]), length), first + 1)


def _resized_box(
    part: NDArray[np.uint8], box: tuple[float, float, float, float], size: int
) -> NDArray[np.uint8]:
    # torch's has no edges within a pixel; moved to whole ones, a part of a picture decoded at a
    # quarter would be off by up to two of the picture's own.
    from PIL import Image

    grey = part.shape[2] == 1
    image = Image.fromarray(part[:, :, 0] if grey else part)
    square = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return square[:, :, None] if grey else square
