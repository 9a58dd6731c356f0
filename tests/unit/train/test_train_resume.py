"""A run that was stopped or killed ends as one that never was: weights, losses and log."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
from train_helpers import (
    INTERRUPT,
    QUIET,
    TERMINATE,
    Hook,
    Reading,
    assert_same,
    batches,
    loader,
    logged,
    losses,
    mlp,
    points,
    saved,
    send,
    sgd,
    state,
    told,
    trainer,
)

import hasten
import warm
from hasten.errors import CheckpointError, DataError, Interrupted, UsageError
from hasten.train import checkpoint

EPOCHS = 3
BATCHES = 5  # of an epoch: 40 points by 8
CALLS = BATCHES + 3  # of the loss: 20 points by 8 to validate on

Outcome = tuple[dict[str, torch.Tensor], list[Any], list[Any], dict[str, Any]]


def noop() -> None:
    pass


def run_once(
    folder: Path,
    make_loader: Callable[[], Any],
    *,
    at: int = -1,
    act: Callable[[], None] = noop,
    validating: bool = False,
    resume: bool = False,
    **options: Any,
) -> Outcome:
    """Train, acting when batch ``at`` of the training or of the validation is read."""
    model = mlp(dropout=0.5)
    training = trainer(model, folder=folder, resume=resume, log_every=2, **options)
    given: Any = make_loader()
    val: Any = DataLoader(points(20, 5), batch_size=8, shuffle=True)
    if validating:
        val = Reading(val, at, act)
    elif at >= 0:
        training.loss = Hook(at, act)
    try:
        result = training.fit(given, val, epochs=EPOCHS)
    finally:
        if hasattr(given, "close"):
            given.close()
    end = saved(folder)
    return state(model), losses(result), logged(folder), end.training


def assert_goes_on(
    tmp_path: Path,
    make_loader: Callable[[], Any],
    stops: list[int],
    *,
    act: Callable[[], None] = INTERRUPT,
    validating: bool = False,
    **options: Any,
) -> None:
    whole = run_once(tmp_path / "whole", make_loader, **options)
    for at in stops:
        folder = tmp_path / f"stopped-{at}"
        with pytest.raises(Interrupted):
            run_once(folder, make_loader, at=at, act=act, validating=validating, **options)
        torch.manual_seed(987 + at)  # whatever the new process begins with
        resumed = run_once(folder, make_loader, resume=True, **options)
        assert_same(resumed[0], whole[0])
        assert resumed[1] == whole[1], f"history after a stop at {at}"
        assert resumed[2] == whole[2], f"log after a stop at {at}"
        assert_same_nest(resumed[3]["optimizers"], whole[3]["optimizers"])
        assert resumed[3]["schedulers"] == whole[3]["schedulers"]
        assert resumed[3]["scaler"] == whole[3]["scaler"]
        assert_same_nest(resumed[3]["rng"], whole[3]["rng"])


def assert_same_nest(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_nest(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same_nest(left, right)
    else:
        assert one == other


# --- stopped by a signal ----------------------------------------------------------------------


def test_at_every_batch_of_an_epoch(tmp_path: Path):
    # The loss is asked for 5 batches of training and 3 of validation in each of 3 epochs.
    stops = [*range(CALLS + 3), 2 * CALLS - 1, 2 * CALLS, EPOCHS * CALLS - 2]
    assert_goes_on(tmp_path, loader, stops)


def test_with_the_last_batch_of_all_the_run_ends_as_planned(tmp_path: Path):
    whole = run_once(tmp_path / "whole", loader)
    late = run_once(tmp_path / "late", loader, at=EPOCHS * CALLS - 1, act=INTERRUPT)
    assert_same(late[0], whole[0])
    assert late[1:3] == whole[1:3]


@pytest.mark.parametrize("act", [INTERRUPT, TERMINATE], ids=["Ctrl-C", "SIGTERM"])
def test_in_validation(tmp_path: Path, act: Callable[[], None]):
    assert_goes_on(tmp_path, loader, [0, 1, 2, 3, 8], act=act, validating=True)


@pytest.mark.parametrize("plan", ["gather", "resident", "inline", "threads", "processes"])
def test_under_each_plan(tmp_path: Path, plan: str):
    def planned() -> hasten.Loader:
        data: Any = Fetched(points()) if plan == "threads" else points()
        workers: Any = 2 if plan == "processes" else "auto"
        return hasten.Loader(data, batch_size=8, shuffle=True, plan=plan, num_workers=workers)

    assert_goes_on(tmp_path, planned, [2, 9] if plan == "processes" else [0, 4, 6, 10, 17])


class Fetched(Dataset[Any]):
    """Samples with noise that their key alone decides."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def fetch(self, index: int, key: int) -> Any:
        noise = torch.randn(6, generator=torch.Generator().manual_seed(key % 2**63))
        x, y = self.data[index]
        return x + 0.1 * noise, y

    def __getitem__(self, index: int) -> Any:
        return self.fetch(index, 0)


class Noisy(Dataset[Any]):
    """Samples with noise from the global generator."""

    def __init__(self) -> None:
        self.data = points()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(6), y


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_torch_dataloader(tmp_path: Path, workers: int):
    def make() -> Any:
        return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)

    assert_goes_on(tmp_path, make, [1, 9] if workers else [0, 1, 4, 7, 9])


def test_with_a_torch_dataloader_that_has_a_generator(tmp_path: Path):
    def make() -> Any:
        generator = torch.Generator().manual_seed(77)
        return DataLoader(points(), batch_size=8, shuffle=True, generator=generator)

    assert_goes_on(tmp_path, make, [1, 4, 6, 7, 9, 18])


@pytest.mark.parametrize(
    ("data", "workers", "plan"),
    [
        (points, 0, "gather"),
        (points, 2, "gather"),
        (Noisy, 0, "auto"),
        (Noisy, 0, "processes"),
        (Noisy, 2, "processes"),
        (Noisy, 2, "inline"),
    ],
)
def test_with_a_dataloader_that_was_taken_over(
    tmp_path: Path, data: Callable[[], Any], workers: int, plan: str
):
    def original() -> Any:
        return DataLoader(data(), batch_size=8, shuffle=True, num_workers=workers)

    def taken() -> Any:
        return hasten.Loader.from_dataloader(original(), plan=plan)

    assert_goes_on(tmp_path, taken, [1, 9] if plan == "processes" else [0, 4, 7, 9])
    weights, history, *_ = run_once(tmp_path / "original", original)
    found, the_same, *_ = run_once(tmp_path / "taken", taken)
    assert_same(found, weights)
    assert the_same == history


def test_with_a_plain_list_and_an_unsized_iterable(tmp_path: Path):
    assert_goes_on(tmp_path / "list", lambda: batches([8] * BATCHES), [0, 6])

    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches([8] * BATCHES))

    assert_goes_on(tmp_path / "unsized", Unsized, [0, 6])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"accumulate": 2, "optimizer": torch.optim.AdamW, "clip_norm": 0.5},
        {"optimizer": torch.optim.Adagrad, "lr": 0.05},
        {
            "optimizer": torch.optim.AdamW,
            "scheduler": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n),
            "schedule_per": "step",
        },
        {"scheduler": lambda o: lr_scheduler.ExponentialLR(o, 0.5)},
        {"scheduler": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)},
        {"precision": "bfloat16"},
        {"precision": "float16", "optimizer": torch.optim.Adam},
    ],
    ids=[
        "accumulate",
        "accumulate, clip",
        "adagrad",
        "one cycle",
        "per epoch",
        "plateau",
        "bfloat16",
        "float16",
    ],
)
def test_with_all_that_has_a_state(tmp_path: Path, options: dict[str, Any]):
    assert_goes_on(tmp_path, loader, [0, 3, 4, 6, 7, 8, 12, 18], **options)


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 9]),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [6]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=["steps", "lambda", "restarts", "cyclic", "row"])
def test_with_each_kind_of_scheduler(tmp_path: Path, make: Callable[[Any], Any]):
    assert_goes_on(tmp_path, loader, [3, 9], scheduler=make, schedule_per="step")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loader_that_dies_of_the_same_signal_is_no_reason_to_lose_anything(
    tmp_path: Path, accumulate: int
):
    """As of SIGTERM to a whole group of processes, which ends a loader's workers at once."""

    def die() -> None:
        TERMINATE()
        raise RuntimeError("DataLoader worker is killed by signal")

    training = trainer(folder=tmp_path / "run", accumulate=accumulate)
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM after step (2|6); saved"):
        training.fit(Reading(batches([8] * 10), 6, die), epochs=1)
    kept = saved(tmp_path / "run")
    assert kept.training["sources"][0]["batches"] == 6
    assert kept.meta["step"] == (6 if accumulate == 1 else 2)
    again = trainer(folder=tmp_path / "run", accumulate=accumulate, resume=True)
    assert again.fit(batches([8] * 10), epochs=1).history[0].step == (10 if accumulate == 1 else 3)

    with pytest.raises(RuntimeError, match="of itself"):  # without a signal it is an error

        def fail() -> None:
            raise RuntimeError("of itself")

        trainer().fit(Reading(batches([8] * 10), 6, fail), epochs=1)


def conv() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 16, 3)
    )


def test_with_channels_last_and_a_fused_optimizer(tmp_path: Path):
    given = [(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])) for _ in range(5)]
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": 0.01, "channels_last": True}

    def once(name: str, loss: Any = None, **more: Any) -> dict[str, torch.Tensor]:
        training = trainer(conv(), folder=tmp_path / name, **options, **more)
        training.loss = loss or training.loss
        training.fit(given, epochs=3)
        return state(training.model)

    whole = once("whole")
    with pytest.raises(Interrupted):
        once("stopped", Hook(5, INTERRUPT))
    assert_same(once("stopped", resume=True), whole)


# --- what is said -----------------------------------------------------------------------------


def test_a_stop_says_what_was_saved_and_how_to_go_on(tmp_path: Path):
    training = trainer(loss=Hook(6, INTERRUPT), folder=tmp_path / "run")
    with pytest.raises(Interrupted) as stopped:
        training.fit(loader(), epochs=EPOCHS)
    message = str(stopped.value)
    assert "stopped by SIGINT after step 7; saved" in message
    assert "step-00000007" in message
    assert f"folder='{tmp_path / 'run'}', resume=True" in message
    assert stopped.value.exit_status == 130
    assert (tmp_path / "run" / "report.html").exists()

    stream, options = told(folder=tmp_path / "run", resume=True)
    result = trainer(**options).fit(loader(), epochs=EPOCHS)
    assert result.resumed_from == tmp_path / "run" / "checkpoints" / "step-00000007"
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("Using device")
    assert lines[1] == f"Resumed from {result.resumed_from} (epoch 2, step 7)"
    assert [line[:11] for line in lines[2:]] == ["Epoch [2/3]", "Epoch [3/3]", "Finishing: "]


def test_a_hint_of_the_callers_own_is_shown(tmp_path: Path):
    training = trainer(
        loss=Hook(0, TERMINATE), folder=tmp_path / "run", resume_hint="hasten train --resume x"
    )
    with pytest.raises(Interrupted, match="Resume with: hasten train --resume x") as stopped:
        training.fit(loader(), epochs=1)
    assert stopped.value.exit_status == 75


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 129)],
)
def test_a_cluster_s_notice_asks_for_the_job_again(
    tmp_path: Path, number: int, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with pytest.raises(Interrupted, match="scontrol requeue 4711") as stopped:
        trainer(loss=Hook(1, send(number)), folder=tmp_path / "run").fit(loader(), epochs=1)
    assert stopped.value.exit_status == status
    assert names(tmp_path / "run") == {"step-00000002"}
    with pytest.raises(Interrupted) as stopped:
        trainer(loss=Hook(1, send(number))).fit(loader(), epochs=1)
    assert stopped.value.exit_status == 128 + number, "there is nothing to go on from"


def test_a_second_ctrl_c_names_the_last_checkpoint(tmp_path: Path):
    def twice() -> None:
        INTERRUPT()
        INTERRUPT()

    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer(loss=Hook(7, twice), folder=tmp_path / "run").fit(loader(), epochs=3)
    (note,) = stopped.value.__notes__
    assert note.startswith(f"the last checkpoint is {tmp_path / 'run' / 'checkpoints'}/step-")
    assert "Resume with" in note


def test_without_a_folder_a_stop_says_that_nothing_is_saved():
    with pytest.raises(Interrupted, match="nothing was saved, for the run has no folder"):
        trainer(loss=Hook(2, INTERRUPT)).fit(loader(), epochs=1)


def test_a_finished_run_resumes_to_its_own_result(tmp_path: Path):
    val = loader(points(20, 5))
    training = trainer(folder=tmp_path / "run")
    first = training.fit(loader(), val, epochs=2)
    stream, options = told(folder=tmp_path / "run", resume=True)
    again = trainer(mlp(seed=9), **options)
    second = again.fit(loader(), val, epochs=2)
    assert losses(second) == losses(first)
    assert_same(state(again.model), state(training.model))
    assert second.evaluation is not None
    assert second.evaluation.loss == first.history[-1].val_loss
    assert "(all 2 epochs done, step 10; to go on, ask for more)" in stream.getvalue()


def test_more_epochs_than_planned_before(tmp_path: Path):
    trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    longer = trainer(folder=tmp_path / "run", resume=True)
    result = longer.fit(loader(), epochs=3)
    whole = trainer()
    expected = whole.fit(loader(), epochs=3)
    assert_same(state(longer.model), state(whole.model))
    assert losses(result) == losses(expected)


def test_resume_where_nothing_is_yet_begins(tmp_path: Path):
    fresh = trainer(folder=tmp_path / "run", resume=True)
    result = fresh.fit(loader(), epochs=1)
    assert result.resumed_from is None
    assert [line["kind"] for line in logged(tmp_path / "run")] == ["epoch"]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path):
    def broken() -> None:
        raise KeyError("not a HastenError")

    with pytest.raises(KeyError):
        trainer(loss=Hook(4, broken), folder=tmp_path / "run", log_every=1).fit(loader(), epochs=1)
    assert len(logged(tmp_path / "run")) == 4
    trainer(folder=tmp_path / "run", resume=True, log_every=1).fit(loader(), epochs=1)
    lines = logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5]


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path):
    trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(UsageError, match="holds a run already; go on with it"):
        trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


# --- broken or foreign checkpoints --------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path: Path):
    whole = run_once(tmp_path / "whole", loader)
    with pytest.raises(Interrupted):
        run_once(tmp_path / "run", loader, at=2 * CALLS + 2, act=INTERRUPT)
    newest = checkpoint.find(tmp_path / "run")
    assert newest.name == "step-00000013"
    weights = newest / "model.pt"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)

    stream, told_options = told()
    options = {name: told_options[name] for name in ("progress", "stream")}
    resumed = run_once(tmp_path / "run", loader, resume=True, **options)
    assert f"Passed over {newest}" in stream.getvalue()
    assert "step-00000010 (epoch 3, step 10)" in stream.getvalue()
    assert_same(resumed[0], whole[0])
    assert resumed[2] == whole[2]


def test_no_whole_checkpoint_at_all_is_an_error(tmp_path: Path):
    trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    for path in (tmp_path / "run" / "checkpoints").glob("*/training.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint to resume from"):
        trainer(folder=tmp_path / "run", resume=True).fit(loader(), epochs=2)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Linear(6, 3)}, "does not fit the model Linear"),
    ({"optimizer": torch.optim.AdamW}, "optimizers in .* are SGD, this run has AdamW"),
    (
        {"optimizer": lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1)},
        "does not fit SGD: loaded state dict has a different number of parameter groups",
    ),
    (
        {"scheduler": lambda o: lr_scheduler.ConstantLR(o)},
        "schedulers in .* are none, this run has ConstantLR",
    ),
    ({"loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, "holds 1 modules, this run has 2"),
]


@pytest.mark.parametrize(("options", "message"), OTHERS, ids=[message for _, message in OTHERS])
def test_other_parts_are_refused(tmp_path: Path, options: dict[str, Any], message: str):
    trainer(folder=tmp_path / "run").fit(loader(), epochs=1)
    other = trainer(folder=tmp_path / "run", resume=True, **options)
    with pytest.raises(CheckpointError, match=message):
        other.fit(loader(), epochs=2)
    trainer(folder=tmp_path / "run", resume=True).fit(loader(), epochs=2)  # nothing was lost


def test_other_data_in_the_middle_of_an_epoch_is_refused(tmp_path: Path):
    with pytest.raises(Interrupted):
        run_once(tmp_path / "run", loader, at=2, act=INTERRUPT)
    with pytest.raises(CheckpointError, match=r"epoch of 5 batches, and this loader gives 10"):
        run_once(tmp_path / "run", lambda: loader(points(80)), resume=True)
    with pytest.raises(CheckpointError, match=r"batches of 8, and this loader's are of 4"):
        run_once(tmp_path / "run", lambda: loader(batch_size=4), resume=True)
    with pytest.raises(UsageError, match="seed"):
        run_once(tmp_path / "run", lambda: loader(seed=5), resume=True)


def test_another_batch_size_in_the_middle_of_an_epoch_is_refused(tmp_path: Path):
    """Though it makes as many batches: the samples would be others."""
    with pytest.raises(Interrupted):
        run_once(tmp_path / "run", lambda: loader(points(20)), at=1, act=INTERRUPT)
    with pytest.raises(CheckpointError, match="batches of 8, and this loader's are of 9"):
        run_once(tmp_path / "run", lambda: loader(points(20), batch_size=9), resume=True)


def test_a_stream_that_has_become_shorter_is_said(tmp_path: Path):
    class Unsized:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[Any]:
            return iter(batches([8] * self.count))

    with pytest.raises(Interrupted):
        run_once(tmp_path / "run", lambda: Unsized(5), at=3, act=INTERRUPT)
    with pytest.raises(DataError, match=r"after 4 batches of an epoch.* gives only 2 now"):
        run_once(tmp_path / "run", lambda: Unsized(2), resume=True)


def test_another_precision_that_is_asked_for_is_taken(tmp_path: Path):
    trainer(folder=tmp_path / "run", precision="bfloat16").fit(loader(), epochs=1)
    stream, options = told(folder=tmp_path / "run", resume=True, precision="float32")
    result = trainer(**options).fit(loader(), epochs=2)
    assert result.precision.name == "float32"
    assert "Precision: float32, as asked for; it was bfloat16" in stream.getvalue()
    same = trainer(folder=tmp_path / "run", resume=True, precision="auto")
    assert same.fit(loader(), epochs=3).precision.name == "float32"


# --- what is kept -----------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()}


def test_the_best_and_the_newest_are_kept(tmp_path: Path):
    run = hasten.Run(**QUIET, folder=tmp_path / "run", keep=2)
    model = mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    figures = iter([0.2, 0.9, float("nan"), 0.5, 0.3])
    for _ in run.epochs(5):
        for data, labels in run.batches(loader()):
            run.backward(nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
        run.log(val_accuracy=next(figures))
    assert names(tmp_path / "run") == {"step-00000010", "step-00000020", "step-00000025"}
    best = checkpoint.best(tmp_path / "run" / "checkpoints")
    assert best is not None and best.name == "step-00000010"


def test_the_lowest_loss_is_best_without_accuracy(tmp_path: Path):
    training = trainer(folder=tmp_path / "run")
    result = training.fit(loader(), epochs=3)
    lowest = min(result.history, key=lambda record: record.loss)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name == checkpoint.name_of(lowest.step)


def test_the_best_is_marked_again_if_a_kill_came_between(tmp_path: Path):
    training = trainer(folder=tmp_path / "run")
    result = training.fit(loader(), epochs=1)
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    again = trainer(folder=tmp_path / "run", resume=True)
    assert again.fit(loader(), epochs=1).best_checkpoint == result.checkpoint


@pytest.mark.parametrize(
    ("every", "steps"),
    [("3 steps", {3, 5, 8, 10}), ("2 epochs", {5, 10}), ("never", {5, 10})],
)
def test_checkpoints_come_as_often_as_asked_for(
    tmp_path: Path, every: str, steps: set[int], monkeypatch: pytest.MonkeyPatch
):
    made: list[int] = []
    write = checkpoint.write

    def watched(folder: Path, prepared: checkpoint.Prepared) -> None:
        made.append(prepared.head["step"])
        write(folder, prepared)

    monkeypatch.setattr(checkpoint, "write", watched)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every=every)
    model = mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(2):
        for data, labels in run.batches(loader()):
            run.backward(nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
        run.log(val_loss=1.0)
    assert set(made) == steps
    assert len(made) == len(set(made)), "one is written twice"


def test_checkpoints_by_the_clock(tmp_path: Path):
    now = [0.0]
    made: list[int] = []

    def tick() -> float:
        now[0] += 0.01
        return now[0]

    training = trainer(folder=tmp_path / "run", checkpoint_every="10 min", clock=tick, keep=100)

    class Slow(Hook):
        def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            now[0] += 250.0
            assert training.run is not None
            _ = training.run.last_good  # waits for a checkpoint under way: one is due only after
            return super().__call__(outputs, labels)

    training.loss = Slow(-1, noop)
    training.fit(loader(), epochs=2)
    made = sorted(int(name[5:]) for name in names(tmp_path / "run"))
    assert made == [3, 5, 8, 10]


# --- killed -----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
from train_helpers import Hook, loader, mlp, points, trainer
folder, at = sys.argv[1], int(sys.argv[2])
training = trainer(mlp(dropout=0.5), folder=folder, resume=True, log_every=2,
                   checkpoint_every="3 steps", optimizer=torch.optim.AdamW)
if at >= 0:
    training.loss = Hook(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
training.fit(loader(), loader(points(20, 5)), epochs=3)
"""


@pytest.mark.slow
def test_kill_9_at_any_step_loses_nothing(tmp_path: Path):
    def process(name: str, at: int) -> int:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", KILLED, str(tmp_path / name), str(at)]
        done = warm.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert not done.stderr, done.stderr
        return done.returncode

    whole_run = trainer(
        mlp(dropout=0.5), folder=tmp_path / "whole", log_every=2, optimizer=torch.optim.AdamW
    )
    whole_run.fit(loader(), loader(points(20, 5)), epochs=3)
    # Each life of the run ends some steps further: in its first epoch, and in others' middles.
    for at in (4, 6):
        assert process("killed", at) == -signal.SIGKILL
    assert process("killed", -1) == 0

    whole, killed = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert_same(killed.model, whole.model)
    assert_same_nest(killed.training["optimizers"], whole.training["optimizers"])
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")


# --- disks ------------------------------------------------------------------------------------


def test_a_full_disk_is_said_and_loses_nothing_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = run_once(tmp_path / "whole", loader)
    write = checkpoint._write_torch
    calls = [0]

    def full(path: Path, value: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:  # two files a checkpoint: the second checkpoint finds no room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_torch", full)
        stream, options = told()
        with pytest.raises(CheckpointError, match="step-00000015: No space left"):
            run_once(tmp_path / "run", loader, **options)  # the last one: nothing comes after it
        assert "step-00000010: No space left on device (free some space)" in stream.getvalue()
        assert "Training goes on" in stream.getvalue()
    assert names(tmp_path / "run") == {"step-00000005"}
    resumed = run_once(tmp_path / "run", loader, resume=True)
    assert_same(resumed[0], whole[0])
    assert resumed[2] == whole[2]


def test_a_disk_that_has_room_again_ends_as_one_that_always_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = run_once(tmp_path / "whole", loader)
    write, calls = checkpoint._write_torch, [0]

    def full_for_a_while(path: Path, value: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # of the first checkpoint, which is the best so far
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, value)

    monkeypatch.setattr(checkpoint, "_write_torch", full_for_a_while)
    run = run_once(tmp_path / "run", loader)
    assert_same(run[0], whole[0])
    assert run[1:3] == whole[1:3]
    best = checkpoint.find(tmp_path / "run", "best")
    assert checkpoint.load(best, map_location="cpu").meta["best"][1] == int(best.name[5:])


def test_a_best_that_could_not_be_written_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = checkpoint._write_torch

    def full(path: Path, value: Any) -> Any:
        if "step-00000010" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, value)

    monkeypatch.setattr(checkpoint, "_write_torch", full)
    run = hasten.Run(**QUIET, folder=tmp_path / "run")
    model = mlp()
    run.prepare(model, optimizer := sgd(model.parameters()))
    accuracies = iter([0.5, 0.9, 0.7])
    for _ in run.epochs(3):
        for data, labels in run.batches(loader()):
            run.backward(nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
        run.log(val_accuracy=next(accuracies))
    assert run.best == (0.7, 15)
    assert checkpoint.find(tmp_path / "run", "best").name == "step-00000015"


def test_a_folder_removed_under_the_run_is_made_again(tmp_path: Path):
    import shutil

    whole = run_once(tmp_path / "whole", loader)
    folder = tmp_path / "run"
    stream, options = told(log_every=1)

    def remove() -> None:
        assert training.run is not None
        assert training.run.last_good is not None  # nothing is being written into it
        shutil.rmtree(folder)

    model = mlp(dropout=0.5)
    training = trainer(model, loss=Hook(CALLS + 2, remove), folder=folder, **options)
    val = DataLoader(points(20, 5), batch_size=8, shuffle=True)
    result = training.fit(loader(), val, epochs=EPOCHS)
    assert_same(state(model), whole[0])
    assert f"{folder} was removed under the run" in stream.getvalue()
    assert stream.getvalue().count("metrics.jsonl: No such file") == 1
    assert_same(saved(folder).model, whole[0])
    assert (folder / "config.json").is_file()
    steps = [line["step"] for line in logged(folder) if line["kind"] == "step"]
    assert steps == list(range(8, 16))
    assert result.report is not None
    assert result.report.is_file()


def test_a_folder_removed_while_the_last_checkpoint_is_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There is no next one to be tried."""
    import shutil

    folder = tmp_path / "run"
    removed: list[Path] = []
    write = checkpoint._write_bytes

    def removing(path: Path, content: bytes) -> None:
        if not removed:
            removed.append(path)
            shutil.rmtree(folder / "checkpoints")
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write_bytes", removing)
    training = trainer(folder=folder)
    training.fit(loader(), epochs=1)
    assert len(removed) == 1
    assert_same(saved(folder).model, state(training.model))


def test_checkpoints_removed_under_the_run_are_made_again(tmp_path: Path):
    import shutil

    folder = tmp_path / "run"

    def remove() -> None:
        assert training.run is not None
        assert training.run.last_good is not None
        shutil.rmtree(folder / "checkpoints")

    training = trainer(loss=Hook(7, remove), folder=folder)
    training.fit(loader(), epochs=2)
    assert names(folder) == {"step-00000010"}


def test_a_schedule_is_not_gone_beyond(tmp_path: Path) -> None:
    def trainer(resume: bool) -> hasten.Trainer:
        return hasten.Trainer(
            nn.Linear(4, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD,
            lr=0.1,
            scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=steps + 1
            ),
            schedule_per="step",
            device="cpu",
            precision="float32",
            folder=tmp_path / "run",
            resume=resume,
            progress="off",
        )

    batches = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(5)]
    trainer(False).fit(batches, epochs=1)
    with pytest.raises(hasten.CheckpointError, match="OneCycleLR over 6 steps"):
        trainer(True).fit(batches, epochs=2)


def test_a_data_set_in_place_of_a_loader_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8).long())
    trainer = hasten.Trainer(nn.Linear(4, 2), loss=nn.CrossEntropyLoss(), progress="off")
    with pytest.raises(hasten.UsageError, match=r"hasten\.Loader\(dataset"):
        trainer.fit(data, epochs=1)


def test_a_folder_that_cannot_be_made_again_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As when whoever removes it is still at it."""
    import shutil

    from hasten.train import folder as folders

    folder = tmp_path / "run"
    monkeypatch.setattr(folders, "_PAUSE_S", 0.0)

    def remove() -> None:
        assert training.run is not None
        assert training.run.last_good is not None
        shutil.rmtree(folder)
        folder.write_text("in its place")

    stream, options = told()
    training = trainer(loss=Hook(7, remove), folder=folder, **options)
    training.loss = Chain(training.loss, Hook(13, folder.unlink))
    training.fit(loader(), epochs=4)
    assert "Training goes on" in stream.getvalue()
    assert max(names(folder)) == "step-00000020"


class Chain:
    """Several hooks of a loss."""

    def __init__(self, *hooks: Hook) -> None:
        self.hooks = hooks

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return [hook(outputs, labels) for hook in self.hooks][-1]
