"""Folders of JPEGs that are made up, but as large and as hard to decode as photographs.

Noise of every size from the whole picture down to a pixel, the small ones weaker, as in pictures
of the world. Each file is another window of a few such canvases, at a size of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

CLASSES = 10
_FALLING = 0.3  # of the noise's strength with its fineness; 500x375 at quality 90 take 65 kB
_DONE = "complete"


def folder(place: Path, count: int, height: int, width: int) -> list[Path]:
    """Make a folder of pictures, or use the one that is there; gives its files, sorted."""
    done = place / f".{_DONE}-{count}-{height}x{width}"
    if not done.exists():
        _make(place, count, height, width)
        done.touch()
    return sorted(place.glob("*/*.jpg"))


def _make(place: Path, count: int, height: int, width: int) -> None:
    rng = np.random.default_rng(count)
    few = 8 if height * width < 1_000_000 else 2  # a large one takes seconds to make
    canvases = [_canvas(rng, 2 * height, 2 * width) for _ in range(few)]
    for number in range(count):
        canvas = canvases[number % len(canvases)]
        size = [round(side * rng.uniform(0.85, 1.15)) for side in (height, width)]
        top, left = (
            int(rng.integers(0, whole - part))
            for whole, part in zip(canvas.shape[:2], size, strict=True)
        )
        window = np.ascontiguousarray(canvas[top : top + size[0], left : left + size[1]])
        path = place / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(window, 90, colorsubsampling="420"))


def _canvas(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    light = np.zeros((height, width, 3), np.float32)
    cell = whole = max(height, width)
    while cell >= 1:
        grid = rng.normal(size=(-(-height // cell) + 1, -(-width // cell) + 1, 3))
        grid = 1.2 * grid.mean(2, keepdims=True) + 0.35 * grid  # mostly light, less colour
        for channel in range(3):
            plane = Image.fromarray(grid[:, :, channel].astype(np.float32))
            smooth = plane.resize((width, height), Image.Resampling.BICUBIC)
            light[:, :, channel] += np.asarray(smooth) * (cell / whole) ** _FALLING
        cell //= 2
    light = (light - light.mean()) / light.std() * 58 + 120
    return light.clip(0, 255).astype(np.uint8)


def mean_bytes(files: list[Path]) -> int:
    """Of a file."""
    return sum(os.path.getsize(file) for file in files) // len(files)  # noqa: PTH202
