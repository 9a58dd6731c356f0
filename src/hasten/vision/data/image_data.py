"""What a loaded data set is to the rest of hasten: two parts, their classes and their figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from hasten.errors import UsageError
from hasten.vision.transforms import (
    Compose,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomOperations,
    Transform,
)

from .preparation import Preparation
from .problems import Problems
from .statistics import channel_statistics

_MOST_BYTES = 8 << 30  # of a data set resized in memory
AUGMENT = ("auto", "light", "strong", "none")


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A data set of labelled images, ready for a loader.

    Samples are ``(uint8 tensor [C, H, W], int label)``; a :class:`TensorDataset` gives the label
    as an int64 scalar tensor.
    """

    name: str
    """``digits``, ``fashion-mnist`` or the folder."""
    train: Dataset[Any]
    """Samples to train on."""
    val: Dataset[Any]
    """Samples to measure with."""
    classes: tuple[str, ...]
    """Names of the classes, by label."""
    shape: tuple[int, int, int]
    """(C, H, W) of every image."""
    mean: tuple[float, ...]
    """Of each channel of the training images, of pixels scaled to 0..1."""
    std: tuple[float, ...]
    """Of each channel of the training images, of pixels scaled to 0..1; above 0."""
    train_counts: tuple[int, ...]
    """Training images of each class."""
    val_counts: tuple[int, ...]
    """Validation images of each class."""
    train_transform: Transform
    """What to do to training batches on the device: augment and normalise."""
    val_transform: Transform
    """What to do to validation batches on the device: normalise."""
    preparation: Preparation
    """How an image file is made into such a sample; for predicting."""
    problems: Problems = field(default_factory=Problems)
    """Files that were skipped; empty for built-in data."""

    def describe(self) -> str:
        """One line: what there is."""
        channels, height, width = self.shape
        kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
        return (
            f"{self.name}: {sum(self.train_counts):,} training and {sum(self.val_counts):,} "
            f"validation images, {len(self.classes)} classes, {height}x{width} {kind}"
        )


def from_tensors(
    name: str,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    classes: tuple[str, ...],
    augment: list[Transform],
    image_size: int | None,
) -> ImageData:
    """Make an :class:`ImageData` of whole tensors.

    Args:
        name: of the data set.
        train: images uint8 [N, C, H, W] and labels int64 [N] to train on.
        val: the same, to measure with.
        classes: names, by label.
        augment: transforms of training batches that come before normalising.
        image_size: side in pixels to resize every image to; None keeps them as they are.

    Raises:
        UsageError: at that size they would fill the memory.
    """
    if image_size is not None:
        train = (_resize(train[0], image_size), train[1])
        val = (_resize(val[0], image_size), val[1])
    mean, std = channel_statistics(train[0])
    _, channels, height, width = train[0].shape
    normalize = Normalize(mean, std)
    return ImageData(
        name=name,
        train=TensorDataset(*train),
        val=TensorDataset(*val),
        classes=classes,
        shape=(channels, height, width),
        mean=mean,
        std=std,
        train_counts=_counts(train[1], len(classes)),
        val_counts=_counts(val[1], len(classes)),
        train_transform=Compose([*augment, normalize]) if augment else normalize,
        val_transform=normalize,
        preparation=Preparation(size=height, channels=channels),
    )


def light_augmentation(*, padding: int, mirror: bool) -> list[Transform]:
    """Return small changes that keep an image's meaning.

    Args:
        padding: pixels of random shift.
        mirror: also flip left to right, where a mirrored image is still of its class.
    """
    flips: list[Transform] = [RandomHorizontalFlip()] if mirror else []
    return [*flips, RandomCrop(padding)]


def strong_augmentation() -> list[Transform]:
    """Return changes of shape, colour and level, and rectangles that are blanked."""
    return [RandomOperations(2, 0.3), RandomErasing(0.25)]


def check_augment(augment: str) -> None:
    """Refuse an unknown setting.

    Raises:
        UsageError: it is none of ``AUGMENT``.
    """
    if augment not in AUGMENT:
        raise UsageError(f"augment is one of {', '.join(AUGMENT)}, not {augment!r}")


def _counts(labels: Tensor, classes: int) -> tuple[int, ...]:
    return tuple(torch.bincount(labels, minlength=classes).tolist())


def _resize(images: Tensor, size: int) -> Tensor:
    if images.shape[2:] == (size, size):
        return images
    needed = len(images) * images.shape[1] * size * size
    if needed > _MOST_BYTES:
        raise UsageError(
            f"{len(images):,} images of {size}x{size} pixels take {needed / 2**30:.0f} GiB of "
            f"memory, more than the {_MOST_BYTES >> 30} GiB that are allowed; choose a smaller "
            "image size"
        )
    parts = [
        torch.nn.functional.interpolate(
            chunk.float(), (size, size), mode="bilinear", antialias=True
        )
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for chunk in torch.split(images, 4096)
    ]
    return torch.cat(parts)
