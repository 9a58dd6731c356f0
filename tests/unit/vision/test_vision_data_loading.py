"""A folder of images through hasten.Loader: plans agree, broken images are left out or stop it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hasten.errors import DataError
from hasten.feed import Loader
from hasten.vision import data


def noise(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def break_in_the_middle(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for name in ("a", "b"):
            for number in range(12):
                noise(tmp_path / part / name / f"{number}.png", number)
    return tmp_path


def batches(loaded: data.ImageData, plan: str) -> tuple[list[torch.Tensor], Loader]:
    with Loader(
        loaded.train,
        batch_size=5,
        shuffle=True,
        plan=plan,
        num_workers=0 if plan == "inline" else 2,
        device_transform=loaded.train_transform,
    ) as loader:
        return [images for images, _ in loader.to("cpu")], loader


@pytest.mark.parametrize("plan", ["threads", "processes"])
def test_plans_agree(root: Path, plan: str) -> None:
    loaded = data.load(root, image_size=24)
    want, _ = batches(loaded, "inline")
    got, _ = batches(loaded, plan)
    assert [each.shape for each in got] == [(5, 3, 24, 24)] * 4 + [(4, 3, 24, 24)]
    assert got[0].dtype == torch.float32
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("plan", ["inline", "threads", "processes"])
def test_a_broken_image_is_left_out_and_named(root: Path, plan: str) -> None:
    break_in_the_middle(root / "train" / "a" / "3.png")
    loaded = data.load(root, image_size=24)
    got, loader = batches(loaded, plan)
    assert sum(len(each) for each in got) == 23
    assert loader.skipped_count == 1
    assert "train/a/3.png" in loader.skipped[0][1]


@pytest.mark.parametrize("plan", ["inline", "threads"])
def test_too_many_broken_images_stop_it(root: Path, plan: str) -> None:
    loaded = data.load(root, image_size=24)
    for number in range(7):
        break_in_the_middle(root / "train" / "a" / f"{number}.png")
    with pytest.raises(DataError, match=r"of 48 images cannot be used, more than 10%"):
        batches(loaded, plan)
