"""The Trainer does what the plain loop does, to the bit, with any kind of data and parts."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from train_helpers import (
    assert_same,
    batches,
    loader,
    losses,
    mlp,
    plain_loop,
    points,
    sgd,
    state,
    told,
    trainer,
)

from hasten.errors import DataError, UsageError
from hasten.train.trainer import call


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain_of(make: Any, given: Any, **options: Any) -> tuple[nn.Module, list[float]]:
    model = mlp()
    optimizer = make(model.parameters())
    for name in ("per_step", "per_epoch"):
        if name in options:
            options[name] = options[name](optimizer)
    return model, plain_loop(model, given, optimizer, **options)


# --- the same as the plain loop ---------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.5},
        {"accumulate": 5},
        {"scheduler": lambda o: lr_scheduler.ExponentialLR(o, 0.5), "schedule_per": "epoch"},
        {"scheduler": lambda o: lr_scheduler.StepLR(o, 3), "schedule_per": "step"},
        {
            "scheduler": lambda o, n: lr_scheduler.OneCycleLR(o, 0.2, total_steps=n),
            "schedule_per": "step",
        },
        {"scheduler": lambda o, n: lr_scheduler.LinearLR(o, total_iters=n)},
    ],
    ids=["bare", "clip", "accumulate", "per epoch", "per step", "of steps", "of epochs"],
)
def test_weights_and_losses_are_those_of_the_plain_loop(make: Any, options: dict[str, Any]):
    given = loader()  # 5 batches an epoch
    other: dict[str, Any] = {
        "clip": options.get("clip_norm"),
        "accumulate": options.get("accumulate", 1),
    }
    schedule = options.get("scheduler")
    if schedule is not None:
        per = "per_" + options.get("schedule_per", "epoch")
        count = 10 if per == "per_step" else 2
        arguments = schedule.__code__.co_argcount
        other[per] = lambda o: schedule(*(o, count)[:arguments])
    expected, means = plain_of(make, loader(), **other)

    training = trainer(optimizer=make, **options)
    result = training.fit(given, epochs=2)

    assert_same(state(training.model), state(expected))
    assert [record.loss for record in result.history] == pytest.approx(means, rel=1e-12)


def test_an_optimizer_class_is_made_with_its_fused_kernel_and_lr():
    expected, _ = plain_of(lambda p: torch.optim.Adam(p, lr=0.03, fused=True), loader())
    training = trainer(optimizer=torch.optim.Adam, lr=0.03)
    training.fit(loader(), epochs=2)
    assert_same(state(training.model), state(expected))


def test_an_optimizer_made_before_steps_the_model():
    expected, _ = plain_of(sgd, loader())
    model = mlp()
    trainer(model, optimizer=sgd(model.parameters())).fit(loader(), epochs=2)
    assert_same(state(model), state(expected))


def test_an_optimizer_class_without_a_fused_kernel():
    expected, _ = plain_of(lambda p: torch.optim.RMSprop(p, lr=0.01), loader())
    training = trainer(optimizer=torch.optim.RMSprop, lr=0.01)
    training.fit(loader(), epochs=2)
    assert_same(state(training.model), state(expected))


class Unsized:
    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


@pytest.mark.parametrize("kind", [list, Unsized], ids=["sized", "of unknown length"])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accumulated_batches_step_as_their_samples_in_one_batch_would(kind: Any, clip: Any):
    small = batches([4, 4, 4, 4, 4, 4, 4, 3])  # windows of 3: 12, 12 and 4 + 3 samples
    data, labels = (torch.cat(parts) for parts in zip(*small, strict=True))
    large = list(zip(data.split(12), labels.split(12), strict=True))

    def without_norm() -> nn.Module:  # whose statistics are of a batch
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    whole = trainer(without_norm(), clip_norm=clip)
    expected = whole.fit(large, epochs=3)
    parts = trainer(without_norm(), accumulate=3, clip_norm=clip)
    result = parts.fit(kind(small), epochs=3)

    for one, other in zip(state(parts.model).values(), state(whole.model).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one_, other_ in zip(losses(result), losses(expected), strict=True):
        assert one_[0] == pytest.approx(other_[0], rel=1e-5)
    assert parts.run is not None and parts.run.global_step == 9


def test_two_runs_are_the_same_to_the_bit():
    results = []
    for _ in range(2):
        training = trainer(mlp(dropout=0.5), optimizer=torch.optim.AdamW)
        result = training.fit(loader(), loader(points(20, 5)), epochs=3)
        results.append((state(training.model), losses(result)))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_validation_changes_nothing_in_the_training():
    models = []
    for val in (None, DataLoader(points(20, 5), batch_size=7, shuffle=True)):
        training = trainer(mlp(dropout=0.5))
        training.fit(DataLoader(points(), batch_size=8, shuffle=True), val, epochs=3)
        models.append(state(training.model))
    assert_same(*models)


# --- what it says -----------------------------------------------------------------------------


def test_it_prints_the_device_then_a_line_an_epoch(tmp_path: Path):
    stream, options = told(folder=tmp_path / "run")
    trainer(**options).fit(loader(), loader(points(20, 5)), epochs=2)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("Using device: cpu")
    epochs = [line for line in lines if line.startswith("Epoch")]
    form = (
        r"Epoch \[{}/2\], Loss: \d+\.\d{{4}}, val accuracy: \d+\.\d\d%, \d+\.\d+ s,"
        r" [\d,]+ images/s"
    )
    assert len(epochs) == 2
    for number, line in enumerate(epochs, 1):
        assert re.fullmatch(form.format(number), line), line


def test_without_validation_the_line_has_no_accuracy():
    stream, options = told()
    trainer(**options).fit(loader(), epochs=1)
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("Epoch"))
    assert re.fullmatch(r"Epoch \[1/1\], Loss: \d\.\d{4}, \d\.\d+ s, [\d,]+ images/s", line), line


def test_progress_off_says_nothing(capsys: pytest.CaptureFixture[str]):
    trainer().fit(loader(), epochs=1)
    assert capsys.readouterr() == ("", "")


def test_what_a_run_leaves_in_its_folder(tmp_path: Path):
    folder = tmp_path / "runs" / "one"
    config = {"data": "points", "path": "é"}
    training = trainer(folder=folder, log_every=2, config=config)
    result = training.fit(loader(), loader(points(20, 5)), epochs=2)

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["kind"], line["epoch"], line["step"]) for line in lines]
    first = [("step", 1, 2), ("step", 1, 4), ("epoch", 1, 5)]
    assert kinds == [*first, ("step", 2, 7), ("step", 2, 9), ("epoch", 2, 10)]
    assert [line["loss"] for line in lines if line["kind"] == "epoch"] == [
        record.loss for record in result.history
    ]
    kept = json.loads((folder / "config.json").read_text())
    assert kept["config"] == config
    assert kept["settings"]["log_every"] == 2
    assert kept["device"]["device"] == "cpu"
    assert kept["optimizers"] == ["SGD"]
    assert {"torch", "python"} <= kept["versions"].keys()
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "model.safetensors",
        "report.html",
    }
    assert result.folder == folder and result.report == folder / "report.html"
    assert result.checkpoint is not None and result.checkpoint.name == "step-00000010"


def test_history_is_strict_json():
    result = trainer(loss=nn.CrossEntropyLoss()).fit(loader(), loader(points(9, 5)), epochs=1)
    text = json.dumps([record.to_json() for record in result.history], allow_nan=False)
    assert json.loads(text)[0]["val_accuracy"] == result.val_accuracy


def test_an_epochs_record_has_the_learning_rate_it_trained_with():
    training = trainer(scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.1))
    result = training.fit(loader(), epochs=3)
    assert [r.learning_rate for r in result.history] == pytest.approx([0.1, 0.01, 0.001])


# --- kinds of batches and models --------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.cat([left, right], 1))
        return out


def test_batches_of_any_form_train_the_same():
    pairs = batches([8] * 4)
    forms: list[list[Any]] = [
        [((x[:, :2], x[:, 2:]), y) for x, y in pairs],
        [[[x[:, :2], x[:, 2:]], y] for x, y in pairs],
        [(x[:, :2], x[:, 2:], y) for x, y in pairs],
        [{"left": x[:, :2], "right": x[:, 2:], "labels": y} for x, y in pairs],
        [({"right": x[:, 2:], "left": x[:, :2]}, y) for x, y in pairs],
    ]
    models = []
    for form in forms:
        torch.manual_seed(1)
        training = trainer(TwoInputs())
        training.fit(form, form, epochs=1)
        assert training.last_evaluation is not None and training.last_evaluation.samples == 32
        models.append(state(training.model))
    for other in models[1:]:
        assert_same(models[0], other)


def test_a_batch_without_labels_is_refused_saying_what_it_is():
    with pytest.raises(DataError, match=r"pair \(data, labels\).*this one is a Tensor"):
        trainer().fit([torch.ones(4, 6)], epochs=1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(points(20))


def test_a_stream_trains():
    training = trainer()
    result = training.fit(DataLoader(Stream(), batch_size=8), epochs=2)
    assert training.run is not None and training.run.global_step == 6
    assert len(result.history) == 2


def test_an_iterator_that_is_used_up_is_said_in_the_second_epoch():
    with pytest.raises(DataError, match=r"no batch in epoch 2.*read only once"):
        trainer().fit(iter(batches([8, 8])), epochs=2)


@pytest.mark.parametrize("empty", [[], DataLoader(points(4), batch_size=8, drop_last=True)])
def test_data_without_a_batch_is_refused(empty: Any):
    with pytest.raises(DataError, match="gives no batch"):
        trainer().fit(empty, epochs=1)


def test_empty_validation_data_is_refused_before_training():
    training = trainer()
    before = state(training.model)
    with pytest.raises(DataError, match="validation data is empty"):
        training.fit(loader(), [], epochs=1)
    assert_same(before, state(training.model))


def test_regression_has_a_loss_and_no_accuracy():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    given = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    training = trainer(nn.Linear(4, 1), loss=nn.MSELoss())
    result = training.fit(given, given, epochs=3)
    assert result.val_accuracy is None
    assert result.history[-1].val_loss is not None
    assert result.history[-1].val_loss < result.history[0].loss / 2
    assert result.evaluation is not None and result.evaluation.confusion is None


def test_binary_outputs_have_no_accuracy_of_classes():
    x, y = points(32)[:]
    given = DataLoader(TensorDataset(x, (y > 0).float()[:, None]), batch_size=8)
    training = trainer(nn.Linear(6, 1), loss=nn.BCEWithLogitsLoss())
    result = training.fit(given, given, epochs=2)
    assert result.val_accuracy is None and result.history[1].loss < result.history[0].loss


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_narrow_dtypes_count_for_accuracy(dtype: torch.dtype):
    given = [(x, y.to(dtype)) for x, y in batches([8, 8])]
    training = trainer(loss=lambda out, y: nn.functional.cross_entropy(out, y.long()))
    result = training.fit(given, given, epochs=1)
    assert result.val_accuracy is not None


def test_a_bar_of_one_batch_of_one_sample():
    training = trainer(nn.Linear(6, 3))
    result = training.fit(batches([1]), batches([1]), epochs=1)
    assert result.val_accuracy in (0.0, 1.0) and result.saturation is None


# --- losses, optimizers, schedulers -----------------------------------------------------------


class Tempered(nn.Module):
    """A loss with a parameter of its own to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs / self.temperature, labels, weight=self.weight)


def test_a_losss_own_parameters_are_trained_and_saved(tmp_path: Path):
    loss = Tempered()
    trainer(loss=loss, folder=tmp_path / "run").fit(loader(), epochs=1)
    learned = loss.temperature.item()
    assert learned != 2.0

    again = Tempered()
    trainer(loss=again, folder=tmp_path / "run", resume=True).fit(loader(), epochs=1)
    assert again.temperature.item() == learned


def test_a_ready_made_optimizer_trains_only_what_it_holds():
    loss, model = Tempered(), mlp()
    trainer(model, loss=loss, optimizer=sgd(model.parameters())).fit(loader(), epochs=1)
    assert loss.temperature.item() == 2.0


def test_class_weights_weigh():
    heavy = nn.CrossEntropyLoss(weight=torch.tensor([0.01, 0.01, 1.0]))
    result = trainer(loss=heavy).fit(loader(), loader(), epochs=5)
    assert result.evaluation is not None and result.evaluation.confusion is not None
    predicted = [sum(row[column] for row in result.evaluation.confusion) for column in range(3)]
    plain = trainer().fit(loader(), loader(), epochs=5)
    assert plain.evaluation is not None and plain.evaluation.confusion is not None
    assert predicted[2] > sum(row[2] for row in plain.evaluation.confusion) + 5


def test_frozen_parameters_stay():
    model = mlp()
    first: Any = model[0]
    first.requires_grad_(False)
    before = first.weight.clone()
    trainer(model, optimizer=torch.optim.AdamW).fit(loader(), epochs=1)
    assert torch.equal(first.weight, before)


def test_reduce_on_plateau_is_given_the_validation_loss():
    seen: list[float] = []

    class Watching(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(float(metrics))
            super().step(metrics)

    training = trainer(scheduler=Watching)
    result = training.fit(loader(), loader(points(20, 5)), epochs=3)
    assert seen == [record.val_loss for record in result.history]
    seen.clear()
    result = trainer(scheduler=Watching).fit(loader(), epochs=2)
    assert seen == [record.loss for record in result.history]


class Parameterless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3]


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": lambda x: x}, "model is a torch.nn.Module, not function"),
    ({"model": Parameterless()}, "Parameterless has no parameter to train"),
    ({"model": frozen()}, "all have requires_grad=False"),
    ({"model": nn.Sequential(nn.LazyLinear(3))}, r"without a shape yet \(0.weight"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times a step"),
    ({"optimizer": lambda p: 3}, "optimizer gave a int, not an Optimizer"),
    ({"optimizer": torch.optim.SGD, "lr": -1.0}, "cannot make the optimizer: Invalid learning"),
    ({"optimizer": sgd(mlp().parameters())}, "holds no parameter of the prepared modules"),
    ({"optimizer": sgd(mlp().parameters()), "lr": 0.1}, "this optimizer is made already"),
    ({"schedule_per": "batch"}, "'step' or 'epoch'"),
    ({"schedule_per": "step"}, "needs a scheduler"),
    ({"scheduler": lr_scheduler.ExponentialLR}, r"lambda optimizer: ExponentialLR\(optimizer, ga"),
    ({"scheduler": lambda o: 3}, "scheduler gave a int"),
    (
        {"scheduler": lr_scheduler.ConstantLR(sgd(mlp().parameters()))},
        "scheduler is of another optimizer",
    ),
    (
        {"scheduler": lr_scheduler.ReduceLROnPlateau, "schedule_per": "step"},
        "ReduceLROnPlateau looks at an epoch's loss",
    ),
    (
        {"scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.1)},
        "cannot make the scheduler: You must define either total_steps",
    ),
    ({"metrics": {"val_loss": object()}}, "cannot be named val_loss"),
    ({"device": "abacus"}, "abacus"),
    ({"precision": "float8"}, "unknown precision 'float8'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_is_refused_with_a_clear_word(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        trainer(**options).fit(loader(), epochs=1)


def test_epochs_are_at_least_one():
    with pytest.raises(UsageError, match="epochs=0: at least 1"):
        trainer().fit(loader(), epochs=0)


def test_steps_are_asked_of_a_loader_without_a_length():
    with pytest.raises(UsageError, match="needs a loader with a length"):
        trainer(
            scheduler=lambda o, n: lr_scheduler.LinearLR(o, total_iters=n), schedule_per="step"
        ).fit(DataLoader(Stream(), batch_size=4), epochs=1)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"a tensor of shape \[8\]"),
        (lambda out, y: (out.mean(), {}), "a tuple"),
        (lambda out, y: out.mean().item(), "a float"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss: Any, said: str):
    with pytest.raises(UsageError, match=f"the loss is {said}.*mean over the batch"):
        trainer(loss=loss).fit(loader(), epochs=1)


# --- fit again, evaluate alone ----------------------------------------------------------------


def test_fit_again_trains_further():
    training = trainer()
    first = training.fit(loader(), loader(), epochs=1)
    second = training.fit(loader(), epochs=2)
    assert len(first.history) == 1 and len(second.history) == 2
    assert second.history[-1].loss < first.history[0].loss
    assert second.evaluation is None  # the first fit's is not passed off as its own


def test_fit_again_into_the_same_folder_is_refused(tmp_path: Path):
    training = trainer(folder=tmp_path / "run")
    training.fit(loader(), epochs=1)
    with pytest.raises(UsageError, match="holds a run already"):
        training.fit(loader(), epochs=1)


def test_evaluate_alone_and_after_training(tmp_path: Path):
    training = trainer(folder=tmp_path / "run")
    alone = training.evaluate(loader(points(20, 5)))
    assert alone.samples == 20 and alone.accuracy is not None
    assert not (tmp_path / "run").exists()
    result = training.fit(loader(), loader(points(20, 5)), epochs=2)
    after = training.evaluate(loader(points(20, 5)))
    assert after.loss == result.history[-1].val_loss
    report = (tmp_path / "run" / "report.html").read_bytes()
    with pytest.raises(DataError, match="data to evaluate on gives no batch"):
        training.evaluate([])
    assert (tmp_path / "run" / "report.html").read_bytes() == report


def test_metrics_are_torchmetrics_by_name(tmp_path: Path):
    from torchmetrics.classification import MulticlassF1Score

    f1 = MulticlassF1Score(3, average="macro")
    folder = tmp_path / "run"
    training = trainer(metrics={"f1": f1}, folder=folder)
    result = training.fit(loader(), loader(points(20, 5)), epochs=2)
    model = copy.deepcopy(training.model).eval()
    x, y = points(20, 5)[:]
    expected = MulticlassF1Score(3, average="macro")(model(x), y).item()
    assert result.history[-1].metrics["f1"] == pytest.approx(expected)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["metrics"]["f1"] == pytest.approx(expected)


def test_a_metric_of_several_numbers_is_refused():
    from torchmetrics.classification import MulticlassF1Score

    with pytest.raises(UsageError, match="f1 does not compute one number"):
        trainer(metrics={"f1": MulticlassF1Score(3, average=None)}).fit(
            loader(), loader(), epochs=1
        )


def test_training_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from train_helpers import loader, trainer\n"
        "trainer().fit(loader(), loader(), epochs=1)\n"
        "heavy = 'torchmetrics matplotlib rich PIL jinja2 safetensors sklearn'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[]\n", done.stderr


class Named(nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.sum(1, keepdim=True).repeat(1, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pixels": torch.ones(2, 3), "names": ["a", "b"]}, "keyword arguments pixels, names"),
        ((torch.ones(2, 3), torch.ones(2, 3)), "becomes 2 arguments, and Named.forward"),
    ],
)
def test_data_that_the_model_does_not_take_is_told_of(data: Any, message: str):
    with pytest.raises(UsageError, match=message):
        call(Named(), data)


def test_a_type_error_of_the_model_s_own_comes_as_it_is():
    class Wrong(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        call(Wrong(), torch.ones(2))
    assert call(Named(), {"pixels": torch.ones(2, 3)}).shape == (2, 2)
