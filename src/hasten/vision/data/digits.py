"""scikit-learn's handwritten digits: 1,797 images of 8x8, no network needed."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hasten.errors import DataError
from hasten.vision.transforms import Transform

from .image_data import ImageData, from_tensors, light_augmentation, strong_augmentation
from .split import DEFAULT_FRACTION, stratified

_BRIGHTEST = 16


def load_digits(
    *, val_fraction: float | None, seed: int, image_size: int | None, augment: str
) -> ImageData:
    """Load the digits, parted by a seeded, stratified split.

    Args:
        val_fraction: share of validation images; None is 0.2.
        seed: of the split.
        image_size: side to resize to; None keeps 8.
        augment: ``light`` shifts by up to a pixel, ``strong`` also changes shapes and levels;
            ``auto`` and ``none`` leave the images alone.

    Raises:
        DataError: scikit-learn is not installed.
    """
    images, labels = _read()
    pixels = np.rint(images * (255 / _BRIGHTEST)).astype(np.uint8)[:, None]
    fraction = DEFAULT_FRACTION if val_fraction is None else val_fraction

    def part(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        # In memory of their own, which a device need not be given again for each epoch.
        return torch.tensor(pixels[rows]), torch.tensor(labels[rows])

    train, val = stratified(labels, fraction, seed)
    return from_tensors(
        "digits",
        part(train),
        part(val),
        classes=tuple(str(digit) for digit in range(10)),
        augment=_changes(augment),
        image_size=image_size,
    )


def _changes(augment: str) -> list[Transform]:
    if augment not in ("light", "strong"):
        return []
    shifts = light_augmentation(padding=1, mirror=False)
    return [*shifts, *strong_augmentation()] if augment == "strong" else shifts


def _read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Images [1797, 8, 8] of 0..16, and labels."""
    packed = _packaged()
    if packed is not None:
        # Importing scikit-learn costs a second and sets environment variables; its file is
        # comma-separated text: 64 pixels and the digit a line.
        with gzip.open(packed, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",")
        return table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(np.int64)
    try:
        from sklearn.datasets import load_digits as read
    except ImportError as error:
        raise DataError(
            f"the digits come with scikit-learn, which cannot be imported here ({error}); "
            "install it with: pip install scikit-learn"
        ) from error
    bunch = read()
    return bunch.images, bunch.target.astype(np.int64)


def _packaged() -> Path | None:
    """Where scikit-learn keeps the digits, or None where that is not as it was known to be."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    return None
