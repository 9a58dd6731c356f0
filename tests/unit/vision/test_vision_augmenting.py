"""Augmentations: one definition for a batch and an image, the same bits; what each one does."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from hasten.errors import UsageError
from hasten.feed import Loader
from hasten.feed.keys import SampleRandom
from hasten.vision.transforms import (
    ColourJitter,
    Compose,
    Cutout,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomOperations,
    RandomResizedCrop,
    from_config,
)

PHOTOS = (
    Path(importlib.util.find_spec("sklearn").submodule_search_locations[0]) / "datasets" / "images"
)
HOST = torch.device("cpu")
EACH = [
    RandomHorizontalFlip(),
    RandomCrop(3),
    Cutout(5),
    RandomErasing(0.7, fill=9),
    ColourJitter(0.4, 0.5, 0.6, 0.1),
    RandomResizedCrop(),
    RandomResizedCrop(20, least_area=0.2),
    RandomResizedCrop(50),
    RandomOperations(3, 0.9),
    Normalize((0.4,) * 3, (0.2,) * 3),
]
ALL = Compose(EACH)


class Given:
    """Draws that the test gives."""

    def __init__(self, *draws: list[list[float]]) -> None:
        self.draws = [torch.tensor(each) for each in draws]

    def uniform(self, columns: int) -> torch.Tensor:
        drawn = self.draws.pop(0)
        assert drawn.shape[1] == columns
        return drawn


def pixels(count: int, channels: int = 3, height: int = 33, width: int = 47) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    coarse = torch.rand(count, channels, 6, 7, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    return (smooth * 255).clamp_(0, 255).to(torch.uint8)


def draws(indices: list[int], epoch: int = 0) -> SampleRandom:
    return SampleRandom(7, epoch, np.array(indices), HOST)


def as_kind(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return images if dtype == torch.uint8 else (images.float() / 255).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", [*EACH, ALL], ids=lambda each: str(each)[:30])
def test_an_image_alone_is_changed_to_the_same_bits_as_in_a_batch(
    transform, dtype: torch.dtype
) -> None:
    images, indices = as_kind(pixels(37), dtype), list(range(100, 137))
    kept = images.clone()
    whole = transform(images, draws(indices))
    assert torch.equal(images, kept)
    for place in (0, 5, 36):
        alone = transform(images[place], draws([indices[place]]))
        assert alone.dim() == 3
        assert torch.equal(alone, whole[place])
    some = [3, 30, 17]
    part, labels = transform(
        (images[some], torch.tensor(some)), draws([indices[place] for place in some])
    )
    assert torch.equal(part, whole[some])
    assert labels.tolist() == some


@pytest.mark.parametrize("transform", [*EACH, ALL], ids=lambda each: str(each)[:30])
def test_large_batches_go_in_parts_to_the_same_bits(transform) -> None:
    images = pixels(30, height=120, width=160)  # some 17 of them are worked on at once
    whole = transform(images, draws(list(range(30))))
    for place in (0, 16, 17, 18, 29):
        assert torch.equal(transform(images[place], draws([place])), whole[place])


class One(Dataset):
    """Each sample changed where it is made, by whoever makes it."""

    def __init__(self, images: torch.Tensor, transform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, index: int, key: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index], draws([index])), index


@pytest.mark.parametrize("plan", ["threads", "inline"])
def test_samples_of_a_plan_are_as_batches_on_the_device(plan: str) -> None:
    images = pixels(20)
    batched = Loader(
        TensorDataset(images, torch.arange(20)), 6, shuffle=True, seed=7, device_transform=ALL
    )
    one_by_one = Loader(One(images, ALL), 6, shuffle=True, seed=7, plan=plan)
    for (left, left_labels), (right, right_labels) in zip(
        batched.to("cpu"), one_by_one, strict=True
    ):
        assert torch.equal(left_labels, right_labels)
        assert torch.equal(left, right)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_any_number_of_channels(channels: int) -> None:
    images = pixels(5, channels)
    for transform in EACH[:-1]:
        changed = transform(images, draws(list(range(5))))
        assert changed.shape[:2] == images.shape[:2]
        assert changed.dtype == torch.uint8


def test_no_images_at_all() -> None:
    for transform in EACH:
        assert len(transform(pixels(5)[:0], draws([]))) == 0


def test_strengths_of_nothing_change_nothing() -> None:
    images = pixels(6)
    for transform in (ColourJitter(), RandomOperations(4, 0), RandomErasing(0)):
        assert torch.equal(transform(images, draws(list(range(6)))), images)
    whole = RandomResizedCrop(least_area=1)
    middle = Given([[0.5, 0.5, 0.5, 0.5]] * 6)
    assert torch.equal(whole(images, middle), images)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_brightness_contrast_and_saturation(dtype: torch.dtype) -> None:
    images = as_kind(pixels(2), dtype)
    brightest = 255 if dtype == torch.uint8 else 1
    values = images.double()
    light = (values * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    mean = light.mean((2, 3), keepdim=True)
    middle, high = 0.5, 0.75  # factors of 1 and of 1.2
    for columns, want in (
        ([high, middle, middle, middle], values * 1.2),
        ([middle, high, middle, middle], mean + (values - mean) * 1.2),
        ([middle, middle, high, middle], light + (values - light) * 1.2),
    ):
        got = ColourJitter(0.4, 0.4, 0.4, 0.1)(images, Given([columns] * 2))
        difference = (got.double() - want.clamp(0, brightest)).abs().max()
        assert difference <= (0.51 if dtype == torch.uint8 else 1e-4)


def test_hue_turns_colours_and_leaves_greys_and_light() -> None:
    grey = torch.full((1, 3, 4, 4), 90, dtype=torch.uint8)
    assert torch.equal(ColourJitter(hue=0.4)(grey, Given([[0.5, 0.5, 0.5, 0.9]])), grey)
    colours = torch.tensor([[0.5, 0.4, 0.3], [0.4, 0.5, 0.45], [0.42, 0.4, 0.5]])
    images = colours[:, :, None, None].expand(3, 3, 2, 2).contiguous()
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    back = images
    for _ in range(3):
        once = Given([[0.5, 0.5, 0.5, 1.0]] * 3)  # a third of a turn each: tan(60 degrees)
        back = ColourJitter(hue=1 / 3)(back, once)
        assert ((back - images) * weights).sum(1).abs().max() < 1e-4
    assert (back - images).abs().max() < 1e-4
    turned = ColourJitter(hue=0.2)(images, Given([[0.5, 0.5, 0.5, 0.9]] * 3))
    assert ((turned - images).abs().amax((1, 2, 3)) > 0.02).all()


@pytest.mark.parametrize("size", [24, 64, 150])
def test_a_resized_part_is_as_pillows(size: int) -> None:
    photo = Image.open(PHOTOS / "china.jpg").resize((160, 120))
    images = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None]
    drawn = [0.3, 0.8, 0.6, 0.2]
    got = RandomResizedCrop(size)(images, Given([drawn]))[0]
    area, turn = 0.35 + 0.65 * drawn[0], 2 * drawn[1] - 1
    ratio = (7 + turn) / (7 - turn)
    high, wide = 120 * math.sqrt(area * ratio), 160 * math.sqrt(area / ratio)
    top, left = drawn[2] * (120 - high), drawn[3] * (160 - wide)
    want = photo.resize(
        (size, size), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high)
    )
    difference = (got.permute(1, 2, 0).int() - torch.from_numpy(np.array(want)).int()).abs()
    assert difference.float().mean() < 0.6
    assert difference.max() <= 3


def test_parts_are_within_the_image_and_of_all_sizes() -> None:
    count, height, width = 4000, 30, 40
    across = torch.linspace(0, 1, width).expand(count, 1, height, width)
    got = RandomResizedCrop(least_area=0.35)(across.contiguous(), draws(list(range(count))))
    share = (got[:, 0, 0, -1] - got[:, 0, 0, 0]) * 1.03
    assert share.min() > 0.45
    assert share.max() > 0.97
    assert 0.7 < share.mean() < 0.85
    assert not torch.isnan(got).any()


def test_erasing() -> None:
    images = pixels(3000, 1, 20, 30).clamp(min=1)
    got = RandomErasing(0.4, least_area=0.1, most_area=0.3)(images, draws(list(range(3000))))
    blank = got == 0
    some = blank.flatten(1).any(1)
    assert abs(some.float().mean() - 0.4) < 0.03
    areas = blank[some].float().mean((1, 2, 3))
    assert 0.07 < areas.min() < 0.12
    assert 0.27 < areas.max() < 0.34
    assert torch.equal(got[~blank], images[~blank])
    one = blank[some][0, 0]
    rows, columns = one.any(1), one.any(0)
    assert torch.equal(one, rows[:, None] & columns[None]), "a rectangle"


def operation(name: str, strength: float, images: torch.Tensor) -> torch.Tensor:
    from hasten.vision.operations import NAMES

    which = (NAMES.index(name) + 0.5) / len(NAMES)
    drawn = [[which, (strength + 1) / 2]] * len(images)
    return RandomOperations(1, 1.0)(images, Given(drawn))


def test_operations_of_levels() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(operation("posterize", 1, images), images // 16 * 16)
    assert torch.equal(operation("posterize", -0.25, images), images // 2 * 2)
    over = torch.where(images >= 127.5, 255 - images, images)
    assert torch.equal(operation("solarize", 0.5, images), over)
    floats = images.float() / 255
    assert (operation("posterize", 1, floats) * 255 - images // 16 * 16).abs().max() < 0.01
    assert (operation("solarize", 0.5, floats) - over / 255).abs().max() < 1e-6
    assert torch.equal(operation("nothing", 1, images), images)
    assert torch.equal(operation("hue", 1, images), images), "grey has no hue"


def test_operations_of_shape() -> None:
    images = torch.zeros(1, 1, 41, 41, dtype=torch.uint8)
    images[:, :, 20, 30] = 200  # to the right of the middle

    def place(name: str, strength: float) -> tuple[float, float]:
        changed = operation(name, strength, images)[0, 0].float()
        rows, columns = torch.meshgrid(torch.arange(41.0), torch.arange(41.0), indexing="ij")
        total = changed.sum()
        return float((rows * changed).sum() / total), float((columns * changed).sum() / total)

    down, across = place("turn", -1)
    assert abs(math.hypot(down - 20, across - 20) - 10) < 0.3
    assert abs(abs(math.degrees(math.atan2(down - 20, across - 20))) - 30) < 2
    down, across = place("shift_across", 0.2)
    assert abs(down - 20) < 0.1
    assert abs(across - (30 + 0.45 * 0.2 * 41)) < 0.3
    down, across = place("shift_down", 0.2)
    assert abs(down - (20 + 0.45 * 0.2 * 41)) < 0.3
    down, across = place("shear_down", 1)
    assert abs(abs(down - 20) - 3) < 0.3
    assert abs(across - 30) < 0.2


def test_every_operation_comes_up_and_the_rest_stays() -> None:
    images = pixels(600)
    changed = RandomOperations(1, 1.0)(images, draws(list(range(600))))
    same = (changed == images).flatten(1).all(1).float().mean()
    assert 0.04 < same < 0.2, "one in twelve does nothing"


def test_config_goes_through_json_and_back() -> None:
    again = from_config(json.loads(json.dumps(ALL.to_config())))
    assert repr(again) == repr(ALL)
    images = pixels(4)
    indices = list(range(4))
    assert torch.equal(again(images, draws(indices)), ALL(images, draws(indices)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColourJitter(-0.1),
        lambda: ColourJitter(hue=0.5),
        lambda: ColourJitter(brightness=float("nan")),
        lambda: RandomErasing(2),
        lambda: RandomErasing(least_area=0.5, most_area=0.2),
        lambda: RandomErasing(fill=float("inf")),
        lambda: RandomResizedCrop(0),
        lambda: RandomResizedCrop(least_area=0),
        lambda: RandomOperations(0),
        lambda: RandomOperations(magnitude=1.1),
    ],
)
def test_settings_that_cannot_be(make) -> None:
    with pytest.raises(UsageError):
        make()


def test_shapes_and_draws_that_are_missing() -> None:
    for transform in EACH[:-1]:
        with pytest.raises(UsageError, match="needs an rng"):
            transform(pixels(2), None)
        with pytest.raises(UsageError, match=r"\[B, C, H, W\]"):
            transform(pixels(2)[0, 0], draws([0]))


@pytest.mark.parametrize("source", ["digits", "folder"])
def test_strong_augmentation_of_a_data_set(source: str, tmp_path: Path) -> None:
    from hasten.vision import data

    if source == "folder":
        for number in range(8):
            path = tmp_path / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels(1)[0].permute(1, 2, 0).numpy()).save(path)
        source = str(tmp_path)
    loaded = {kind: data.load(source, augment=kind) for kind in ("strong", "light", "none")}
    assert "RandomOperations" in repr(loaded["strong"].train_transform)
    for kind in ("light", "none"):
        assert "RandomOperations" not in repr(loaded[kind].train_transform)
    assert "Random" not in repr(loaded["strong"].val_transform)
    loader = Loader(
        loaded["strong"].train, 4, seed=1, device_transform=loaded["strong"].train_transform
    )
    epochs = [torch.cat([images for images, _ in loader.to("cpu")]) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert all(torch.isfinite(images).all() for images in epochs)
