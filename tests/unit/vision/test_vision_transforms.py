"""Device transforms: what they do to a batch, that they follow from their draws, and their JSON."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hasten.errors import CheckpointError, UsageError
from hasten.feed import Loader
from hasten.feed.keys import SampleRandom
from hasten.vision.transforms import (
    Compose,
    Cutout,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    from_config,
)


class Given:
    """Draws that the test gives, one [B, columns] a call."""

    def __init__(self, *draws: list[list[float]]) -> None:
        self.draws = [torch.tensor(each) for each in draws]

    def uniform(self, columns: int) -> torch.Tensor:
        drawn = self.draws.pop(0)
        assert drawn.shape[1] == columns
        return drawn


def batch(count: int = 4, channels: int = 3, height: int = 5, width: int = 6):
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return images, torch.arange(count)


def draws(count: int, epoch: int = 0) -> SampleRandom:
    return SampleRandom(7, epoch, np.arange(count), torch.device("cpu"))


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalize(channels_last: bool) -> None:
    images, labels = batch()
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    got, same = Normalize(mean, std, channels_last=channels_last)((images, labels), None)
    want = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, atol=1e-5)
    assert same is labels
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert got.is_contiguous(memory_format=layout)


def test_normalize_takes_floats_as_scaled_already_and_leaves_them_alone() -> None:
    images, labels = batch()
    scaled = images.float() / 255
    kept = scaled.clone()
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    got, _ = normalize((scaled, labels), None)
    assert torch.allclose(got, normalize((images, labels), None)[0], atol=1e-5)
    assert torch.equal(scaled, kept)


def test_a_list_of_more_than_two_is_a_batch_too() -> None:
    images, labels = batch()
    got = Normalize((0.5,) * 3, (0.25,) * 3)([images, labels, "third"], None)
    assert got[1] is labels
    assert got[2] == "third"


def test_normalised_memory_is_used_again_once_nobody_holds_it() -> None:
    normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    first, _ = normalize(batch(), None)
    place = first.data_ptr()
    del first
    assert normalize(batch(), None)[0].data_ptr() == place
    shorter, _ = normalize(batch(3), None)
    assert shorter.data_ptr() == place, "the last batch of an epoch, too"


def hold_a_view(images: torch.Tensor) -> object:
    return images[1:, 0]


def hold_an_array(images: torch.Tensor) -> object:
    return images[0].numpy()[:2]


def hold_a_graph(images: torch.Tensor) -> object:
    weight = torch.ones(images.shape, requires_grad=True)
    return (weight * images).sum()


def hold_a_storage(images: torch.Tensor) -> object:
    return images.detach().untyped_storage()


def hold_by_dlpack(images: torch.Tensor) -> object:
    return images.__dlpack__()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "hold",
    [lambda images: images, hold_a_view, hold_an_array, hold_a_graph, hold_a_storage,
     hold_by_dlpack],
)  # fmt: skip
def test_a_normalised_batch_that_is_held_is_never_overwritten(hold, channels_last: bool) -> None:
    normalize = Normalize((0.5,) * 3, (0.25,) * 3, channels_last=channels_last)
    images, places, held = [], set(), []
    for number in range(12):
        pixels = torch.full((4, 3, 5, 6), number, dtype=torch.uint8)
        got, _ = normalize((pixels, torch.zeros(4)), None)
        places.add(got.data_ptr())
        held.append(hold(got))
        images.append(got.clone())
        del got
    assert len(places) == 12
    for number, kept in enumerate(images):
        want = torch.tensor((number / 255 - 0.5) / 0.25)
        assert torch.allclose(kept, want.expand(kept.shape), atol=1e-5)


def test_a_list_of_normalised_batches_from_a_loader_is_whole() -> None:
    images = torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 3, 4, 4).clone()
    data = TensorDataset(images, torch.arange(40))
    loader = Loader(data, 6, device_transform=Normalize((0.0,) * 3, (1 / 255,) * 3))
    for _ in range(2):
        batches = [pixels for pixels, _ in loader.to("cpu")]
        assert torch.equal(torch.cat(batches), images.float())


@pytest.mark.parametrize(
    ("mean", "std"),
    [((), ()), ((0.5,), (1, 1)), ((0.5,), (0,)), ((0.5,), (-1,)), ((float("nan"),), (1,))],
)
def test_normalize_refuses(mean, std) -> None:
    with pytest.raises(UsageError, match="Normalize"):
        Normalize(mean, std)


def test_shapes_that_do_not_fit() -> None:
    images, labels = batch(channels=3)
    with pytest.raises(UsageError, match=r"1 channel\(s\)"):
        Normalize((0.5,), (0.5,))((images, labels), None)
    for transform in (Normalize((0.5,), (0.5,)), RandomHorizontalFlip(), RandomCrop(1), Cutout(1)):
        with pytest.raises(UsageError, match=r"\[B, C, H, W\]"):
            transform((images[0], labels), draws(1))


def test_flip() -> None:
    images, labels = batch()
    rng = Given([[0.0], [0.3], [0.31], [0.9]])
    got, same = RandomHorizontalFlip(0.31)((images, labels), rng)
    assert torch.equal(got[:2], images[:2].flip(3))
    assert torch.equal(got[2:], images[2:])
    assert same is labels
    never = RandomHorizontalFlip(0)((images, labels), draws(4))[0]
    assert torch.equal(never, images)
    with pytest.raises(UsageError, match="probability"):
        RandomHorizontalFlip(1.5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop(dtype: torch.dtype) -> None:
    images, labels = batch()
    images = images.to(dtype)
    top = 0.99999994  # the greatest float32 below 1
    got, _ = RandomCrop(2, fill=9)(
        (images, labels), Given([[0.5, 0.5], [0.0, 0.0], [top, top], [0.0, 0.5]])
    )
    assert got.dtype == dtype
    assert got.shape == images.shape
    assert torch.equal(got[0], images[0])
    assert torch.equal(got[1, :, 2:, 2:], images[1, :, :-2, :-2])
    assert (got[1, :, :2] == 9).all()
    assert (got[1, :, :, :2] == 9).all()
    assert torch.equal(got[2, :, :-2, :-2], images[2, :, 2:, 2:])
    assert (got[2, :, -2:] == 9).all()
    assert torch.equal(got[3, :, 2:], images[3, :, :-2])
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="padding"):
            RandomCrop(wrong)


def test_every_shift_is_as_likely() -> None:
    images = torch.zeros(9000, 1, 3, 3, dtype=torch.uint8)
    images[:, :, 1, 1] = 1
    got, _ = RandomCrop(1)((images, torch.zeros(9000)), draws(9000))
    share = got.float().mean(dim=(0, 1))
    assert (share - 1 / 9).abs().max() < 0.015


def test_cutout() -> None:
    images, labels = batch(height=8, width=10)
    images = images.clamp(min=1)
    top = 0.99999994
    got, _ = Cutout(3)((images, labels), Given([[0.5, 0.5], [0.0, 0.0], [top, top], [0.0, 0.5]]))
    blank = got == 0
    for place, (rows, columns) in enumerate(
        [((3, 6), (4, 7)), ((0, 2), (0, 2)), ((6, 8), (8, 10)), ((0, 2), (4, 7))]
    ):
        want = torch.zeros(8, 10, dtype=torch.bool)
        want[rows[0] : rows[1], columns[0] : columns[1]] = True
        assert torch.equal(blank[place, 0], want)
        assert torch.equal(got[place][:, ~want], images[place][:, ~want])
    assert (Cutout(100, fill=3)((images, labels), draws(4))[0] == 3).all()
    with pytest.raises(UsageError, match="size"):
        Cutout(0)
    with pytest.raises(UsageError, match="fill"):
        Cutout(1, fill=float("inf"))


EVERY = Compose(
    [RandomHorizontalFlip(), RandomCrop(2), Cutout(3), Normalize((0.5,) * 3, (0.25,) * 3)]
)


def test_a_sample_is_changed_alike_in_every_batch() -> None:
    images, labels = batch(16)
    kept = images.clone()
    whole, _ = EVERY((images, labels), draws(16))
    part = SampleRandom(7, 0, np.array([11, 2]), torch.device("cpu"))
    some, _ = EVERY((images[[11, 2]], labels[[11, 2]]), part)
    assert torch.equal(some, whole[[11, 2]])
    assert not torch.equal(EVERY((images, labels), draws(16, epoch=1))[0], whole)
    assert torch.equal(images, kept)


def test_random_transforms_need_an_rng() -> None:
    for transform in (RandomHorizontalFlip(), RandomCrop(1), Cutout(1), EVERY):
        with pytest.raises(UsageError, match="needs an rng"):
            transform(batch(), None)


def test_config_goes_through_json_and_back() -> None:
    for transform in (EVERY, *EVERY.transforms, Normalize((0.5,), (1,), channels_last=True)):
        stored = json.loads(json.dumps(transform.to_config()))
        again = from_config(stored)
        assert again.to_config() == transform.to_config()
        assert repr(again) == repr(transform)
    images, labels = batch()
    again = from_config(EVERY.to_config())
    assert torch.equal(again((images, labels), draws(4))[0], EVERY((images, labels), draws(4))[0])


def test_pickling_leaves_device_constants_behind() -> None:
    transform = Normalize((0.5,) * 3, (0.25,) * 3)
    want = transform(batch(), None)[0]
    again = pickle.loads(pickle.dumps(transform))
    assert not again._constants
    assert torch.equal(again(batch(), None)[0], want)


def nested(depth: int) -> dict[str, object]:
    config: dict[str, object] = {"name": "compose", "transforms": []}
    for _ in range(depth):
        config = {"name": "compose", "transforms": [config]}
    return config


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        "normalize",
        {},
        {"name": None},
        {"name": ["normalize"]},
        {"name": "os.system"},
        {"name": "Normalize"},
        {"name": "_from_config"},
        {"name": "normalize"},
        {"name": "normalize", "mean": 3, "std": 4},
        {"name": "normalize", "mean": ["a"], "std": ["b"]},
        {"name": "normalize", "mean": [0.5], "std": [0]},
        {"name": "random_crop", "padding": "2"},
        {"name": "random_crop", "padding": 1, "fill": "x"},
        {"name": "cutout", "size": 2, "colour": "red"},
        {"name": "compose"},
        {"name": "compose", "transforms": {"name": "cutout"}},
        {"name": "compose", "transforms": [{"name": "cutout"}]},
        {"name": "compose", "transforms": [], "depth": 1},
        nested(5000),
    ],
)
def test_config_that_is_not_ours_is_refused(config) -> None:
    with pytest.raises(CheckpointError, match="stored"):
        from_config(config)


def test_the_unknown_is_named_with_the_known() -> None:
    with pytest.raises(CheckpointError, match=r"'mixup'.*compose, cutout, normalize"):
        from_config({"name": "mixup"})
    assert from_config(nested(7)).to_config() == nested(7)


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalising_one_image_after_another_gives_the_same_bits(channels_last: bool) -> None:
    images, _ = batch(7, height=40, width=31)
    normalize = Normalize((0.1, 0.5, 0.9), (0.2, 0.3, 0.4), channels_last=channels_last)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(normalize(images))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert found[0].stride() == found[1].stride()
    assert torch.equal(normalize(images[3]), found[0][3])
