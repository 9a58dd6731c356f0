"""Images in folders as a data set: one sub-folder a class, decoded as they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hasten.errors import DataError, UsageError
from hasten.vision import cutting, decode
from hasten.vision.file_names import show
from hasten.vision.transforms import Compose, Normalize

from .copies import Copies, store_of
from .image_data import ImageData, strong_augmentation
from .inspection import inspect
from .layout import Layout, Part, find_labelled, find_layout, listed, promises_image
from .preparation import Preparation, random_crop
from .problems import Problems
from .split import DEFAULT_FRACTION, check_fraction, stratified
from .statistics import channel_statistics

INSPECTED_FILES = 100_000
"""Of a larger set a sample is inspected at loading; the rest as they are used."""
_SAMPLED_FILES = 20_000
_STATISTICS_IMAGES = 512
_STATISTICS_PIXELS = 1 << 30  # decoded for the statistics at most, so that large photos do not wait
_LARGEST_CHOSEN, _SIZE_STEP = 224, 32
_WHOLE_BELOW = 128  # pixels: smaller squares keep the image's edges


class ImageFolderDataset(Dataset[tuple[Tensor, int]]):
    """Images of a folder: ``(uint8 tensor [C, S, S], int label)``.

    :meth:`fetch` may be called from many threads at once; decoding and resizing release the
    interpreter lock.

    Args:
        root: the folder.
        paths: of the images, from the root.
        labels: of the images.
        preparation: the images' size and channels, and what part is taken without augmentation.
        augment: take a random part, mirrored half of the time, instead.
        problems: counts the files that turn out unusable; more than its limit stop the run.
        total: files that the share of problems is taken of; by default those given.
        copies: cut images from these instead of from their files.
    """

    def __init__(
        self,
        root: str | Path,
        paths: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64],
        *,
        preparation: Preparation,
        augment: bool = False,
        problems: Problems | None = None,
        total: int | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.root = os.path.abspath(root)  # noqa: PTH100 - the working folder may change
        self.labels: NDArray[np.int64] = np.asarray(labels, dtype=np.int64)
        self.preparation = preparation
        self.augment = augment
        self.problems = Problems() if problems is None else problems
        self.total = len(paths) if total is None else total
        self.copies = copies
        # One block of bytes: a million strings would be copied into each worker process, object
        # by object, as their reference counts change.
        encoded = [os.fsencode(path) for path in paths]
        self._ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        self._names = b"".join(encoded)
        if len(self.labels) != len(encoded):
            raise UsageError(f"{len(encoded)} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Sample ``index``; with augmentation its key is drawn from torch's generator."""
        key = int(torch.randint(2**63 - 1, ()).item()) if self.augment else 0
        return self.fetch(index, key)

    def fetch(
        self, index: int, key: int, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, int]:
        """Sample ``index``, changed as ``key`` says: the same for the same two numbers.

        Args:
            index: of the sample.
            key: 64 bits that all its randomness follows from.
            out: host memory that the image is written to, if it has its shape and type.

        Returns:
            uint8 [C, S, S], contiguous or ``out[0]``, and the label.

        Raises:
            ImageError: its file cannot be used; a loader leaves the sample out.
            DataError: more files than the limit cannot be used.
        """
        path = self._path(index)

        def choose(height: int, width: int) -> cutting.Crop:
            if self.augment:
                return random_crop(height, width, key)
            return self.preparation.crop(height, width)

        place, name = os.path.join(self.root, path), show(path)  # noqa: PTH118 - hot
        size, channels = self.preparation.size, self.preparation.channels
        slot = out[0] if out else None
        try:
            if self.copies is not None:
                image = cutting.cut(self.copies.of(place, name=name), choose, size, slot)
            else:
                image = decode.decode_crop(
                    place, choose, size=size, channels=channels, name=name, out=slot
                )
        except decode.ImageError as error:
            self.problems.add(name, decode.reason(error, name))
            self.problems.check(self.total)
            raise
        return image, int(self.labels[index])

    def describe_sample(self, index: int) -> str:
        """Path of the image from the root, as text that can be shown."""
        return show(self._path(index))

    def path(self, index: int) -> Path:
        """Path of the image."""
        return Path(self.root) / self._path(index)

    def _path(self, index: int) -> str:
        place = range(len(self))[index]
        start = 0 if place == 0 else self._ends[place - 1]
        return os.fsdecode(self._names[start : self._ends[place]])

    def __repr__(self) -> str:
        return f"ImageFolderDataset({show(self.root)!r}, {len(self):,} images, {self.preparation})"


def load_folder(
    root: Path,
    *,
    val_fraction: float | None,
    seed: int,
    image_size: int | None,
    channels: int,
    augment: str,
    cache: str,
    cache_bytes: int | None,
    say: Callable[[str], None],
) -> ImageData:
    """Load a folder with one sub-folder a class, with or without ``train/`` and ``val/``.

    Args:
        root: the folder.
        val_fraction: share of validation images; None is 0.2. Only where there is no ``val/``.
        seed: of the split and of the sample that the statistics are computed from.
        image_size: side of the square images in pixels; None chooses from the data.
        channels: 3 for RGB, 1 for grey.
        augment: ``auto``, ``light`` and ``strong`` take random parts of training images, ``strong``
            also changes their shapes and colours; ``none`` leaves them alone.
        cache: where decoded copies are kept: ``none``, ``ram`` or ``disk``.
        cache_bytes: that they take at most; None chooses.
        say: told what was passed over or takes long, a line of text each.

    Raises:
        UsageError: it is not a folder, or ``val_fraction`` is given where there is a ``val/``.
        DataError: its form is wrong, or too many of its images cannot be used.
    """
    if val_fraction is not None:
        check_fraction(val_fraction)
    layout = find_layout(root)
    if layout.val is not None and val_fraction is not None:
        raise UsageError(
            f"{show(root / layout.val.folder)} has the validation images; give no val_fraction"
        )
    problems = Problems()
    train, val = _usable(layout, problems, seed, say)
    empty = sorted({*range(len(layout.classes))} - {*train.labels.tolist()})
    if empty:
        names = listed(layout.classes[each] for each in empty)
        raise DataError(
            f"no usable image in {show(root)} of: {names}; add images to these folders, or delete "
            "them"
        )
    fraction = DEFAULT_FRACTION if val_fraction is None else val_fraction
    if val is None:
        kept, held_out = stratified(train.labels, fraction, seed)
        train, val = train.take(kept), train.take(held_out)
    if not val.paths:
        raise DataError(
            f"{show(root)} has no image to validate with; each class needs two images, or give "
            "validation images in val/"
        )
    size = image_size or _choose_size(train.sizes)
    preparation = Preparation(
        size=size, channels=channels, crop_fraction=1.0 if size < _WHOLE_BELOW else 0.875
    )
    total = len(train.paths) + len(val.paths) + len(problems)
    store = store_of(cache, cache_bytes, say)
    if store is not None and (line := store.describe()):
        say(f"Cache: {line}")
    copies = Copies(store, size=size, channels=channels) if store is not None else None

    def dataset(files: _Files, random: bool) -> ImageFolderDataset:
        return ImageFolderDataset(
            root,
            files.paths,
            files.labels,
            preparation=preparation,
            augment=random,
            problems=problems,
            total=total,
            copies=copies,
        )

    mean, std = _statistics(dataset(train, False), train.sizes, seed)
    normalize = Normalize(mean, std)
    counts = [np.bincount(each.labels, minlength=len(layout.classes)) for each in (train, val)]
    missing = [name for name, count in zip(layout.classes, counts[1], strict=True) if not count]
    if missing:
        say(f"no validation image of: {listed(missing)}")
    return ImageData(
        name=show(root),
        train=dataset(train, augment != "none"),
        val=dataset(val, False),
        classes=layout.classes,
        shape=(channels, size, size),
        mean=mean,
        std=std,
        train_counts=tuple(counts[0].tolist()),
        val_counts=tuple(counts[1].tolist()),
        train_transform=Compose([*strong_augmentation(), normalize])
        if augment == "strong"
        else normalize,
        val_transform=normalize,
        preparation=preparation,
        problems=problems,
    )


def load_labelled_folder(
    root: Path,
    *,
    classes: tuple[str, ...],
    preparation: Preparation,
    say: Callable[[str], None],
) -> ImageFolderDataset:
    """Load the images of a folder to measure a trained model with.

    Args:
        root: the folder.
        classes: that the model knows; the folder may have some of them only.
        preparation: that the model was validated with.
        say: told what was passed over, a line of text each.

    Raises:
        UsageError: it is not a folder.
        DataError: it has an unknown class, or too many of its images cannot be used.
    """
    problems = Problems()
    files, _ = _usable(find_labelled(root, classes), problems, 0, say)
    if not files.paths:
        raise DataError(f"{show(root)} has no usable image in its class folders")
    return ImageFolderDataset(
        root,
        files.paths,
        files.labels,
        preparation=preparation,
        problems=problems,
        total=len(files.paths) + len(problems),
    )


class _Files:
    """Images of one part that seem usable."""

    def __init__(
        self, paths: list[str], labels: NDArray[np.int64], sizes: NDArray[np.int32]
    ) -> None:
        self.paths = paths
        self.labels = labels
        self.sizes = sizes  # height and width [N, 2]; 0 where the file was not inspected

    def take(self, rows: NDArray[np.int64]) -> _Files:
        paths = [self.paths[row] for row in rows]
        return _Files(paths, self.labels[rows], self.sizes[rows])


def _usable(
    layout: Layout, problems: Problems, seed: int, say: Callable[[str], None]
) -> tuple[_Files, _Files | None]:
    """Leave out the files that are no images or broken; say so."""
    for note in layout.notes:
        say(note)
    parts = [layout.train] if layout.val is None else [layout.train, layout.val]
    files = [_inspected(layout.root, part, problems, seed, say) for part in parts]
    # Of a sampled part, only the sample is known to be usable.
    problems.check(sum(int((each.sizes[:, 0] > 0).sum()) for each in files) + len(problems))
    return files[0], files[1] if layout.val is not None else None


def _inspected(
    root: Path, part: Part, problems: Problems, seed: int, say: Callable[[str], None]
) -> _Files:
    paths, labels = part.files, np.asarray(part.labels, dtype=np.int64)
    for link in part.dead_links:
        problems.add(show(link), "is a symbolic link that leads nowhere")
    sizes = np.zeros((len(paths), 2), dtype=np.int32)
    usable = np.zeros(len(paths), dtype=bool)
    if len(paths) <= INSPECTED_FILES:
        places = np.arange(len(paths))
    else:
        # The names of the others are believed.
        generator = np.random.Generator(np.random.Philox(seed))
        places = np.sort(generator.choice(len(paths), _SAMPLED_FILES, replace=False))
        usable[:] = [promises_image(path) for path in paths]
        say(f"looking into {_SAMPLED_FILES:,} of {len(paths):,} files; the rest as they are used")
    found = inspect(str(root), [paths[place] for place in places])
    sizes[places] = found.sizes
    usable[places] = found.sizes[:, 0] > 0
    for place, reason in sorted(found.reasons.items()):
        problems.add(show(paths[places[place]]), reason)
    rows = np.flatnonzero(usable)
    return _Files(paths, labels, sizes).take(rows)


def _choose_size(sizes: NDArray[np.int32]) -> int:
    """Side of the squares: the median shorter side, in steps of 32, at most 224."""
    shorter = sizes[sizes[:, 0] > 0].min(axis=1)
    steps = round(float(np.median(shorter)) / _SIZE_STEP)
    return min(max(steps, 1) * _SIZE_STEP, _LARGEST_CHOSEN)


def _statistics(
    dataset: ImageFolderDataset, sizes: NDArray[np.int32], seed: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a seeded sample of the images; the same for the same folder and seed."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(dataset))
    most = (1 << 26) // dataset.preparation.size**2  # those held at once
    order = order[: min(max(most, 8), _STATISTICS_IMAGES)]
    decoded = np.cumsum(sizes[order].prod(axis=1, dtype=np.int64))
    order = order[: max(1, int(np.searchsorted(decoded, _STATISTICS_PIXELS)))]

    def fetch(index: int) -> Tensor | None:
        try:
            return dataset.fetch(int(index), 0)[0]
        except decode.ImageError:
            return None  # counted by the data set

    from hasten.devices.runtime import cores

    with ThreadPoolExecutor(min(8, cores())) as pool:
        images = [each for each in pool.map(fetch, order) if each is not None]
    if not images:
        raise DataError(f"none of the images could be decoded:\n{dataset.problems.summary()}")
    return channel_statistics(torch.stack(images))
