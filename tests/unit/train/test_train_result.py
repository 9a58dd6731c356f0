"""What a run comes to: saturation, verdict, report and weights."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from train_helpers import (
    INTERRUPT,
    Hook,
    assert_same,
    batches,
    loader,
    mlp,
    points,
    state,
    told,
    trainer,
)

import hasten
from hasten.errors import HastenError, Interrupted
from hasten.observe.remedies import ADVICE, Remedy
from hasten.train import probe, result, weights


def test_what_a_result_says(tmp_path: Path):
    val = loader(points(20, 5))
    training = trainer(folder=tmp_path / "run")
    found = training.fit(loader(batch_size=4), val, epochs=2)
    assert len(found.history) == 2
    assert found.val_accuracy == found.history[-1].val_accuracy
    assert found.seconds == pytest.approx(sum(record.seconds for record in found.history))
    assert found.device == torch.device("cpu") and found.precision.name == "float32"
    assert found.feed.startswith("gather, 1 thread - ")
    assert found.verdict is not None and found.verdict.advice
    assert found.evaluation is not None and found.evaluation.loss == found.history[-1].val_loss
    assert found.report is not None and "Epoch" in found.report.read_text(encoding="utf-8")
    assert found.weights is not None
    assert_same(weights.read(found.weights), state(training.model))
    assert "report_data" not in repr(found)


def test_without_a_folder_there_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = trainer().fit(loader(), epochs=1)
    places = (found.folder, found.checkpoint, found.best_checkpoint, found.weights, found.report)
    assert places == (None,) * 5
    assert list(tmp_path.iterdir()) == []


def test_measuring_the_saturation_leaves_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch):
    training = trainer(mlp(dropout=0.5))
    given = loader(batch_size=4)
    measured: list[Any] = []
    real = result.measure_saturation

    def watched(run: Any, training: Any) -> Any:
        before = state(training.model), torch.get_rng_state()
        found = real(run, training)
        assert_same(state(training.model), before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert all(parameter.grad is None for parameter in training.model.parameters())
        measured.append(found)
        return found

    monkeypatch.setattr(result, "measure_saturation", watched)
    training.fit(given, epochs=2)
    assert measured[0] is not None


def test_the_saturation_is_the_ready_step_over_the_runs_own(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    class Slow:
        def __iter__(self) -> Any:
            for batch in batches([8] * 5):
                now[0] += 3.0  # waiting
                yield batch

    class Loss(nn.Module):
        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            now[0] += 1.0  # computing
            return nn.functional.cross_entropy(outputs, labels)

    found = trainer(loss=Loss(), clock=lambda: now[0]).fit(Slow(), epochs=1)
    assert found.saturation == pytest.approx(5 / 17)  # the first batch lay ready
    assert found.verdict is not None and found.verdict.bound_by == "waiting for data"


def test_a_run_that_others_slowed_down_tells_no_saturation():
    now, training_s = [0.0], [50.0]

    class Loss(nn.Module):
        def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            now[0] += training_s[0]
            return nn.functional.cross_entropy(outputs, labels)

    class Last:
        def __iter__(self) -> Any:
            yield from batches([8] * 5)
            training_s[0] = 1.0  # the other program ended

    found = trainer(loss=Loss(), clock=lambda: now[0]).fit(Last(), epochs=1)
    assert found.saturation is None and found.report_data.saturation is None
    assert found.verdict is not None and found.verdict.bound_by == "compute"
    assert any("other programs had the cores" in line for line in found.verdict.evidence)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (lambda data, slow: DataLoader(data, 4, sampler=slow, num_workers=2), "no workers"),
        (lambda data, slow: DataLoader(data, 4, sampler=slow), "rows"),
        (lambda data, slow: hasten.Loader(data, 4, sampler=slow, num_workers=2), "whole"),
        (lambda data, slow: [data[[i, i + 1]] for i in range(40)], None),
    ],
)
def test_a_run_that_waits_is_told_what_its_feed_would_be_quicker_by(
    given: Callable[[Any, Any], Any], remedy: Remedy | None
):
    now = [0.0]

    class Slow(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for index in range(160):
                now[0] += 3.0  # waiting
                yield index

        def __len__(self) -> int:
            return 160

    class Listed:
        def __init__(self, batches: list[Any]) -> None:
            self.batches = batches

        def __iter__(self) -> Iterator[Any]:
            for batch in self.batches:
                now[0] += 3.0
                yield batch

    loader = given(points(160), Slow())
    loader = Listed(loader) if isinstance(loader, list) else loader
    found = trainer(clock=lambda: now[0]).fit(loader, epochs=1)
    assert found.verdict is not None and found.verdict.bound_by == "waiting for data"
    assert found.verdict.advice == ADVICE[remedy or "as given"]


def test_too_few_steps_tell_no_saturation():
    assert trainer().fit(batches([8, 8]), epochs=1).saturation is None


def test_an_error_ends_in_a_report_that_says_so(tmp_path: Path):
    training = trainer(
        loss=Hook(7, lambda: (_ for _ in ()).throw(HastenError("it <broke>"))),
        folder=tmp_path / "run",
    )
    with pytest.raises(HastenError, match="it <broke>"):
        training.fit(loader(), epochs=2)
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "it &lt;broke&gt;" in text
    assert training.run is not None and training.run.began


def test_an_error_before_the_first_step_leaves_no_report(tmp_path: Path):
    training = trainer(
        loss=Hook(0, lambda: (_ for _ in ()).throw(HastenError("early"))), folder=tmp_path / "run"
    )
    with pytest.raises(HastenError):
        training.fit(loader(), epochs=1)
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_report_that_cannot_be_written_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(folder: Path, data: Any) -> Path:
        raise HastenError("no room for the report")

    monkeypatch.setattr(result, "write_report", full)
    training = trainer(
        loss=Hook(7, INTERRUPT),
        folder=tmp_path / "run",
    )
    with pytest.raises(Interrupted) as stopped:
        training.fit(loader(), epochs=2)
    assert "no room for the report" in stopped.value.__notes__[0]


def test_a_resumed_run_has_the_history_of_both(tmp_path: Path):
    trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    found = trainer(folder=tmp_path / "run", resume=True).fit(loader(), epochs=3)
    assert [record.epoch for record in found.history] == [1, 2, 3]
    assert found.resumed_from is not None
    assert not math.isnan(found.report_data.images_per_s)
    assert found.report_data.planned_epochs == 3


def test_steps_are_timed_without_a_trace_in_the_gradients():
    training = trainer()
    training.fit(loader(), epochs=1)
    run = training.run
    assert run is not None
    probe.time_step(run, training, run.full_batch, run.precision)
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_folder_removed_after_the_last_save_gets_weights_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "run"
    real = result.measure_saturation

    def removed(run: Any, training: Any) -> Any:
        shutil.rmtree(folder)
        return real(run, training)

    monkeypatch.setattr(result, "measure_saturation", removed)
    training = trainer(folder=folder)
    found = training.fit(loader(), epochs=1)
    assert found.report == folder / "report.html" and found.report.exists()
    assert found.weights is not None
    assert_same(weights.read(found.weights), state(training.model))


def test_memory_that_one_of_several_lacks_while_it_measures_is_no_secret(
    monkeypatch: pytest.MonkeyPatch,
):
    """The others are in the step with it: were it to go on, their words would not match."""

    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("out of memory")

    training = trainer()
    training.fit(loader(batch_size=4), epochs=1)
    assert training.run is not None
    monkeypatch.setattr(probe, "time_step", full)
    assert result.measure_saturation(training.run, training) is None
    monkeypatch.setattr(training.run.world, "size", 2)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            result.measure_saturation(training.run, training)
    finally:
        training.run.world.size = 1  # it is the one of all runs alone


def test_what_is_left_is_said_when_the_last_epoch_is_done(tmp_path: Path):
    stream, options = told()
    trainer(**options).fit(loader(batch_size=4), epochs=1)
    assert stream.getvalue().splitlines()[-1] == "Finishing: 5 steps are timed for the saturation"
    stream, options = told(folder=tmp_path / "run")
    trainer(**options).fit(batches([8, 8]), epochs=1)  # too few to tell the saturation
    said = stream.getvalue().splitlines()[-1]
    assert said == "Finishing: model.safetensors and report.html are written"


def test_a_page_adds_to_what_the_report_shows(tmp_path: Path):
    def page(known: Any) -> Any:
        return dataclasses.replace(known, classes=["sand", "clay", "silt"])

    val = loader(points(20, 5))
    found = trainer(folder=tmp_path / "run").fit(loader(), val, epochs=1, page=page)
    assert found.report is not None and "clay" in found.report.read_text(encoding="utf-8")
    assert found.report_data.classes == ["sand", "clay", "silt"]
    assert found.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000005"
