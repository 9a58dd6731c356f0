"""Labelled images to train on: built-in sets and folders, as datasets with their figures."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from hasten.errors import DataError, UsageError
from hasten.vision.file_names import show

from .copies import check_cache
from .image_data import ImageData, check_augment
from .preparation import Preparation
from .problems import Problems

__all__ = ["BUILT_IN", "ImageData", "Preparation", "Problems", "load", "load_labelled"]

_log = logging.getLogger("hasten.vision")

BUILT_IN = ("digits", "fashion-mnist")
"""Names that :func:`load` knows; anything else is a folder."""


def load(
    source: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
    image_size: int | None = None,
    channels: int | None = None,
    augment: str = "auto",
    cache: str = "none",
    cache_bytes: int | None = None,
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
        channels: of a folder's images: 3 (also None) for RGB, 1 for grey. Built-in images are grey.
        augment: changes to training images: ``auto``, ``light``, ``strong`` or ``none``.
        cache: keep decoded copies of a folder's images, no larger than needed: ``ram``, ``disk`` or
            ``none``. Images are cut from the copies then, which changes large ones a little.
        cache_bytes: that all copies take at most; None is half of what is free.
        download: try the network where Fashion-MNIST is nowhere.
        say: told what takes long or was skipped, a line of text each. Without it, the logger
            ``hasten.vision`` has a warning of the files that were skipped, ``.problems`` of what
            is returned has them all.

    Raises:
        UsageError: an argument cannot be used, or does not apply to the source.
        DataError: the data is missing, broken or of the wrong form.
    """
    check_augment(augment)
    check_cache(cache, cache_bytes)
    # Made for its checks alone.
    Preparation(
        size=1 if image_size is None else image_size, channels=3 if channels is None else channels
    )
    name = "digits" if source is None else str(source)
    _check_applies(name, data_dir, channels)
    if (cache != "none" or cache_bytes is not None) and name in BUILT_IN:
        raise UsageError(f"a cache is for folders of images; {name} lies in memory whole")
    quiet, say = say is None, say or _say_nothing
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
    from .folder import load_folder

    images = load_folder(
        _folder(name),
        val_fraction=val_fraction,
        seed=seed,
        image_size=image_size,
        channels=3 if channels is None else channels,
        augment=augment,
        cache=cache,
        cache_bytes=cache_bytes,
        say=say,
    )
    if quiet and images.problems:
        _log.warning("%s", images.problems.summary())
    return images


def load_labelled(
    source: str | Path | None,
    *,
    classes: tuple[str, ...],
    preparation: Preparation,
    data_dir: str | Path | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
    download: bool = True,
    say: Callable[[str], None] | None = None,
) -> Dataset[Any]:
    """Load images of known classes, to measure a trained model with.

    Args:
        source: as :func:`load`. Of a folder with ``train/`` and ``val/``, and of built-in data,
            these are the validation images; of another folder all of them.
        classes: that the model knows, by label. A folder may have some of them only.
        preparation: that the model was validated with.
        data_dir: as :func:`load`.
        val_fraction: as :func:`load`, for ``digits``; that of the training, so that none of its
            images is measured with.
        seed: as :func:`load`, for ``digits``; that of the training.
        download: as :func:`load`.
        say: as :func:`load`.

    Returns:
        Samples ``(uint8 [C, S, S], label)``.

    Raises:
        UsageError: there is no such source.
        DataError: its classes are not the model's, or its images cannot be used.
    """
    name = "digits" if source is None else str(source)
    _check_applies(name, data_dir, None)
    if name not in BUILT_IN:
        from .folder import load_labelled_folder

        return load_labelled_folder(
            _folder(name), classes=classes, preparation=preparation, say=say or _say_nothing
        )
    data = load(
        name,
        data_dir=data_dir,
        val_fraction=val_fraction,
        seed=seed,
        image_size=preparation.size,
        augment="none",
        download=download,
        say=say,
    )
    if data.classes != classes:
        raise DataError(
            f"the classes of {name} ({', '.join(data.classes)}) are not those of the model "
            f"({', '.join(classes[:10])})"
        )
    if preparation.channels != 1:
        raise DataError(f"{name} has grey images and the model takes RGB")
    return data.val


def _check_applies(name: str, data_dir: str | Path | None, channels: int | None) -> None:
    if data_dir is not None and name != "fashion-mnist":
        raise UsageError(f"data_dir says where fashion-mnist's files are; {name} does not use it")
    if name in BUILT_IN and channels not in (None, 1):
        raise UsageError(f"the images of {name} are grey; {channels} channels are for a folder")


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not os.path.lexists(path) and len(path.parts) == 1:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), BUILT_IN, n=1)
        there = f"did you mean {near[0]}? There are" if near else "there are"
        raise UsageError(
            f"{show(name)} is neither a data set nor a folder here; {there} "
            f"{', '.join(BUILT_IN)}, and any folder with one sub-folder a class"
        )
    return path


def _say_nothing(line: str) -> None:
    pass
