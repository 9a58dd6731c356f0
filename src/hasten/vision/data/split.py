"""How one set of labelled images is parted into training and validation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hasten.errors import UsageError

DEFAULT_FRACTION = 0.2


def check_fraction(fraction: float) -> float:
    """Return the fraction.

    Raises:
        UsageError: it is not strictly between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"the share of images for validation is between 0 and 1, not {fraction}")
    return fraction


def stratified(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Part samples so that each class keeps its share in both parts.

    A class with two or more images has at least one in each part; one with a single image
    trains. The parts depend on ``labels``, ``fraction`` and ``seed`` alone.

    Returns:
        Indices of the training and of the validation samples, int64, each ascending.

    Raises:
        UsageError: the fraction is not strictly between 0 and 1.
    """
    check_fraction(fraction)
    generator = np.random.Generator(np.random.Philox(seed))
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = round(len(members) * fraction)
        count = min(max(wanted, 1), len(members) - 1)
        held_out[generator.permutation(members)[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
