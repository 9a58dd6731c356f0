"""Training on a real accelerator: placement, no waiting, precision, memory, checkpoints."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.devices import runtime
from hasten.errors import Interrupted, NonFiniteLoss, OutOfDeviceMemory
from hasten.train import checkpoint

DEVICE = runtime.accelerator()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="no accelerator that torch can use"),
]

QUIET: dict[str, Any] = {"progress": "off", "channels_last": False}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)


def device() -> torch.device:
    assert DEVICE is not None
    return DEVICE


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4)
    )


def points(count: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(count, 16, generator=generator)
    return TensorDataset(data, (data[:, 0] > 0).long() + 2 * (data[:, 1] > 0).long())


def loader(count: int = 512, batch_size: int = 32, **options: Any) -> hasten.Loader:
    return hasten.Loader(points(count), batch_size=batch_size, shuffle=True, **options)


def trainer(model: nn.Module | None = None, **options: Any) -> hasten.Trainer:
    options = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW,
        "lr": 0.01,
        "precision": "float32",
    } | (QUIET | options)
    return hasten.Trainer(model or mlp(), **options)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def test_it_trains_on_the_device_and_learns():
    training = trainer(loss=nn.CrossEntropyLoss(weight=torch.ones(4)))
    result = training.fit(loader(), loader(256), epochs=6)
    assert result.device.type == device().type
    assert {p.device.type for p in training.model.parameters()} == {device().type}
    assert result.val_accuracy is not None and result.val_accuracy > 0.8
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    assert result.saturation is not None and 0 < result.saturation <= 1
    assert result.verdict is not None


def test_losses_agree_with_the_cpus():
    here = trainer(optimizer=torch.optim.SGD, lr=0.1).fit(loader(), epochs=3)
    there = trainer(optimizer=torch.optim.SGD, lr=0.1, device="cpu").fit(loader(), epochs=3)
    assert [r.loss for r in here.history] == pytest.approx(
        [r.loss for r in there.history], rel=2e-3
    )


@pytest.mark.parametrize("precision", ["auto", "bfloat16", "float16"])
def test_each_precision_learns(precision: str):
    training = trainer(precision=precision, clip_norm=1.0, accumulate=2)
    result = training.fit(loader(), loader(256), epochs=8)
    assert result.val_accuracy is not None and result.val_accuracy > 0.7
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}
    if precision != "auto":
        assert result.precision.name == precision


# --- no waiting -------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[Callable[[bool], None]]:
    """Gives a switch: while on, whatever makes the host wait for the device raises."""
    if device().type != "cuda":
        pytest.skip("only CUDA tells what makes the host wait")

    def switch(on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    try:
        yield switch
    finally:
        switch(False)


class Switching(nn.Module):
    """A loss that turns the switch on at its third call and off at its last."""

    def __init__(self, switch: Callable[[bool], None], calls: int) -> None:
        super().__init__()
        self.switch, self.calls, self.done = switch, calls, 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.done += 1
        if self.done == 3:
            self.switch(True)
        if self.done == self.calls:
            self.switch(False)
        return nn.functional.cross_entropy(outputs, labels)


@pytest.mark.parametrize("plan", ["resident", "gather"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_no_step_makes_the_host_wait(plan: str, precision: str):
    with waiting_is_an_error() as switch:
        training = trainer(precision=precision, clip_norm=1.0, accumulate=2, log_every=1000)
        training.loss = loss = Switching(switch, 64)
        training.fit(loader(2048, plan=plan), epochs=1)
        assert loss.done >= 64


def test_no_step_of_a_loop_of_ones_own_makes_the_host_wait():
    with waiting_is_an_error() as switch:
        run = hasten.Run(**QUIET, precision="bfloat16", log_every=1000)
        model = mlp()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        given = DataLoader(points(2048), batch_size=32, pin_memory=True)
        for _ in run.epochs(1):
            for place, (data, labels) in enumerate(run.batches(given)):
                switch(3 <= place < 60)
                assert data.device.type == device().type
                run.backward(nn.functional.cross_entropy(model(data), labels))
                run.step(optimizer)


# --- losses that are not finite, read in windows ------------------------------------------------


@pytest.mark.parametrize("at", [0, 77, 511])
def test_a_bad_loss_is_placed_right(at: int):
    data, labels = points()[:]
    data[at, 3] = float("nan")
    given = hasten.Loader(TensorDataset(data, labels), batch_size=32, shuffle=False)
    with pytest.raises(NonFiniteLoss) as error:
        trainer(log_every=10).fit(given, epochs=1)
    assert error.value.step == at // 32 + 1
    assert error.value.details["batch"]["batch[0]"]["not_finite"] == 1
    assert "The data is at fault" in str(error.value)


# --- checkpoints ------------------------------------------------------------------------------


def test_a_checkpoint_of_the_device_goes_on_on_the_cpu_and_back(tmp_path: Path):
    first = trainer(folder=tmp_path / "run")
    first.fit(loader(), epochs=1)
    kept = checkpoint.load(checkpoint.find(tmp_path / "run"), map_location="cpu")
    for name, value in state(first.model).items():
        assert torch.equal(kept.model[name], value)

    host = trainer(folder=tmp_path / "run", resume=True, device="cpu")
    middle = host.fit(loader(), epochs=2)
    assert {p.device.type for p in host.model.parameters()} == {"cpu"}
    back = trainer(folder=tmp_path / "run", resume=True)
    last = back.fit(loader(), epochs=3)
    assert {p.device.type for p in back.model.parameters()} == {device().type}
    assert [r.epoch for r in last.history] == [1, 2, 3]
    assert middle.history[1].loss < middle.history[0].loss
    assert last.history[2].loss < last.history[1].loss
    whole = trainer().fit(loader(), epochs=3)
    assert last.history[2].loss == pytest.approx(whole.history[2].loss, rel=0.02)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_stopped_run_goes_on_as_one_never_stopped(tmp_path: Path, precision: str):
    import os
    import signal

    class Stopping(nn.Module):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at, self.calls = at, 0

        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            return nn.functional.cross_entropy(outputs, labels)

    def once(name: str, at: int = -1, **options: Any) -> Any:
        training = trainer(
            mlp(dropout=0.5),
            folder=tmp_path / name,
            precision=precision,
            loss=Stopping(at),
            **options,
        )
        return training.fit(loader(), epochs=2), state(training.model)

    whole, weights = once("whole")
    with pytest.raises(Interrupted):
        once("run", at=21)
    resumed, again = once("run", resume=True)
    assert [r.loss for r in resumed.history] == pytest.approx(
        [r.loss for r in whole.history], rel=1e-6
    )
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)


# --- memory -----------------------------------------------------------------------------------


class Hungry(nn.Module):
    """Takes a twentieth of the device's memory for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        memory = runtime.memory(device())
        assert memory is not None
        self.share = memory.total_bytes // 20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.empty(len(x) * self.share, dtype=torch.uint8, device=x.device)
        out: torch.Tensor = self.layer(x)
        return out


def test_memory_that_runs_out_is_told_with_what_ran():
    data, labels = points()[:]
    given = [(data[:2], labels[:2]), (data[:40], labels[:40])]
    with pytest.raises(OutOfDeviceMemory) as error:
        trainer(Hungry()).fit(given, epochs=1)
    text = str(error.value)
    assert f"out of memory on {device().type}" in text and "GiB)" in text
    assert "with a batch of 40\nA batch of 2 ran before it." in text
    assert "Try batch size 20 with accumulate=2" in text
    del error
    runtime.empty_cache(device())
    trainer().fit(loader(64), epochs=1)  # the device is as usable as before


def test_the_batch_that_fits_is_found():
    model = Hungry()
    before = copy.deepcopy(model.state_dict())
    plan = trainer(model).fitting_batch(lambda size: loader(batch_size=size), 64)
    assert plan.micro in (2, 4, 8, 16) and plan.micro * plan.accumulate == 64
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_peak_memory_is_in_the_record():
    record = trainer().fit(loader(), epochs=1).history[0]
    if device().type == "cuda":
        assert record.peak_memory_bytes is not None and record.peak_memory_bytes > 0
