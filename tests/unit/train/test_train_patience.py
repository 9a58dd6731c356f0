"""A run that no longer gets better ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import QUIET, loader, points, told, trainer

import hasten
from hasten.observe.records import EpochRecord
from hasten.train import checkpoint
from hasten.train.saving import best_epoch, since_best, worth


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
    assert worth(record(1, 0.5)).value == -0.5
    assert worth(record(1, 0.5, val_loss=0.7)).value == -0.7
    assert worth(record(1, 0.5, val_loss=0.7, val_accuracy=0.9)).value == 0.9


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


def test_an_accuracy_is_compared_with_accuracies_alone() -> None:
    history = [
        record(1, 0.001),
        record(2, 0.9, val_accuracy=0.3),
        record(3, 0.0001),
        record(4, 0.8, val_accuracy=0.4),
    ]
    assert best_epoch(history) == 4
    assert best_epoch(history[:3]) == 2
    assert since_best([*history, record(5, 0.0), record(6, 0.7, val_accuracy=0.1)]) == [6]
    assert worth(record(1, math.nan, val_accuracy=0.5)) > worth(record(1, 0.0))


def test_the_best_checkpoint_is_the_best_of_the_epochs_that_were_validated(tmp_path: Path) -> None:
    """Validated in every other epoch, with a training loss whose negative is above any accuracy."""
    accuracies = {2: 0.6, 4: 0.5, 6: 0.7, 8: 0.1}
    folder = tmp_path / "run"
    for resume in (False, True):
        made = hasten.Run(folder=folder, resume=resume, patience=2, **QUIET)
        model = torch.nn.Linear(6, 3)
        model, optimizer = made.prepare(model, still(model.parameters()))
        for epoch in made.epochs(12 if resume else 5):
            for x, _ in made.batches(loader()):
                made.backward(model(x).mean() * 0 - 2.0)
                made.step(optimizer)
            if epoch + 1 in accuracies:
                made.log(val_accuracy=accuracies[epoch + 1])
        best = checkpoint.best(folder / checkpoint.FOLDER)
        assert best is not None
        step = made.history[5 if resume else 1].step
        assert checkpoint.load(best, map_location="cpu").meta["step"] == step
    assert len(made.history) == 12  # two that were validated and worse have not come


def test_patience_counts_the_epochs_that_were_validated() -> None:
    stream, options = told(patience=2)
    made = hasten.Run(**options)
    model = torch.nn.Linear(6, 3)
    model, optimizer = made.prepare(model, still(model.parameters()))
    for epoch in made.epochs(20):
        for x, _ in made.batches(loader()):
            made.backward(model(x).mean() * 0)
            made.step(optimizer)
        if epoch % 2 == 0:
            made.log(val_accuracy=0.5)
    assert len(made.history) == 5
    assert "none of the 2 validated since was better than epoch 1" in stream.getvalue()
