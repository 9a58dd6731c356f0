"""Data sets of Hugging Face and torchvision: taken over bit for bit, and the same by every plan.

Skipped where those are not installed: hasten does not need them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feed_datasets import same
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, Subset, WeightedRandomSampler

from hasten.errors import DataError
from hasten.feed import Loader


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return pytest.importorskip("datasets")


@pytest.fixture
def vision() -> Any:
    return pytest.importorskip("torchvision")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(18):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 36, 3), dtype=np.uint8)
        path = tmp_path / "photos" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def rows(hugging_face: Any) -> Any:
    return hugging_face.Dataset.from_dict(
        {
            "text": [f"row {number}" for number in range(23)],
            "label": [number % 4 for number in range(23)],
            "values": [[number * 0.5, number + 1.0] for number in range(23)],
        }
    )


def noisy(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that draws from all three global generators."""
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return {"values": [torch.tensor([*row, *draws]) for row in batch["values"]]}


HUGGING_FACE: dict[str, Callable[[Any], Any]] = {
    "plain": lambda data: data,
    "torch": lambda data: data.with_format("torch"),
    "numpy": lambda data: data.with_format("numpy", columns=["label", "values"]),
    "transform that draws": lambda data: data.with_transform(noisy),
    "selected": lambda data: data.with_format("torch").select([5, 3, *range(10, 20)]),
    "shuffled": lambda data: data.with_format("torch").shuffle(seed=3),
    "subset": lambda data: Subset(data.with_format("torch"), [7, 1, 4, 11, 2]),
}


def _seed() -> None:
    torch.manual_seed(4)
    random.seed(5)
    np.random.seed(6)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def _epochs(loader: Any, of: Any) -> list[Any]:
    """Two epochs, as a loop that draws too sees them, and the generators after each."""
    _seed()
    if of.generator is not None:
        of.generator.manual_seed(8)
    found = []
    for _ in range(2):
        for batch in loader:
            found.append((batch, torch.rand(1).item()))
        found.append(_states())
    return found


def _check(make: Callable[[], Any], **options: Any) -> None:
    original = make()
    expected = _epochs(original, original)
    taken = make()
    with Loader.from_dataloader(taken, **options) as loader:
        assert same(_epochs(loader, taken), expected)


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "own generator": lambda data: {"shuffle": True, "generator": torch.Generator()},
    "weighted": lambda data: {
        "sampler": WeightedRandomSampler(torch.linspace(0.1, 1, len(data)), 14)
    },
    "batch sampler": lambda data: {
        "batch_sampler": torch.utils.data.BatchSampler(RandomSampler(data), 5, True)
    },
    "workers": lambda data: {"shuffle": True, "num_workers": 2},
    "persistent": lambda data: {"num_workers": 1, "persistent_workers": True},
}


def _loader(data: Any, kind: str) -> Any:
    options = LOADERS[kind](data)
    return DataLoader(data, **({} if "batch_sampler" in options else {"batch_size": 4}), **options)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("form", HUGGING_FACE)
def test_hugging_face_s_rows_are_taken_over(hugging_face: Any, form: str, kind: str) -> None:
    data = HUGGING_FACE[form](rows(hugging_face))
    _check(lambda: _loader(data, kind))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("formed", [False, True])
def test_hugging_face_s_streams_are_taken_over(
    hugging_face: Any, workers: int, formed: bool
) -> None:
    def make() -> Any:
        stream = rows(hugging_face).to_iterable_dataset(num_shards=4)
        stream = stream.shuffle(seed=2, buffer_size=5)
        stream = stream.with_format("torch") if formed else stream
        return DataLoader(stream, batch_size=4, num_workers=workers)

    _check(make)


@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "auto"])
@pytest.mark.parametrize("form", HUGGING_FACE)
def test_hugging_face_s_rows_are_the_same_by_every_plan(
    hugging_face: Any, form: str, plan: str
) -> None:
    data = HUGGING_FACE[form](rows(hugging_face))
    expected = list(Loader(data, 4, shuffle=True, seed=3, plan="inline"))
    with Loader(data, 4, shuffle=True, seed=3, plan=plan) as loader:
        assert same(list(loader), expected)


def _transforms(vision: Any) -> dict[str, Any]:
    v1, v2 = vision.transforms, __import__("torchvision.transforms.v2", fromlist=["v2"])
    return {
        "v1": v1.Compose(
            [
                v1.RandomResizedCrop(16),
                v1.RandomHorizontalFlip(),
                v1.ColorJitter(0.4),
                v1.ToTensor(),
            ]
        ),
        "v2": v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop(16, antialias=True),
                v2.RandAugment(),
                v2.ToDtype(torch.float32, scale=True),
            ]
        ),
    }


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("transform", ["v1", "v2"])
def test_torchvision_s_folders_are_taken_over(
    vision: Any, photos: Path, transform: str, kind: str
) -> None:
    data = vision.datasets.ImageFolder(str(photos), _transforms(vision)[transform])
    _check(lambda: _loader(data, kind))


@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "auto"])
@pytest.mark.parametrize("transform", ["v1", "v2"])
def test_torchvision_s_folders_are_the_same_by_every_plan(
    vision: Any, photos: Path, transform: str, plan: str
) -> None:
    data = vision.datasets.ImageFolder(str(photos), _transforms(vision)[transform])
    expected = list(Loader(data, 4, shuffle=True, plan="inline"))
    with Loader(data, 4, shuffle=True, plan=plan) as loader:
        assert same(list(loader), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchvision_s_made_up_pictures_are_taken_over(vision: Any, workers: int) -> None:
    """They seed torch's global generator for each, and put it back."""
    data = vision.datasets.FakeData(12, (3, 8, 8), 4, vision.transforms.ToTensor())
    _check(lambda: DataLoader(data, 4, shuffle=True, num_workers=workers))


def test_a_broken_picture_of_torchvision_s_is_named(vision: Any, photos: Path) -> None:
    (photos / "b" / "4.png").write_bytes(b"no picture")
    data = vision.datasets.ImageFolder(str(photos), _transforms(vision)["v1"])
    with Loader(data, 4) as loader, pytest.raises(DataError, match=r"photos/b/4\.png"):
        list(loader)
    taken = Loader.from_dataloader(DataLoader(data, 4))
    with taken, pytest.raises(DataError, match=r"photos/b/4\.png"):
        list(taken)
