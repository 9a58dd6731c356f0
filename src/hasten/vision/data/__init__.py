"""Labelled images to train on: built-in sets and folders, as datasets with their figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hasten.errors import UsageError

from .image_data import ImageData, check_augment
from .problems import Problems

__all__ = ["BUILT_IN", "ImageData", "Problems", "load"]

BUILT_IN = ("digits", "fashion-mnist")
"""Names that :func:`load` knows; anything else is a folder."""


def load(
    source: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
    image_size: int | None = None,
    augment: str = "auto",
    download: bool = True,
    say: Callable[[str], None] | None = None,
) -> ImageData:
    """Load a data set of labelled images.

    Args:
        source: ``digits`` (also None), ``fashion-mnist``, or a folder with one sub-folder a
            class, with or without ``train/`` and ``val/``.
        data_dir: where Fashion-MNIST's files are, or are downloaded to.
        val_fraction: share of the images held out for validation, where the source is not parted
            already; None is 0.2.
        seed: of the split and of the sample that figures are computed from.
        image_size: side of the square images, in pixels; None keeps the size of built-in images
            and chooses from the data for a folder.
        augment: changes to training images: ``auto``, ``light`` or ``none``.
        download: try the network where Fashion-MNIST is nowhere.
        say: told what takes long or was skipped, a line of text each.

    Raises:
        UsageError: an argument cannot be used, or does not apply to the source.
        DataError: the data is missing, broken or of the wrong form.
    """
    check_augment(augment)
    if image_size is not None and not 1 <= image_size <= 4096:
        raise UsageError(f"the image size is within 1..4096 pixels, not {image_size}")
    name = "digits" if source is None else str(source)
    if data_dir is not None and name != "fashion-mnist":
        raise UsageError(f"data_dir says where fashion-mnist's files are; {name} does not use it")
    if name == "digits":
        from .digits import load_digits

        return load_digits(
            val_fraction=val_fraction, seed=seed, image_size=image_size, augment=augment
        )
    if name == "fashion-mnist":
        from .fashion_mnist import load_fashion_mnist

        if val_fraction is not None:
            raise UsageError("fashion-mnist has its own 10,000 test images; give no val_fraction")
        return load_fashion_mnist(
            data_dir=None if data_dir is None else Path(data_dir),
            image_size=image_size,
            augment=augment,
            download=download,
            say=say,
        )
    raise UsageError(f"{name} is no data set; there are: {', '.join(BUILT_IN)}, or a folder")
