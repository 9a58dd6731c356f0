"""A run that no longer gets better ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import loader, points, told, trainer

import hasten
from hasten.observe.records import EpochRecord
from hasten.train import checkpoint
from hasten.train.saving import best_epoch, worth


def still(parameters: Any) -> torch.optim.Optimizer:
    """Learns nothing: no epoch after the first is better."""
    return torch.optim.SGD(parameters, lr=0.0)


def epochs(result: hasten.Result) -> list[int]:
    return [record.epoch for record in result.history]


def run(epochs: int, **options: Any) -> hasten.Result:
    torch.manual_seed(0)
    val = hasten.Loader(points(30, seed=9), batch_size=10)
    model = torch.nn.Linear(6, 3)
    return trainer(model, optimizer=still, **options).fit(loader(), val, epochs=epochs)


def test_it_ends_after_so_many_epochs_without_a_better_one(tmp_path: Path) -> None:
    stream, options = told(folder=tmp_path / "run", patience=3)
    result = run(20, **options)
    assert epochs(result) == [1, 2, 3, 4]
    said = "Ended after epoch 4 of 20: none of the last 3 was better than epoch 1 (patience 3)"
    assert said in stream.getvalue()
    assert result.checkpoint is not None
    assert checkpoint.load(result.checkpoint, map_location="cpu").meta["epoch"] == 4
    assert result.best_checkpoint is not None
    assert checkpoint.load(result.best_checkpoint, map_location="cpu").meta["epoch"] == 1


def test_without_patience_it_trains_them_all() -> None:
    assert epochs(run(5)) == [1, 2, 3, 4, 5]


def test_patience_that_ends_with_the_last_epoch_is_no_early_end() -> None:
    stream, options = told(patience=2)
    assert epochs(run(3, **options)) == [1, 2, 3]
    assert "Ended" not in stream.getvalue()


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"folder": tmp_path / "run"}
    assert epochs(run(2, patience=3, **folder)) == [1, 2]
    assert epochs(run(20, patience=3, resume=True, **folder)) == [1, 2, 3, 4]
    assert epochs(run(20, patience=3, resume=True, **folder)) == [1, 2, 3, 4]
    assert epochs(run(20, patience=5, resume=True, **folder)) == [1, 2, 3, 4, 5, 6]


def test_a_loop_of_ones_own_ends_too() -> None:
    _, options = told(patience=2, progress="off")
    run = hasten.Run(**options)
    model = torch.nn.Linear(6, 3)
    model, optimizer = run.prepare(model, still(model.parameters()))
    seen = []
    for epoch in run.epochs(10):
        for data, labels in run.batches(loader()):
            run.backward(torch.nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
        run.log(val_accuracy=[0.1, 0.3, 0.2, 0.3][epoch])
        seen.append(epoch)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("losses", "best"),
    [([], 0), ([3.0, 2.0, 2.0, 4.0], 2), ([float("nan")] * 2, 0), ([float("nan"), 5.0], 2)],
)
def test_the_best_epoch_is_the_first_of_the_best(losses: list[float], best: int) -> None:
    history = [record(number + 1, loss) for number, loss in enumerate(losses)]
    assert best_epoch(history) == best


def test_accuracy_goes_before_loss() -> None:
    assert worth(record(1, 0.5)) == -0.5
    assert worth(record(1, 0.5, val_loss=0.7)) == -0.7
    assert worth(record(1, 0.5, val_loss=0.7, val_accuracy=0.9)) == 0.9


def record(epoch: int, loss: float, **figures: float) -> EpochRecord:
    said: dict[str, Any] = {"val_loss": None, "val_accuracy": None} | figures
    return EpochRecord(
        epoch=epoch,
        step=epoch,
        loss=loss,
        seconds=1.0,
        images_per_s=1.0,
        phases={},
        learning_rate=0.1,
        peak_memory_bytes=None,
        **said,
    )
