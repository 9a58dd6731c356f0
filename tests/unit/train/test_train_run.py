"""Run: loops of one's own, of any kind, with what surrounds them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset
from train_helpers import (
    INTERRUPT,
    QUIET,
    assert_same,
    batches,
    loader,
    mlp,
    plain_loop,
    points,
    sgd,
    state,
    told,
    trainer,
)

import hasten
from hasten.errors import DataError, Interrupted, NonFiniteLoss, UsageError
from hasten.observe import verdict
from hasten.train import checkpoint, result

cross_entropy = nn.functional.cross_entropy


def loop(run: hasten.Run, model: nn.Module, given: Any, epochs: int = 2, **options: Any) -> None:
    """The loop of the docs; ``stop_at`` leaves an epoch's loop early, ``act`` acts at a batch."""
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(epochs):
        model.train()
        for place, (data, labels) in enumerate(run.batches(given)):
            if place == options.get("act_at"):
                options["act"]()
            run.backward(cross_entropy(model(data), labels))
            run.step(optimizer)
            if place == options.get("stop_at"):
                break


def test_the_loop_of_the_docs_is_the_plain_loop():
    expected = mlp()
    means = plain_loop(expected, loader(), sgd(expected.parameters()))
    run, model = hasten.Run(**QUIET), mlp()
    loop(run, model, loader())
    assert_same(state(model), state(expected))
    assert [record.loss for record in run.history] == pytest.approx(means, rel=1e-12)
    assert (run.epoch, run.global_step) == (2, 10)


def test_prepare_gives_back_the_same_objects_in_order():
    run, model, data = hasten.Run(**QUIET), mlp(), torch.ones(2)
    optimizer = sgd(model.parameters())
    scheduler = ExponentialLR(optimizer, 0.9)
    given = DataLoader(points(), batch_size=8)
    back = run.prepare(optimizer, model, given, scheduler, data, {"a": 1})
    assert all(
        one is other
        for one, other in zip(back[:5], (optimizer, model, given, scheduler, data), strict=True)
    )
    assert back[5] == {"a": 1}
    assert run.prepare(model) is model


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(UsageError, match="SGD holds no parameter of the prepared modules"):
        hasten.Run(**QUIET).prepare(mlp(), sgd(mlp().parameters()))


def test_a_step_outside_of_a_loop_is_refused():
    run, model = hasten.Run(**QUIET), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for data, labels in batches([8]):
        run.backward(cross_entropy(model(data), labels))
        with pytest.raises(UsageError, match=r"run\.step belongs into a loop over run\.batches"):
            run.step(optimizer)
    for _ in run.epochs(1):
        for data, labels in run.batches(batches([8])):
            run.backward(cross_entropy(model(data), labels))
            run.step(optimizer)
    with pytest.raises(UsageError, match=r"run\.step belongs"):
        run.step(optimizer)


# --- leaving early ----------------------------------------------------------------------------


def test_a_loop_left_early_counts_what_it_did():
    short, early = mlp(), mlp()
    loop(hasten.Run(**QUIET), short, batches([8, 8, 8]), 2)
    run = hasten.Run(**QUIET)
    loop(run, early, batches([8, 8, 8, 8, 8]), 2, stop_at=2)
    assert_same(state(early), state(short))
    assert run.global_step == 6
    assert [record.step for record in run.history] == [3, 6]
    assert run.spent.samples == 24


def test_a_window_left_half_full_is_stepped_before_the_epoch_ends(tmp_path: Path):
    small = batches([4] * 6)
    run = hasten.Run(**QUIET, accumulate=4, folder=tmp_path / "run")
    model = nn.Linear(6, 3)
    expected = nn.Linear(6, 3)
    expected.load_state_dict(model.state_dict())
    loop(run, model, small, 1, stop_at=1)
    data, labels = torch.cat([small[0][0], small[1][0]]), torch.cat([small[0][1], small[1][1]])
    loop(hasten.Run(**QUIET), expected, [(data, labels)], 1)
    torch.testing.assert_close(model.weight, expected.weight)
    assert run.global_step == 1
    kept = checkpoint.load(checkpoint.find(tmp_path / "run"), map_location="cpu")
    assert torch.equal(kept.model["weight"], model.weight)


def test_an_error_in_the_loop_is_the_users_own_and_loses_no_signal_handler():
    before = signal.getsignal(signal.SIGINT)

    def fail() -> None:
        raise KeyError("mine")

    run = hasten.Run(**QUIET)
    with pytest.raises(KeyError, match="mine"):
        loop(run, mlp(), loader(), act_at=1, act=fail)
    run.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_more_epochs_with_the_same_run_go_on(tmp_path: Path):
    whole = mlp()
    loop(hasten.Run(**QUIET), whole, loader(), 3)

    run, model = hasten.Run(**QUIET, folder=tmp_path / "run"), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    given = loader()
    for total in (1, 3):
        for _ in run.epochs(total):
            for data, labels in run.batches(given):
                run.backward(cross_entropy(model(data), labels))
                run.step(optimizer)
    assert_same(state(model), state(whole))
    assert [record.epoch for record in run.history] == [1, 2, 3]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]


# --- several models ---------------------------------------------------------------------------


def gan(folder: Path | None, *, epochs: int = 2, stop_at: int = -1, **options: Any) -> Any:
    run = hasten.Run(**QUIET, folder=folder, **options)  # which seeds the models below
    generator, critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    steps_g, steps_c = torch.optim.Adam(generator.parameters()), sgd(critic.parameters())
    decay = ExponentialLR(steps_c, 0.9)
    generator, critic, steps_g, steps_c, decay = run.prepare(
        generator, critic, steps_g, steps_c, decay
    )
    bce, seen = nn.functional.binary_cross_entropy_with_logits, 0
    given = loader()
    for _ in run.epochs(epochs):
        for data, _labels in run.batches(given):
            if seen == stop_at:
                INTERRUPT()
            seen += 1
            ones, zeros = torch.ones(len(data), 1), torch.zeros(len(data), 1)
            fake = generator(torch.randn(len(data), 3))
            run.backward(bce(critic(data), ones) + bce(critic(fake.detach()), zeros))
            run.step(steps_c, decay)
            run.backward(bce(critic(fake), ones))
            run.step(steps_g)
    return run, generator, critic


def test_two_models_step_once_a_batch_and_resume(tmp_path: Path):
    run, generator, critic = gan(tmp_path / "whole")
    assert run.global_step == 10 and len(run.history) == 2
    for at in (0, 3, 4, 7):
        folder = tmp_path / f"stopped-{at}"
        with pytest.raises(Interrupted):
            gan(folder, stop_at=at)
        again, generator_again, critic_again = gan(folder, resume=True)
        assert_same(state(generator_again), state(generator))
        assert_same(state(critic_again), state(critic))
        assert [r.loss for r in again.history] == [r.loss for r in run.history]


def test_a_generators_loss_leaves_nothing_in_the_critics_next_step():
    _, generator, critic = gan(None)
    torch.manual_seed(0)
    one, two = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    steps_g, steps_c = torch.optim.Adam(one.parameters()), sgd(two.parameters())
    decay = ExponentialLR(steps_c, 0.9)
    bce = nn.functional.binary_cross_entropy_with_logits
    given = loader()
    for _ in range(2):
        for data, _labels in given:
            ones, zeros = torch.ones(len(data), 1), torch.zeros(len(data), 1)
            fake = one(torch.randn(len(data), 3))
            steps_c.zero_grad()
            (bce(two(data), ones) + bce(two(fake.detach()), zeros)).backward()
            steps_c.step()
            decay.step()
            steps_g.zero_grad()
            bce(two(fake), ones).backward()
            steps_g.step()
    assert_same(state(critic), state(two))
    assert_same(state(generator), state(one))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_two_models_at_half_precision(precision: str):
    options = QUIET | {"precision": precision}
    torch.manual_seed(4)
    run = hasten.Run(**options)
    one, two = mlp(), mlp()
    first, second = sgd(one.parameters()), sgd(two.parameters())
    run.prepare(one, two, first, second)
    for _ in run.epochs(4):
        for data, labels in run.batches(loader()):
            run.backward(cross_entropy(one(data), labels))
            run.step(first)
            run.backward(cross_entropy(two(data), labels))
            run.step(second)
    assert_same(state(one), state(two))
    assert run.history[-1].loss < run.history[0].loss


# --- validation in the loop -------------------------------------------------------------------


def test_reading_counts_nothing_and_draws_nothing():
    models = []
    for reading in (False, True):
        torch.manual_seed(4)
        run, model = hasten.Run(**QUIET), mlp(dropout=0.5)
        optimizer = sgd(model.parameters())
        run.prepare(model, optimizer)
        val = DataLoader(points(20, 5), batch_size=7, shuffle=True)
        for _ in run.epochs(2):
            model.train()
            for data, labels in run.batches(DataLoader(points(), batch_size=8, shuffle=True)):
                run.backward(cross_entropy(model(data), labels))
                run.step(optimizer)
            model.eval()
            if reading:
                with torch.no_grad():
                    right = sum(
                        int((model(data).argmax(1) == labels).sum())
                        for data, labels in run.batches(val)
                    )
                with torch.inference_mode():
                    assert sum(len(labels) for _, labels in run.batches(val)) == 20
                run.log(val_accuracy=right / 20, custom=torch.tensor(0.25))
        assert run.global_step == 10
        if reading:
            record = run.history[-1]
            assert record.val_accuracy == right / 20 and record.metrics == {"custom": 0.25}
        models.append(state(model))
    assert_same(*models)


def test_training_can_be_said_outright():
    run = hasten.Run(**QUIET)
    for _ in run.epochs(1):
        assert len(list(run.batches(batches([4, 4]), training=False))) == 2
        assert run.loops.sources == []
        with torch.no_grad():
            list(run.batches(batches([4, 4]), training=True))
        assert run.loops.sources[0].batches_done == 2


def test_a_loader_without_batches_is_an_error_in_training_only():
    run = hasten.Run(**QUIET)
    assert list(run.batches([], training=False)) == []
    with pytest.raises(DataError, match="the list gives no batch in epoch 1"):
        list(run.batches([]))


# --- saving -----------------------------------------------------------------------------------


def saving_loop(folder: Path, save_at: int, *, resume: bool, accumulate: int = 1) -> nn.Module:
    run = hasten.Run(
        **QUIET, folder=folder, resume=resume, accumulate=accumulate, checkpoint_every="never"
    )
    model = mlp(dropout=0.5)
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    given = loader()
    for _ in run.epochs(1):
        for data, labels in run.batches(given):
            run.backward(cross_entropy(model(data), labels))
            stepped = run.step(optimizer)
            if stepped and run.global_step + 1 == save_at and not resume:
                run.save()
                return model  # as if killed
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_saving_in_the_body_counts_the_step(tmp_path: Path, accumulate: int):
    whole = saving_loop(tmp_path / "whole", -1, resume=False, accumulate=accumulate)
    saving_loop(tmp_path / "run", 2, resume=False, accumulate=accumulate)
    kept = checkpoint.find(tmp_path / "run")
    assert kept.name == "step-00000002"
    resumed = saving_loop(tmp_path / "run", -1, resume=True, accumulate=accumulate)
    assert_same(state(resumed), state(whole))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_saving_in_the_middle_of_a_step_is_refused(tmp_path: Path, accumulate: int):
    run = hasten.Run(**QUIET, folder=tmp_path / "run", accumulate=accumulate)
    model = mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(1):
        for data, labels in run.batches(loader()):
            run.backward(cross_entropy(model(data), labels))
            if accumulate == 2:
                run.step(optimizer)
            with pytest.raises(UsageError, match="in the middle of a step"):
                run.save()
            break
    assert run.global_step == accumulate - 1


def test_nothing_to_save_is_said(tmp_path: Path):
    run = hasten.Run(**QUIET, folder=tmp_path / "run")
    with pytest.raises(UsageError, match="nothing to save: give the model to"):
        for _ in run.epochs(1):
            pass
    assert hasten.Run(**QUIET).save() is None


# --- signals and threads ----------------------------------------------------------------------


def test_a_stop_in_a_loop_of_ones_own_gives_the_terminal_and_the_signals_back(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stream, options = told(folder=tmp_path / "run")
    run = hasten.Run(**options | {"progress": "bar"})
    with pytest.raises(Interrupted) as stopped:
        loop(run, mlp(), loader(), act_at=2, act=INTERRUPT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    text = stream.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0, "the cursor is left hidden"
    assert "step-00000003" in str(stopped.value)


def test_it_runs_in_a_thread_without_touching_signals():
    before = signal.getsignal(signal.SIGINT)
    run, model = hasten.Run(**QUIET), mlp()
    seen: list[Any] = []

    def work() -> None:
        loop(
            run, model, loader(), act_at=0, act=lambda: seen.append(signal.getsignal(signal.SIGINT))
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert run.global_step == 10
    assert seen == [before, before]


def test_a_signal_in_the_last_epoch_after_its_batches_lets_the_run_end():
    run, model = hasten.Run(**QUIET), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(1):
        for data, labels in run.batches(loader()):
            run.backward(cross_entropy(model(data), labels))
            run.step(optimizer)
        INTERRUPT()
    assert run.epoch == 1


# --- what it tells ----------------------------------------------------------------------------


class Kept:
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.closed = 0

    def write(self, record: Any, /) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def test_sinks_get_every_record_and_are_closed():
    sink = Kept()
    run = hasten.Run(**QUIET, sinks=[sink], log_every=2)
    loop(run, mlp(), loader(), 1)
    assert [(record.kind, record.step) for record in sink.records] == [
        ("step", 2),
        ("step", 4),
        ("epoch", 5),
    ]
    assert sink.closed == 1


def test_log_points_have_the_mean_since_the_one_before():
    sink = Kept()
    run, model = hasten.Run(**QUIET, sinks=[sink], log_every=2), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    means = []
    for _ in run.epochs(1):
        for data, labels in run.batches(batches([8, 4, 8, 4])):
            loss = cross_entropy(model(data), labels)
            means.append((loss.item() * len(data), len(data)))
            run.backward(loss)
            run.step(optimizer)
    expected = [(means[i][0] + means[i + 1][0]) / 12 for i in (0, 2)]
    assert [r.loss for r in sink.records if r.kind == "step"] == pytest.approx(expected)
    assert run.history[0].loss == pytest.approx(sum(total for total, _ in means) / 24)


def test_time_is_that_of_the_clock():
    now = [0.0]

    def given() -> Iterator[Any]:
        for batch in batches([10] * 4):
            now[0] += 1.0
            yield batch

    class Given:
        def __iter__(self) -> Iterator[Any]:
            return given()

    run, model = hasten.Run(**QUIET, clock=lambda: now[0]), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(1):
        for data, labels in run.batches(Given()):
            now[0] += 2.0
            run.backward(cross_entropy(model(data), labels))
            run.step(optimizer)
        now[0] += 100.0  # validation is no part of the epoch's time
    record = run.history[0]
    assert record.seconds == pytest.approx(12.0)
    assert record.images_per_s == pytest.approx(40 / 12)
    assert record.phases["wait"] == pytest.approx(4.0)
    assert record.phases["forward"] == pytest.approx(8.0)


def test_seeds_make_python_numpy_and_torch_repeat():
    import random

    import numpy as np

    draws = []
    for _ in range(2):
        hasten.Run(**QUIET, seed=5)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    hasten.Run(**QUIET, seed=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bad_loss_in_a_loop_of_ones_own_closes_the_run(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    run, model = hasten.Run(**QUIET, folder=tmp_path / "run"), mlp()
    bad = batches([8, 8, 8])
    bad[1][0][3, 2] = float("nan")
    with pytest.raises(NonFiniteLoss) as error:
        loop(run, model, bad)
    assert error.value.step == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_of_one_s_own_is_told_what_bounds_it_and_its_saturation_at_most() -> None:
    now = [0.0]

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for batch in batches([8] * 5):
                now[0] += 3.0  # waiting
                yield batch

    def compute(given: Any, epochs: int) -> tuple[hasten.Run, list[str]]:
        stream, options = told(clock=lambda: now[0])
        run = hasten.Run(**options)
        model = mlp()
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        for _ in run.epochs(epochs):
            for data, labels in run.batches(given):
                now[0] += 1.0
                run.backward(cross_entropy(model(data), labels))
                run.step(optimizer)
        return run, stream.getvalue().splitlines()

    run, said = compute(Slow(), epochs=2)
    assert run.verdict is not None and run.verdict.bound_by == "waiting for data"
    assert "Verdict: bound by waiting for data, 75% of the time." in said
    assert "  saturation at most 25%: 75% of a step was waiting, copying" in said
    run, said = compute(batches([8, 8]), epochs=1)  # too few steps
    assert run.verdict is None and not [line for line in said if "Verdict" in line]


@pytest.mark.parametrize(
    ("cost_s", "advised"),
    [
        (0.0001, "hold the data as whole tensors"),
        (0.1, "let worker processes last from epoch to epoch"),
        (3.0, "Loader.from_dataloader(loader) in the DataLoader's place"),
    ],
)
def test_making_batches_ahead_is_advised_where_it_would_be_done(
    cost_s: float, advised: str
) -> None:
    now = [0.0]

    class Costly(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            now[0] += cost_s
            return torch.zeros(4), 0

    _, options = told(clock=lambda: now[0])
    run = hasten.Run(**options)
    model, optimizer = run.prepare(model := nn.Linear(4, 2), sgd(model.parameters()))
    for _ in run.epochs(1):
        for data, labels in run.batches(DataLoader(Costly(), 1)):
            now[0] += cost_s
            run.backward(cross_entropy(model(data), labels))
            run.step(optimizer)
    assert run.verdict is not None and run.verdict.bound_by == "waiting for data"
    assert advised in run.verdict.advice


@pytest.mark.parametrize("hint", [None, "python train.py --resume", "hasten train --resume x"])
def test_only_the_command_is_advised_its_options(hint: str | None) -> None:
    now = [0.0]
    _, options = told(clock=lambda: now[0], resume_hint=hint)
    run = hasten.Run(**options)
    model, optimizer = run.prepare(model := mlp(), sgd(model.parameters()))
    for _ in run.epochs(1):
        for data, labels in run.batches(batches([8] * 5)):
            loss = cross_entropy(model(data), labels)
            run.backward(loss)
            now[0] += 1.0
            run.step(optimizer)
    assert run.verdict is not None
    assert ("--" in run.verdict.advice) is (hint == "hasten train --resume x")


def test_a_trainer_s_run_leaves_the_verdict_to_its_measured_saturation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (result, verdict):  # other programs may have had the cores meanwhile
        monkeypatch.setattr(module, "why_unlikely", lambda *_: "")
    stream, options = told()
    found = trainer(**options).fit(loader(batch_size=4), epochs=1)
    assert found.verdict is not None and found.saturation is not None
    assert f"saturation {found.saturation:.0%}" in found.verdict.evidence
    assert "Verdict" not in stream.getvalue()


class Broken(Dataset[Any]):
    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index in self.broken:
            raise ValueError("no header")
        return torch.full((4,), float(index)), 0


@pytest.mark.parametrize("leave", [False, True])
def test_samples_that_were_left_out_are_told_of(leave: bool) -> None:
    stream, options = told()
    run = hasten.Run(**options)
    dataset, held_out = Broken({0, 2}), Broken({3})
    given = hasten.Loader(dataset, 4, on_error="skip", plan="inline", shuffle=True)
    val = hasten.Loader(held_out, 4, on_error="skip", plan="inline")
    whole = hasten.Loader(Broken(set()), 4, on_error="skip", plan="inline")
    model, optimizer = run.prepare(model := nn.Linear(4, 2), sgd(model.parameters()))
    for epoch in run.epochs(4):
        if epoch == 2:
            dataset.broken.add(5)
        for number, (inputs, labels) in enumerate(run.batches(given)):
            run.backward(cross_entropy(model(inputs), labels))
            run.step(optimizer)
            if leave and number == 3:
                break
        for read in (val, whole):
            for _ in run.batches(read, training=False):
                pass
    said = [line for line in stream.getvalue().splitlines() if "left out" in line]
    assert len(said) == 3, "once, and again where it changes"
    assert said[0].startswith("2 samples were left out, for one: sample 0 of ")
    assert "no header" in said[0]
    assert said[1].startswith("a sample was left out, for one: sample 3 of ")
    assert said[2].startswith("3 samples were left out")
