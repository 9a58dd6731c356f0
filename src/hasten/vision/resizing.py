"""From decoded pixels to the square that is wanted: a part of them, resized, antialiased.

Both ways release the interpreter lock.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import scratch

Edges = tuple[float, float]


def square_of(
    pixels: NDArray[np.uint8], rows: Edges, columns: Edges, size: int
) -> NDArray[np.uint8]:
    """A part of an image as a square, antialiased (a triangle as wide as what a pixel covers).

    Args:
        pixels: uint8 [H, W, C], C of 1, 3 or 4; a fourth is a channel like the others.
        rows: where the part begins and ends, in pixels; of a picture decoded at a reduced scale,
            these may lie within pixels.
        columns: likewise.
        size: side of the square, in pixels.

    Returns:
        uint8 [size, size, C], in memory that this thread's next square may take.
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
        if not _fit(part):
            whole = scratch.empty("part", part.shape)
            np.copyto(whole, part)
            part = whole
        return _resize(part, scratch.empty("square", (size, size, part.shape[2])))
    return _resized_box(part, box, size)


def resized(pixels: NDArray[np.uint8], size: int) -> Tensor:
    """A whole image as a square, antialiased: uint8 [H, W, C] -> uint8 [C, size, size]."""
    square = resized_to(pixels, size, size)
    return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))


def resized_to(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """A whole image at another size, antialiased: uint8 [H, W, C] -> uint8 [height, width, C]."""
    done: NDArray[np.uint8] = np.empty((height, width, pixels.shape[2]), np.uint8)
    return _resize(pixels if _fit(pixels) else pixels.copy(), done)


def _fit(pixels: NDArray[np.uint8]) -> bool:
    """Whether torch may be given them as they are.

    Not a part of an image: torch copies it, but brings up a pool of threads for each thread that
    calls it. Nor Pillow's memory, which torch would warn of.
    """
    return pixels.flags.c_contiguous and pixels.flags.writeable


def _resize(pixels: NDArray[np.uint8], done: NDArray[np.uint8]) -> NDArray[np.uint8]:
    # On bytes in this layout torch has a vector kernel, some three times as fast as Pillow's;
    # torch.nn.functional.interpolate calls it too, but has no say in where its result goes.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        _images(pixels), done.shape[:2], False, None, None, out=_images(done)
    )
    return done


def _images(pixels: NDArray[np.uint8]) -> Tensor:
    """A view of [H, W, C] as [1, C, H, W]."""
    return torch.from_numpy(pixels[None].transpose(0, 3, 1, 2))  # by numpy: half the calls' time


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

    height, width, channels = part.shape
    mode = {1: "L", 3: "RGB", 4: "RGBX"}[channels]
    image = Image.frombytes(mode, (width, height), np.ascontiguousarray(part).data)
    square = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return square.reshape(size, size, channels)
