"""What the loop writes to NumPy arrays, which leaves no trace, is in the batches of every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import hasten
from hasten.feed import Loader
from hasten.feed.recognise import recognise
from hasten.vision.data.digits import load_digits


class Arrays(Dataset[Any]):
    def __init__(self, values: Any) -> None:
        self.values = values
        self.labels = list(range(len(values)))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index], self.labels[index]


def of_arrays(values: Any) -> Any:
    return Arrays(values)


def of_tensors(values: Any) -> Any:
    return TensorDataset(torch.from_numpy(values), torch.arange(len(values)))


def of_parts(values: Any) -> Any:
    return ConcatDataset([Subset(of_tensors(values[:8]), range(8)), of_tensors(values[8:])])


KINDS = [of_arrays, of_tensors, of_parts]
DEVICES = [None, "cuda"]


def epoch(loader: Any, write: Any = None) -> list[list[float]]:
    found = []
    for number, (values, _) in enumerate(loader):
        found.append(values.cpu().flatten().tolist())
        if write is not None and number == 0:
            write()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["auto", "resident", "gather", "inline"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_between_epochs_comes(kind: Any, plan: str, device: Any) -> None:
    with hasten.simulate():
        values = np.arange(40.0, dtype=np.float32).reshape(20, 2)
        given = {"num_workers": "auto"} if plan == "auto" else {"plan": plan}
        if plan == "resident" and device is None:
            given = {}
        loader = Loader(kind(values), 5, **given)
        placed = loader if device is None else loader.to(device)
        for addend in (0, 100, 200):
            values += addend
            assert epoch(placed) == values.reshape(4, 10).tolist()
        loader.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_taken_over_sees_it_when_it_would(
    kind: Any, device: Any, workers: int
) -> None:
    """Without workers at the next batch; those have the arrays as the epoch began."""

    def epochs(taken: bool) -> list[list[list[float]]]:
        values = np.arange(40.0, dtype=np.float32).reshape(20, 2)
        loader: Any = DataLoader(kind(values), 5, num_workers=workers)
        if taken:
            loader = Loader.from_dataloader(loader)
        placed = loader.to(device) if taken and device is not None else loader

        def write() -> None:
            values[...] += 100

        found = [epoch(placed, write) for _ in range(3)]
        if taken:
            loader.close()
        return found

    expected = epochs(taken=False)
    with hasten.simulate():
        assert epochs(taken=True) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_torchs_own_lies_on_the_device_for_good(kind: Any) -> None:
    values = np.arange(40.0, dtype=np.float32).reshape(20, 2)
    table = recognise(kind(values), None)
    assert table is not None and table.traceless
    own = TensorDataset(torch.tensor(values), torch.arange(20))
    table = recognise(own, None)
    assert table is not None and not table.traceless
    assert recognise(own, None).traceless is False, "also when it was recognised before"
    with hasten.simulate():
        plan = Loader.from_dataloader(DataLoader(own, 5)).to("cuda").plan
        assert plan.name == "resident"
        plan = Loader.from_dataloader(DataLoader(kind(values), 5)).to("cuda").plan
        assert plan.name == "gather" and plan.ahead_batches <= 1
        assert "NumPy" in plan.reason


def test_pictures_in_memory_are_copied_to_the_device_once() -> None:
    data = load_digits(val_fraction=None, seed=0, image_size=None, augment="none")
    table = recognise(data.train, None)
    assert table is not None and not table.traceless
