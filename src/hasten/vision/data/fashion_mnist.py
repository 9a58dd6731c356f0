"""Fashion-MNIST: where its four files are, or may be fetched from, and reading them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hasten.errors import DataError
from hasten.vision.file_names import show
from hasten.vision.transforms import RandomHorizontalFlip, Transform

from . import idx
from .download import Opener, fetch, open_url
from .image_data import ImageData, from_tensors, light_augmentation, strong_augmentation

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of the four files.

    ``sha256`` is of the contents after gunzip: distributions compress them again.
    """

    name: str
    sha256: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the contents after gunzip."""
        return 4 + 4 * len(self.shape) + int(np.prod(self.shape))

    def places(self, folder: Path) -> list[Path]:
        """Where in a folder the file may be, packed or not."""
        dotted = self.name.replace("-idx", ".idx")
        return [folder / f"{self.name}.gz", folder / self.name, folder / dotted]


PARTS = (
    Part(
        name="train-images-idx3-ubyte",
        sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        shape=(60_000, 28, 28),
    ),
    Part(
        name="train-labels-idx1-ubyte",
        sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        shape=(60_000,),
    ),
    Part(
        name="t10k-images-idx3-ubyte",
        sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        shape=(10_000, 28, 28),
    ),
    Part(
        name="t10k-labels-idx1-ubyte",
        sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        shape=(10_000,),
    ),
)


def load_fashion_mnist(
    *,
    data_dir: Path | None,
    image_size: int | None,
    augment: str,
    download: bool = True,
    say: Callable[[str], None] | None = None,
    opener: Opener = open_url,
    parts: tuple[Part, ...] = PARTS,
    installed: Path = DEBIAN_FOLDER,
) -> ImageData:
    """Load Fashion-MNIST: 60,000 training and 10,000 test images of 28x28 in 10 classes.

    The four files are looked for in ``data_dir``, in ``installed``, in the user's cache, and are
    then downloaded into ``data_dir`` or else the user's cache.

    Args:
        data_dir: folder given by the user.
        image_size: side to resize to; None keeps 28.
        augment: ``light`` mirrors and shifts training images, ``auto`` mirrors them: shifts cost
            accuracy in runs of a few epochs, and gain none in ten. ``none`` leaves them alone.
        download: try the network where the files are nowhere.
        say: told of a download, a line of text each.
        opener: opens a URL; tests give their own.
        parts: the four files; tests give small ones.
        installed: where Debian's package dataset-fashion-mnist puts the files.

    Raises:
        DataError: the files are nowhere, or one of them is not what it should be.
    """
    cache = _cache()
    folders = [each for each in (data_dir, installed, cache) if each is not None]
    found = _find(folders, parts)
    if found is None:
        found = _download(data_dir or cache, folders, parts, download, say, opener)

    def read(place: tuple[Part, Path]) -> Tensor:
        part, path = place
        content = idx.read_bytes(path, most=part.bytes)
        idx.check_sha256(content, part.sha256, path)
        array = idx.parse(content, dimensions=len(part.shape), path=path)
        return torch.tensor(array)  # in memory of its own, as digits are

    # Gunzip and SHA-256 release the interpreter lock.
    with ThreadPoolExecutor(len(parts)) as pool:
        train_images, train_labels, test_images, test_labels = pool.map(
            read, zip(parts, found, strict=True)
        )
    return from_tensors(
        "fashion-mnist",
        (train_images[:, None], train_labels.long()),
        (test_images[:, None], test_labels.long()),
        classes=CLASSES,
        augment=_changes(augment),
        image_size=image_size,
    )


def _changes(augment: str) -> list[Transform]:
    if augment == "auto":
        return [RandomHorizontalFlip()]
    if augment == "none":
        return []
    light = light_augmentation(padding=2, mirror=True)
    return [*light, *strong_augmentation()] if augment == "strong" else light


def _cache() -> Path | None:
    """The user's cache; None where the user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG standard says to ignore a relative one
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "hasten" / "fashion-mnist"


def _find(folders: list[Path], parts: tuple[Part, ...]) -> list[Path] | None:
    """Paths of the files in the first folder that has all of them."""
    for given in folders:
        for folder in (given, given / "FashionMNIST" / "raw"):  # the latter is torchvision's
            found = [next(filter(Path.is_file, part.places(folder)), None) for part in parts]
            whole = [path for path in found if path is not None]
            if len(whole) == len(parts):
                return whole
    return None


def _download(
    into: Path | None,
    folders: list[Path],
    parts: tuple[Part, ...],
    download: bool,
    say: Callable[[str], None] | None,
    opener: Opener,
) -> list[Path]:
    if not download:
        raise DataError(_three_ways(into, folders, parts, "downloading was not allowed"))
    if into is None:
        raise DataError(_three_ways(into, folders, parts, "there is no home folder to put it in"))
    if say is not None:
        say(f"Downloading Fashion-MNIST (30 MB) into {show(into)}")
    try:
        into.mkdir(parents=True, exist_ok=True)
        paths = []
        for part in parts:
            path = into / f"{part.name}.gz"
            if not path.is_file():
                urls = [f"{mirror}{part.name}.gz" for mirror in MIRRORS]
                fetch(urls, path, sha256=part.sha256, content_bytes=part.bytes, opener=opener)
            paths.append(path)
    except (DataError, OSError) as error:
        raise DataError(_three_ways(into, folders, parts, str(error))) from error
    return paths


def _three_ways(into: Path | None, folders: list[Path], parts: tuple[Part, ...], why: str) -> str:
    looked = ", ".join(show(folder) for folder in folders)
    names = ", ".join(f"{part.name}.gz" for part in parts)
    target = "the folder of --data-dir" if into is None else show(into)
    return (
        f"Fashion-MNIST is not in {looked}, and could not be downloaded: {why}\n"
        "Any of these three ways helps:\n"
        "  1. on Debian or Ubuntu: apt install dataset-fashion-mnist\n"
        f"  2. put its four files ({names}) into a folder and name it with --data-dir\n"
        f"  3. run again where there is a network; they are then fetched into {target}"
    )
