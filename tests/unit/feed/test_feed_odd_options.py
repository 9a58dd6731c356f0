"""Odd options and positions: one clear message, or what DataLoader gives."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hasten.errors import DataError, DeviceUnavailable, UsageError
from hasten.feed import Loader

TENSORS = TensorDataset(torch.arange(12))


def given(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": "5"}, "timeout is '5'"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": float("inf")}, "wait for ever"),
        ({"num_workers": 1, "prefetch_factor": 1.5}, "prefetch_factor is 1.5"),
        ({"num_workers": 1, "prefetch_factor": True}, "prefetch_factor is True"),
        ({"num_workers": 1, "prefetch_factor": "2"}, "prefetch_factor is '2'"),
        ({"collate_fn": 5}, "collate_fn is 5; it must be a function"),
        ({"worker_init_fn": 5}, "worker_init_fn is 5"),
        ({"device_transform": 5}, "device_transform is 5"),
        ({"device_transform": lambda batch: batch}, r"called as f\(batch, rng\)"),
        ({"device_transform": torch.nn.Flatten()}, r"called as f\(batch, rng\)"),
        ({"generator": 5}, "must be a torch.Generator"),
        ({"num_workers": 1, "multiprocessing_context": "x"}, "this system has .*spawn"),
        ({"shuffle": "no"}, "shuffle is 'no'"),
        ({"drop_last": "no"}, "drop_last is 'no'"),
        ({"num_workers": 1, "persistent_workers": 3}, "persistent_workers is 3"),
        ({"sampler": 5}, "sampler is 5; it must give indices"),
        ({"batch_sampler": 5}, "batch_sampler is 5; it must give lists"),
    ],
)
def test_options_of_the_wrong_kind_are_told_at_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Loader(TENSORS, **options)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    loader = Loader(TENSORS, np.int64(5), shuffle=True, seed=np.int32(3), num_workers=np.int64(0))
    loader.set_epoch(np.int64(2))
    usual = Loader(TENSORS, 5, shuffle=True, seed=3, num_workers=0)
    usual.set_epoch(2)
    assert given(loader) == given(usual)


@pytest.mark.parametrize("index", [0.5, "a", None, True])
def test_what_is_no_row_of_a_tensor_is_never_rounded_to_one(index: Any) -> None:
    with pytest.raises(DataError, match="whole numbers below 12"):
        given(Loader(TENSORS, 5, sampler=[index]))


@pytest.mark.parametrize("epoch", [-1, 1.5, "3", None, True])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    with pytest.raises(UsageError, match="epoch is"):
        Loader(TENSORS).set_epoch(epoch)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"epoch": 0},
        {"epoch": -1, "batch": 0, "seed": 0},
        {"epoch": 0, "batch": -3, "seed": 0},
        {"epoch": 0, "batch": 1.5, "seed": 0},
        {"epoch": "0", "batch": 0, "seed": 0},
    ],
)
def test_what_is_no_position_is_refused_and_changes_nothing(state: Any) -> None:
    loader = Loader(TENSORS, 5, shuffle=True)
    with pytest.raises(UsageError, match="the position is"):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"epoch": 0, "batch": 0, "seed": 0}


def test_a_position_beyond_the_epoch_is_refused() -> None:
    loader = Loader(TENSORS, 5)
    loader.load_state_dict({"epoch": 0, "batch": 3, "seed": 0})  # at its very end
    assert given(loader) == []
    with pytest.raises(UsageError, match="batch 4 of an epoch, which has 3"):
        loader.load_state_dict({"epoch": 0, "batch": 4, "seed": 0})
    sampled = Loader(TENSORS, 5, sampler=[3, 1, 2])
    sampled.load_state_dict({"epoch": 0, "batch": 2, "seed": 0})
    with pytest.raises(DataError, match="gave 1 batches only"):
        given(sampled)


def test_the_state_of_a_generator_is_wanted_where_the_order_comes_from_one() -> None:
    loader = Loader(TENSORS, 5, shuffle=True, generator=torch.Generator())
    with pytest.raises(UsageError, match="no state of a generator"):
        loader.load_state_dict({"epoch": 0, "batch": 1, "seed": 0})
    with pytest.raises(UsageError, match="generator is a str"):
        loader.load_state_dict({"epoch": 0, "batch": 1, "seed": 0, "generator": "x"})


@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "gather"])
def test_two_threads_may_each_iterate_a_loader(plan: str) -> None:
    dataset: Any = TENSORS if plan == "gather" else kinds.Plain()
    failed: list[Exception] = []
    counts: list[int] = []
    with Loader(dataset, 3, plan=plan) as loader:
        want = len(loader)
        _ = loader.plan

        def iterate() -> None:
            try:
                counts.append(sum(1 for _ in loader))
            except Exception as error:  # noqa: BLE001 - of a thread; asserted below
                failed.append(error)

        threads = [threading.Thread(target=iterate) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (counts, failed) == ([want, want], [])


@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "gather"])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_of_a_loader_gives_the_same(plan: str, copied: Any) -> None:
    dataset: Any = TENSORS if plan == "gather" else range(12)
    with Loader(dataset, 3, shuffle=True, plan=plan) as loader:
        loader.load_state_dict({"epoch": 1, "batch": 2, "seed": 0})
        device_loader = copy.deepcopy(loader.to("cpu"))
        with copied(loader) as other:
            started = iter(loader)
            first = next(started)
            rest = [first, *started]
            assert str(list(other)) == str(rest)
            assert str(list(device_loader)) == str(rest)
        device_loader.close()


def test_a_copy_of_a_dataloader_taken_over() -> None:
    original = DataLoader(TENSORS, 5, shuffle=True, generator=torch.Generator().manual_seed(3))
    loader = Loader.from_dataloader(original)
    other = pickle.loads(pickle.dumps(loader))
    assert given(other) == given(loader)


def test_a_device_that_is_not_here_is_told_in_hastens_words() -> None:
    loader = Loader(TENSORS, 5)
    with pytest.raises(DeviceUnavailable, match="banana"):
        loader.to("banana")
    with pytest.raises(DeviceUnavailable, match="banana"):
        loader.explain("banana")
    with pytest.raises(UsageError, match="names no device"):
        loader.to(None)  # type: ignore[arg-type]


def test_a_loader_says_what_it_is_without_choosing_a_plan() -> None:
    loader = Loader(TENSORS, 5, shuffle=True)
    assert repr(loader) == "Loader(TensorDataset of 12, batch_size=5, seed=0, shuffle=True)"
    assert repr(loader.to("cpu")) == f"{loader!r}.to('cpu')"
