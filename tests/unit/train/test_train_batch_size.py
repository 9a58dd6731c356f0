"""The batch that fits: halved until it does, with the effective batch kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import assert_same, batches, loader, points, sgd, state, trainer

import hasten
from hasten.devices import runtime
from hasten.errors import DataError, OutOfDeviceMemory
from hasten.train.batch_size import BatchPlan, fitting

CPU = torch.device("cpu")


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    devices: list[torch.device] = []
    monkeypatch.setattr(runtime, "empty_cache", devices.append)
    return devices


def needs(most: int, tried: list[int], error: Exception | None = None) -> Callable[[int], None]:
    def attempt(samples: int) -> None:
        tried.append(samples)
        if samples > most:
            raise error or torch.OutOfMemoryError("CUDA out of memory")

    return attempt


@pytest.mark.parametrize(
    ("wanted", "most", "plan", "tries"),
    [
        (64, 64, BatchPlan(64, 1), [64]),
        (64, 63, BatchPlan(32, 2), [64, 32]),
        (64, 5, BatchPlan(4, 16), [64, 32, 16, 8, 4]),
        (100, 30, BatchPlan(25, 4), [100, 50, 25]),
        (7, 3, BatchPlan(2, 4), [7, 4, 2]),
        (3, 1, BatchPlan(1, 3), [3, 2, 1]),
        (1, 1, BatchPlan(1, 1), [1]),
    ],
)
def test_halving(
    wanted: int, most: int, plan: BatchPlan, tries: list[int], emptied: list[torch.device]
):
    tried: list[int] = []
    found = fitting(wanted, needs(most, tried), CPU)
    assert found == plan and tried == tries
    assert found.micro * found.accumulate >= wanted
    assert len(emptied) == len(tries) - 1


def test_not_even_one(emptied: list[torch.device]):
    with pytest.raises(OutOfDeviceMemory, match="not even one sample fits on cpu"):
        fitting(4, needs(0, []), CPU)
    assert len(emptied) == 3


def test_other_errors_are_not_taken_for_too_many():
    with pytest.raises(RuntimeError, match="shapes"):
        fitting(4, needs(0, [], RuntimeError("shapes do not fit")), CPU)


def test_an_error_in_the_queue_of_the_device_counts(monkeypatch: pytest.MonkeyPatch):
    raised = iter([torch.OutOfMemoryError("out of memory"), None])

    def synchronize(device: torch.device) -> None:
        error = next(raised)
        if error is not None:
            raise error

    monkeypatch.setattr(runtime, "synchronize", synchronize)
    assert fitting(8, lambda samples: None, CPU) == BatchPlan(4, 2)


class Greedy(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3)
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        out: torch.Tensor = self.norm(self.layer(x))
        return out


@pytest.mark.parametrize("kind", ["class", "function", "instance"])
def test_a_trainer_tries_whole_steps_on_a_copy(kind: str, emptied: list[torch.device]):
    model = Greedy(11)
    ready = sgd(model.parameters())
    make: Any = {"class": torch.optim.AdamW, "function": sgd, "instance": ready}[kind]
    training = trainer(model, optimizer=make)
    before, random_state = state(model), torch.get_rng_state()
    made: list[hasten.Loader] = []

    def of(size: int) -> hasten.Loader:
        made.append(loader(batch_size=size))
        return made[-1]

    assert training.fitting_batch(of, 32) == BatchPlan(8, 4)
    assert [given.batch_size for given in made] == [32, 16, 8]
    assert_same(state(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not ready.state


def test_the_optimizers_own_memory_is_part_of_the_step():
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("out of memory for its state")

    model = nn.Linear(6, 3)
    with pytest.raises(OutOfDeviceMemory, match="not even one"):
        trainer(model, optimizer=Greedy(model.parameters(), lr=0.1)).fitting_batch(
            lambda size: batches([size]), 2
        )


def test_a_model_that_takes_no_single_sample():
    with pytest.raises(OutOfDeviceMemory, match=r"no two samples fit .* more than 1 value per ch"):
        trainer(Greedy(1)).fitting_batch(lambda size: batches([size]), 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        trainer(Greedy(1)).fitting_batch(lambda size: batches([size]), 1)


def test_transforms_of_the_loader_are_part_of_it():
    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.float32
            out: torch.Tensor = self.layer(x)
            return out

    data, labels = points()[:]
    raw = torch.utils.data.TensorDataset((data * 10).to(torch.uint8), labels)

    def of(size: int) -> hasten.Loader:
        return hasten.Loader(
            raw,
            size,
            num_workers=0,
            device_transform=lambda batch, rng: (batch[0].float(), batch[1]),
        )

    assert trainer(Bytes()).fitting_batch(of, 16) == BatchPlan(16, 1)


def test_data_without_a_batch_is_said():
    with pytest.raises(DataError, match="gives no batch"):
        trainer().fitting_batch(lambda size: [], 4)
