"""A loss or weight that is not finite, and memory that runs out: what is said, and when."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_helpers import (
    QUIET,
    Hook,
    assert_same,
    batches,
    loader,
    mlp,
    points,
    saved,
    sgd,
    state,
    trainer,
)

import hasten
from hasten.devices import runtime
from hasten.errors import DeviceMismatch, NonFiniteLoss, OutOfDeviceMemory
from hasten.train import checkpoint, diagnose, meter

NAN = float("nan")


def spoilt(at: int, value: float = NAN, count: int = 40) -> TensorDataset:
    """Points of which one holds a value that is not finite."""
    data, labels = points(count)[:]
    data[at, 2] = value
    return TensorDataset(data, labels)


def ordered(data: Any, batch_size: int = 4) -> hasten.Loader:
    return hasten.Loader(data, batch_size=batch_size, shuffle=False, num_workers=0)


@pytest.fixture
def windowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are read in windows, as on an accelerator."""
    monkeypatch.setattr(meter.runtime, "is_host", lambda device: False)


def stopped(training: hasten.Trainer, given: Any, **options: Any) -> NonFiniteLoss:
    with pytest.raises(NonFiniteLoss) as error:
        training.fit(given, **{"epochs": 2} | options)
    return error.value


# --- a loss that is not finite ----------------------------------------------------------------


def test_it_stops_at_the_step_with_all_that_helps(tmp_path: Path):
    training = trainer(folder=tmp_path / "run", checkpoint_every="2 steps", keep=9)
    error = stopped(training, ordered(spoilt(17)))
    assert (error.step, error.epoch) == (5, 1)
    text = str(error)
    assert text.startswith("the loss became nan at step 5 (epoch 1), learning rate 0.1\n")
    assert "batch[0]: float32 [4, 6], from " in text and ", 1 not finite" in text
    assert "batch[1]: int64 [4], from 0 to" in text
    assert "The data is at fault: batch[0] holds NaN" in text
    assert f"The last good checkpoint is kept: {tmp_path}" in text and "step-00000004" in text
    json.dumps(error.details, allow_nan=False)
    assert error.details["batch"]["batch[0]"]["not_finite"] == 1
    assert saved(tmp_path / "run").meta["step"] == 4
    assert (tmp_path / "run" / "report.html").exists()


def test_it_is_seen_before_the_weights_are_touched():
    training = trainer(nn.Linear(6, 3))
    stopped(training, ordered(spoilt(17)))
    assert all(value.isfinite().all() for value in state(training.model).values())


def test_without_a_folder_no_checkpoint_is_promised():
    assert "No checkpoint was made." in str(stopped(trainer(), ordered(spoilt(3))))


def test_data_that_is_whole_leaves_the_usual_causes():
    training = trainer(
        nn.Linear(6, 3),
        loss=lambda out, y: out.square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e30),
    )
    error = stopped(training, loader())
    assert "Usual causes: a learning rate that is too high" in str(error)
    assert "learning rate 1e+30" in str(error)


@pytest.mark.parametrize("log_every", [3, 4, 50])
@pytest.mark.parametrize("at", [0, 9, 17, 30, 39])
def test_in_a_window_the_right_step_and_batch_are_told(windowed: None, at: int, log_every: int):
    error = stopped(trainer(log_every=log_every), ordered(spoilt(at)))
    assert error.step == at // 4 + 1
    assert error.details["batch"]["batch[0]"]["not_finite"] == 1
    expected = points()[at // 4 * 4 : at // 4 * 4 + 4][1]
    assert error.details["batch"]["batch[1]"]["mean"] == expected.double().mean().item()


@pytest.mark.parametrize("at", [5, 22, 39])
def test_in_a_window_with_accumulation(windowed: None, at: int):
    error = stopped(trainer(accumulate=3, log_every=4), ordered(spoilt(at)))
    assert error.step == at // 12 + 1
    assert error.details["batch"]["batch[0]"]["not_finite"] == 1


def test_in_a_window_of_a_shuffled_second_epoch(windowed: None):
    class Late(nn.Module):
        """Bad once, at the seventh batch of the second epoch."""

        calls = 0

        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            loss = nn.functional.cross_entropy(outputs, labels)
            return loss * NAN if self.calls == 17 else loss

    error = stopped(trainer(loss=Late(), log_every=5), loader(batch_size=4))
    assert (error.epoch, error.step) == (2, 17)
    given = list(hasten.Loader(points(), 4, True, num_workers=0).to("cpu"))
    with hasten.Loader(points(), 4, True, num_workers=0) as other:
        other.set_epoch(1)
        given = list(other)
    facts = error.details["batch"]["batch[0]"]
    assert facts["max"] == pytest.approx(given[6][0].max().item())


def test_in_a_window_of_a_list_and_of_what_cannot_be_read_again(windowed: None):
    pairs = batches([4] * 10)
    pairs[3][0][1, 1] = NAN
    assert stopped(trainer(), pairs).details["batch"]["batch[0]"]["not_finite"] == 1

    error = stopped(trainer(), DataLoader(spoilt(13), batch_size=4))
    assert error.step == 4 and error.details["batch"] == {}
    assert "can no longer be had: use hasten.Loader" in str(error)


def test_in_a_window_it_is_found_before_validation_and_before_saving(
    windowed: None, tmp_path: Path
):
    asked: list[int] = []

    class Val:
        def __iter__(self) -> Any:
            asked.append(1)
            return iter(batches([4]))

    training = trainer(folder=tmp_path / "run")
    with pytest.raises(NonFiniteLoss):
        training.fit(ordered(spoilt(39)), Val(), epochs=1)
    assert not asked
    assert checkpoint.newest(tmp_path / "run" / "checkpoints") == (None, [])


def test_a_loss_of_two_passes_a_batch_is_placed_right(windowed: None):
    run = hasten.Run(**QUIET)
    one, two = nn.Linear(6, 3), nn.Linear(6, 3)
    first, second = sgd(one.parameters()), sgd(two.parameters())
    run.prepare(one, two, first, second)
    with pytest.raises(NonFiniteLoss) as error:
        for _ in run.epochs(1):
            for data, labels in run.batches(ordered(spoilt(13))):
                run.backward(nn.functional.cross_entropy(one(data), labels))
                run.step(first)
                run.backward(nn.functional.cross_entropy(two(data), labels))
                run.step(second)
    assert error.value.step == 4
    assert error.value.details["batch"]["batch[0]"]["not_finite"] == 1


# --- weights that are not finite --------------------------------------------------------------


class Root(nn.Module):
    """Its output is finite at zero and its gradient is not."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.at, self.calls = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layer(x)
        return out + (out * 0).sqrt() if self.calls == self.at else out


def test_weights_that_broke_in_the_last_step_are_not_saved(tmp_path: Path):
    training = trainer(Root(at=10), folder=tmp_path / "run")
    error = stopped(training, loader())  # the very last step of the second epoch
    assert "weights became NaN or infinite by step 10 (epoch 2), in layer.weight" in str(error)
    assert error.details["weights"] == ["layer.weight", "layer.bias"]
    kept = saved(tmp_path / "run")
    assert kept.meta["step"] == 5
    assert all(value.isfinite().all() for value in kept.model.values())


def test_weights_that_broke_in_the_last_step_are_said_without_a_folder_too():
    assert stopped(trainer(Root(at=10)), loader()).epoch == 2


def test_nothing_that_is_not_finite_is_ever_saved(tmp_path: Path, windowed: None):
    training = trainer(Root(at=7), folder=tmp_path / "run", checkpoint_every="1 steps", keep=99)
    error = stopped(training, loader())
    assert error.step == 7
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.is_dir():
            kept = checkpoint.load(path, map_location="cpu")
            assert all(value.isfinite().all() for value in kept.model.values()), path


def test_buffers_and_frozen_weights_may_hold_infinities(tmp_path: Path):
    model = mlp()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_parameter("bound", nn.Parameter(torch.tensor(math.inf), requires_grad=False))
    trainer(model, folder=tmp_path / "run").fit(loader(), epochs=1)
    assert saved(tmp_path / "run").model["mask"][1] == -math.inf


def test_statistics_of_any_batch():
    nest = {
        "x": [torch.tensor([1.0, NAN, 3.0]), torch.ones(0)],
        "y": (torch.tensor([True, False]), "word", 3),
        "z": torch.tensor(1 + 2j),
    }
    found = diagnose.statistics(nest)
    assert found["batch['x'][0]"] == {
        "shape": [3],
        "dtype": "float32",
        "not_finite": 1,
        "min": 1.0,
        "max": 3.0,
        "mean": 2.0,
    }
    assert found["batch['x'][1]"] == {"shape": [0], "dtype": "float32"}
    assert found["batch['y'][0]"]["mean"] == 0.5
    assert found["batch['z']"] == {"shape": [], "dtype": "complex64"}
    assert diagnose.statistics(torch.full((2,), NAN))["batch"] == {
        "shape": [2],
        "dtype": "float32",
        "not_finite": 2,
    }


# --- out of memory ----------------------------------------------------------------------------


class Greedy(nn.Module):
    """Needs more than there is for more than so many samples."""

    def __init__(self, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.most, self.error = most, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise self.error(f"CUDA out of memory. Tried to allocate {len(x)} GiB\nand more lines")
        out: torch.Tensor = self.layer(x)
        return out


def out_of_memory(act: Callable[[], Any]) -> str:
    with pytest.raises(OutOfDeviceMemory) as error:
        act()
    return str(error.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_it_says_what_ran_and_what_to_try(error: type[Exception], tmp_path: Path):
    training = trainer(Greedy(8, error), folder=tmp_path / "run")
    text = out_of_memory(lambda: training.fit(batches([8, 8, 9]), epochs=1))
    assert text.startswith("out of memory on cpu (")
    assert "with a batch of 9\nA batch of 8 ran before it." in text
    assert "Try batch size 5 with accumulate=2, the same effective batch" in text
    assert "--batch-size 5 --accumulate 2" in text and "--batch-size auto" in text
    assert text.endswith("torch says: CUDA out of memory. Tried to allocate 9 GiB")
    assert (tmp_path / "run" / "report.html").exists()


def test_the_first_batch_of_all():
    text = out_of_memory(lambda: trainer(Greedy(8)).fit(batches([9, 9]), epochs=1))
    assert "with a batch of 9" in text and "ran before" not in text
    alone = out_of_memory(lambda: trainer(Greedy(0)).fit(batches([1]), epochs=1))
    assert "Try batch size" not in alone


def test_in_validation_it_is_the_validations_batch():
    training = trainer(Greedy(8))
    text = out_of_memory(lambda: training.fit(batches([8, 8]), batches([16]), epochs=1))
    assert "with a batch of 16\nA batch of 8 ran before it." in text
    assert "with a batch of 32" in out_of_memory(lambda: training.evaluate(batches([32])))


def test_measuring_the_saturation_may_run_out_without_harm():
    class Late(Greedy):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.most = 99 if self.calls <= 30 else 0
            return super().forward(x)

    result = trainer(Late(99)).fit(batches([8] * 30), epochs=1)
    assert result.saturation is None and len(result.history) == 1


def test_other_errors_stay_what_they_are():
    with pytest.raises(KeyError):
        trainer(Greedy(0, KeyError)).fit(batches([8]), epochs=1)
    wide = nn.Linear(7, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer(wide).fit(batches([8]), epochs=1)


def test_mixed_devices_are_named(monkeypatch: pytest.MonkeyPatch):
    class Mixed(nn.Module):
        """Has a plain tensor where no Module.to finds it."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.mask = torch.ones(3, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer(x)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                " cuda:0 and cpu!"
            )

    with pytest.raises(DeviceMismatch, match=r"model\.mask") as error:
        trainer(Mixed()).fit(batches([8]), epochs=1)
    assert error.value.tensors["model.mask"] == "meta"


def test_memory_of_the_device_is_told(monkeypatch: pytest.MonkeyPatch):
    memory = runtime.Memory(free_bytes=0, total_bytes=3 * 2**30)
    monkeypatch.setattr(runtime, "memory", lambda device: memory)
    text = diagnose.out_of_memory(MemoryError(), torch.device("cpu"), batch=None, ran=None)
    assert text.splitlines()[0].endswith("of 3.0 GiB)")
    assert text.endswith("torch says: MemoryError")


def test_a_stopped_run_can_be_gone_on_with(tmp_path: Path):
    training = trainer(loss=Hook(-1, lambda: None), folder=tmp_path / "run")
    stopped(training, ordered(spoilt(17)), epochs=1)
    whole = trainer()
    whole.fit(ordered(points()), epochs=1)
    again = trainer(folder=tmp_path / "run", resume=True)  # from the beginning: none was saved
    again.fit(ordered(points()), epochs=1)
    assert_same(state(again.model), state(whole.model))


def test_weights_are_told_by_name_and_large_ones_are_no_broken_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(3e38)  # their sum overflows
        assert diagnose.non_finite_weights([model]) == []
        model[1].bias[2] = math.inf
        model[2].weight[0] = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
        model[0].bias[0] = math.nan
        model[0].bias.requires_grad_(False)
    assert diagnose.non_finite_weights([model]) == ["1.bias", "2.weight"]
