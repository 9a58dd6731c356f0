"""What libraries and loops read of a DataLoader, read of a Loader."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from hasten.errors import UsageError
from hasten.feed import Loader

TENSORS = TensorDataset(torch.arange(11))
NAMES = sorted(set(inspect.signature(DataLoader).parameters) - {"shuffle"})


def listed(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


def test_every_argument_of_a_dataloader_is_one_of_a_loader() -> None:
    ours, theirs = (inspect.signature(kind).parameters for kind in (Loader, DataLoader))
    assert set(theirs) <= set(ours)
    by_place = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(by_place)] == by_place


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_back(name: str) -> None:
    given: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "timeout": 30,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "generator": torch.Generator(),
        "worker_init_fn": print,
        "pin_memory": True,
        "in_order": False,
        "pin_memory_device": "cuda",
        "drop_last": True,
    }
    ours, theirs = Loader(TENSORS, **given), DataLoader(TENSORS, **given)
    for place in (ours, ours.to("cpu"), pickle.loads(pickle.dumps(Loader(TENSORS)))):
        assert hasattr(place, name)
    if name not in ("sampler", "batch_sampler", "multiprocessing_context"):
        assert getattr(ours, name) == getattr(theirs, name)
    plain, usual = Loader(TENSORS), DataLoader(TENSORS)
    assert type(getattr(plain, name)) is type(getattr(usual, name))


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_sampler_of_a_loader_gives_its_order(shuffle: bool) -> None:
    loader = Loader(TENSORS, 4, shuffle=shuffle, drop_last=True, seed=3)
    for _ in range(2):
        wanted = list(loader.batch_sampler)
        assert len(loader.sampler) == 11
        assert len(loader.batch_sampler) == len(loader) == 2
        assert [*loader.sampler][:8] == [index for batch in wanted for index in batch]
        assert listed(loader) == wanted


def test_a_sampler_that_was_given_is_given_back() -> None:
    weighted = WeightedRandomSampler([1.0] * 11, 5)
    loader = Loader(TENSORS, 2, sampler=weighted)
    assert loader.sampler is weighted
    assert loader.batch_sampler.sampler is weighted
    batches = BatchSampler(weighted, 2, drop_last=False)
    loader = Loader(TENSORS, batch_sampler=batches)
    assert loader.batch_sampler is batches
    assert type(loader.sampler) is SequentialSampler is type(loader.to("cpu").sampler)
    assert loader.batch_size is None
    stream = Loader(kinds.Stream(), 4)
    assert (stream.sampler, stream.batch_sampler) == (None, None)


def test_of_a_dataloader_that_was_taken_over_its_own_are_given() -> None:
    original = DataLoader(TENSORS, 4, shuffle=True, generator=torch.Generator(), num_workers=2)
    loader = Loader.from_dataloader(original)
    for name in ("sampler", "batch_sampler", "generator", "dataset", "collate_fn"):
        assert getattr(loader, name) is getattr(original, name)
    for name in set(NAMES) - {"num_workers"}:  # which are the plan's
        assert getattr(loader, name) == getattr(original, name)


def test_the_collate_function_is_the_usual_one_where_none_is_given() -> None:
    assert Loader(TENSORS, 4).collate_fn is default_collate
    assert Loader(TENSORS, None).collate_fn is default_convert
    assert Loader(TENSORS, 4, collate_fn=list).collate_fn is list


def test_what_a_device_loader_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = Loader(TENSORS).to("cpu").nothing_like_it


def test_any_order_that_is_allowed_is_the_usual_one() -> None:
    with Loader(kinds.Plain(), 4, num_workers=2, in_order=False) as loader:
        assert [batch[1].tolist() for batch in loader] == [
            batch[1].tolist() for batch in DataLoader(kinds.Plain(), 4)
        ]


def test_a_pinning_device_that_is_no_name_is_told() -> None:
    with pytest.raises(UsageError, match="pin_memory_device is 3"):
        Loader(TENSORS, pin_memory_device=3)  # type: ignore[arg-type]
