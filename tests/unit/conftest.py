"""Runs that are trained once and used by many tests; none of them writes into their folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("cache")


def _train(folder: Path, cache: Path, **settings: object) -> Path:
    from hasten.vision import recipe
    from hasten.vision.settings import TrainSettings

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_CACHE_DIR", str(cache))
        recipe.train(
            TrainSettings(epochs=1, device="cpu", num_workers=0, **settings),  # type: ignore[arg-type]
            recipe.Surroundings(folder=folder, progress="off", say=lambda _: None),
        )
    return folder


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    """The folder of a run on the digits, computed in bfloat16 with smoothed labels."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return _train(
        folder,
        cache_dir,
        precision="bfloat16",
        channels_last="on",
        label_smoothing=0.1,
    )


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of colour images of 3 classes, 10 of each, none of them square."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(5)
    for place, name in enumerate(("blau", "grün", "rot und rosa")):
        (root / name).mkdir()
        for number in range(10):
            pixels = generator.integers(0, 90, (140, 190, 3)).astype(np.uint8)
            pixels[20:100, 30:160, 2 - place] += 150
            suffix = "jpg" if number % 2 else "png"
            Image.fromarray(pixels).save(root / name / f"{number} é.{suffix}")
    return root


@pytest.fixture(scope="session")
def photos_run(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, photos: Path) -> Path:
    """The folder of a run on ``photos``: large enough for the middle to be cut out of each."""
    folder = tmp_path_factory.mktemp("runs") / "photos"
    return _train(
        folder,
        cache_dir,
        data=str(photos),
        image_size=128,
        batch_size=6,
        precision="float32",
        channels_last="off",
        seed=3,
    )
