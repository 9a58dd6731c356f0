"""Comparing: axes and their values, the order of runs, going on, failures, rows and findings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.devices import runtime
from hasten.errors import (
    DeviceUnavailable,
    HastenError,
    Interrupted,
    OutOfDeviceMemory,
    UsageError,
)
from hasten.vision import comparing, kept_rows
from hasten.vision.compared import Comparison, Epoch, Measured, as_fast, learns_less, rows_of
from hasten.vision.comparing import Runner, compare
from hasten.vision.findings import findings
from hasten.vision.grid import AXES, PRESETS, Grid, LeftOut, parse
from hasten.vision.settings import TrainSettings


def measured(
    speeds: tuple[float, ...] = (100.0, 200.0),
    *,
    accuracy: float | None = 0.9,
    run_seconds: float = 5.0,
    **others: Any,
) -> Measured:
    """A run whose epochs had these images a second, of 1,000 images."""
    figures: dict[str, Any] = {
        "precision": "float32",
        "channels_last": False,
        "batch_size": 100,
        "feed": "gather",
        "train_images": 1000,
        "val_images": 10_000,
    }
    return Measured(
        epochs=tuple(
            Epoch(
                epoch=number,
                loss=1.0 / number,
                val_loss=2.0 / number,
                accuracy=accuracy,
                seconds=1000 / speed,
                images_per_s=speed,
            )
            for number, speed in enumerate(speeds, 1)
        ),
        run_seconds=run_seconds,
        **{**figures, **others},
    )


class Fake:
    """Stands for training: notes what it is asked for, and does what it is told."""

    def __init__(self, act: Callable[[TrainSettings, int], Measured] | None = None) -> None:
        self.asked: list[TrainSettings] = []
        self._act = act or (lambda settings, number: measured())

    def __call__(self, settings: TrainSettings) -> Measured:
        self.asked.append(settings)
        return self._act(settings, len(self.asked))

    @property
    def batches(self) -> list[int | str]:
        return [settings.batch_size for settings in self.asked]


def quiet(text: str) -> None:
    pass


def on_cpu(repeat: int = 1, **options: str) -> Grid:
    return parse({"device": "cpu", **options}, repeat=repeat)


def go(grid: Grid, folder: Path, act: Any = None, **options: Any) -> tuple[Comparison, Fake]:
    fake = Fake(act)
    return compare(grid, folder, run_one=fake, **{"say": quiet, **options}), fake


# --- the grid -------------------------------------------------------------------------------------


def test_every_setting_of_train_is_an_axis() -> None:
    assert sorted(AXES) == sorted(field.name for field in dataclasses.fields(TrainSettings))
    assert all(set(preset) <= set(AXES) for preset in PRESETS.values())


VALUES = {
    "data": ("digits,fashion-mnist", ("digits", "fashion-mnist")),
    "data_dir": ("none,/no/such", (None, "/no/such")),
    "image_size": ("none,16", (None, 16)),
    "val_fraction": ("none,0.3", (None, 0.3)),
    "augment": ("auto,light,none", ("auto", "light", "none")),
    "cache": ("none,disk", ("none", "disk")),
    "cache_bytes": ("none,1000,1.5GB", (None, 1000, 1_500_000_000)),
    "normalize": ("on,off", (True, False)),
    "model": ("small,lesson", ("small", "lesson")),
    "epochs": ("1,2", (1, 2)),
    "batch_size": ("auto,64", ("auto", 64)),
    "lr": ("default,0.01,1e-3", (None, 0.01, 1e-3)),
    "optimizer": ("adamw,sgd", ("adamw", "sgd")),
    "weight_decay": ("0,0.1", (0.0, 0.1)),
    "schedule": ("onecycle, constant", ("onecycle", "constant")),
    "label_smoothing": ("0,0.1", (0.0, 0.1)),
    "accumulate": ("1,4", (1, 4)),
    "clip_norm": ("none,1", (None, 1.0)),
    "precision": ("float32,bfloat16", ("float32", "bfloat16")),
    "channels_last": ("on,off", ("on", "off")),
    "compile": ("no,yes", (False, True)),
    "device": ("cpu,auto", ("cpu", "auto")),
    "num_workers": ("0,auto", (0, "auto")),
    "strategy": ("auto,ddp", ("auto", "ddp")),
    "sync_batchnorm": ("on,off", (True, False)),
    "plan": ("gather,inline", ("gather", "inline")),
    "seed": ("0,1", (0, 1)),
    "checkpoint_every": ("never,500 steps", ("never", "500 steps")),
    "keep": ("1,2", (1, 2)),
    "patience": ("none,3", (None, 3)),
    "log_every": ("10,100", (10, 100)),
    "hang_after_s": ("0,600", (0.0, 600.0)),
    "hang_exits": ("on,off", (True, False)),
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": "0,x"}, "--num-workers x: a number from 0 up, or auto"),
        ({"num_workers": "0,-1"}, "--num-workers -1: a number from 0 up, or auto"),
        ({"channels_last": "on,maybe"}, "--channels-last maybe: auto, on or off"),
        ({"patience": "1,0"}, "--patience 0: epochs without a better one, at least 1, or None"),
        ({"keep": "0"}, "--keep 0: it is a whole number of at least 1"),
        ({"lr": "0"}, "--lr 0: a number above 0"),
    ],
)
def test_a_refused_value_is_named_once(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(options)
    assert str(refused.value) == message


@pytest.mark.parametrize("name", AXES)
def test_values_of_an_axis_are_read(name: str) -> None:
    text, expected = VALUES[name]
    found = parse({name: text}).axes[name]
    assert found == expected
    assert list(map(type, found)) == list(map(type, expected))


BAD = {
    "data_dir": "",
    "image_size": "big",
    "val_fraction": "nan",
    "augment": "heavy",
    "cache": "tape",
    "cache_bytes": "much",
    "normalize": "maybe",
    "epochs": "0",
    "batch_size": "0",
    "lr": "-1",
    "optimizer": "lion",
    "weight_decay": "inf",
    "schedule": "step",
    "label_smoothing": "1",
    "accumulate": "1.5",
    "clip_norm": "0",
    "precision": "float64",
    "channels_last": "maybe",
    "compile": "2",
    "device": "banana",
    "num_workers": "-1",
    "plan": "magic",
    "seed": "x",
    "checkpoint_every": "often",
    "keep": "0",
    "patience": "0",
    "log_every": "0",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_with_its_axis_and_itself(name: str) -> None:
    good = VALUES[name][0].split(",")[0]
    with pytest.raises(UsageError) as caught:
        parse({name: f"{good},{BAD[name]}"})
    assert "--" + name.replace("_", "-") in str(caught.value)
    assert BAD[name] in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": "1,1"}, "twice"),
        ({"batch_size": "1,"}, "comma"),
        ({"speed": "1"}, "speed"),
    ],
)
def test_a_list_that_is_no_grid_is_refused(options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse(options)


def test_repeat_and_preset_are_checked() -> None:
    with pytest.raises(UsageError, match="repeat"):
        parse({}, repeat=0)
    with pytest.raises(UsageError, match="device, workers"):
        parse({}, preset="everything")


def test_a_folder_with_a_comma_in_its_name_is_one_value(tmp_path: Path) -> None:
    folder = tmp_path / "cats, dogs"
    folder.mkdir()
    assert parse({"data": str(folder)}).axes["data"] == (str(folder),)


def test_trials_are_every_combination_numbered_in_order() -> None:
    trials, left_out = on_cpu(batch_size="10,20", lr="0.1,0.2", normalize="on,off").trials()
    assert [t.number for t in trials] == list(range(1, 9))
    assert len({t.settings for t in trials}) == 8
    assert left_out == []
    assert trials[0].label == "cpu, batch 10, workers auto, normalize on, lr 0.1"


def test_the_preset_for_workers_and_an_option_over_it() -> None:
    grid = parse({}, preset="workers")
    assert grid.axes["num_workers"] == (0, 1, 2, 4, 8, 16)
    assert grid.axes["batch_size"] == (100, 1000, 10000)
    assert parse({"num_workers": "0"}, preset="workers").axes["num_workers"] == (0,)


def test_the_preset_for_devices_has_the_cpu_and_every_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "devices", lambda: [torch.device("xpu", 0)])
    grid = parse({}, preset="device")
    assert grid.axes["device"] == ("cpu", "xpu:0")
    assert grid.axes["lr"] == (0.01,)
    assert grid.axes["batch_size"] == (1000, 10000, 20000)
    assert grid.axes["num_workers"] == (0, 1)


def test_an_absent_device_is_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    result, fake = go(parse({"device": "cpu,cuda:77"}, repeat=1), tmp_path / "c", say=said.append)
    assert [settings.device for settings in fake.asked] == ["cpu"]
    assert result.left_out[0].device == "cuda:77"
    assert any("Left out cuda:77" in line for line in said)


def test_no_device_that_is_here_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:77") as caught:
        go(parse({"device": "cuda:77"}), tmp_path / "c")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "c").exists()


def test_two_names_of_one_device_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_DEVICE", "cpu")
    trials, _ = parse({"device": "auto,cpu"}).trials()
    assert [t.settings.device for t in trials] == ["cpu"]


# --- running --------------------------------------------------------------------------------------


def test_runs_are_interleaved_over_the_repeats(tmp_path: Path) -> None:
    said: list[str] = []
    announced: list[str] = []
    _, fake = go(
        on_cpu(batch_size="10,20,30", repeat=2),
        tmp_path / "c",
        say=said.append,
        announce=announced.append,
    )
    assert fake.batches == [10, 20, 30, 10, 20, 30]
    assert said[0] == f"Comparison: {tmp_path / 'c'}, 3 settings, 2 runs each"
    assert said[2] == "[2/6] cpu, batch 20, workers auto: 200 images/s, 90.0 %"
    assert announced[1] == "[2/6] cpu, batch 20, workers auto ..."


def test_a_stopped_comparison_goes_on_where_it_was(tmp_path: Path) -> None:
    grid, folder = on_cpu(batch_size="10,20,30", repeat=2), tmp_path / "c"

    def stop_at_fifth(settings: TrainSettings, number: int) -> Measured:
        if number == 5:
            raise Interrupted("stopped by SIGTERM", 15)
        return measured()

    with pytest.raises(Interrupted) as caught:
        go(grid, folder, stop_at_fifth, command="hasten compare --this")
    assert "4 of 6 runs" in str(caught.value)
    assert "Go on with: hasten compare --this" in str(caught.value)
    assert caught.value.exit_status == 128 + 15
    result, fake = go(grid, folder)
    assert fake.batches == [20, 30]
    assert result.ran == 2
    assert [len(row.runs) for row in result.rows] == [2, 2, 2]


def test_ctrl_c_between_runs_also_says_how_to_go_on(tmp_path: Path) -> None:
    def stop(settings: TrainSettings, number: int) -> Measured:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="Go on with") as caught:
        go(on_cpu(), tmp_path / "c", stop)
    assert caught.value.exit_status == 130


def test_a_finished_comparison_trains_nothing(tmp_path: Path) -> None:
    first, _ = go(on_cpu(batch_size="10,20"), tmp_path / "c")
    again, fake = go(on_cpu(batch_size="10,20"), tmp_path / "c")
    assert fake.asked == []
    assert again.ran == 0
    assert again.rows == first.rows


def test_more_repeats_add_to_what_is_there_and_fewer_leave_it(tmp_path: Path) -> None:
    go(on_cpu(batch_size="10,20", repeat=1), tmp_path / "c")
    result, fake = go(on_cpu(batch_size="10,20", repeat=3), tmp_path / "c")
    assert fake.batches == [10, 20, 10, 20]
    assert [len(row.runs) for row in result.rows] == [3, 3]
    result, fake = go(on_cpu(batch_size="10,20", repeat=2), tmp_path / "c")
    assert fake.asked == []
    assert [len(row.runs) for row in result.rows] == [2, 2]


def test_fresh_measures_anew(tmp_path: Path) -> None:
    go(on_cpu(), tmp_path / "c")
    result, fake = go(on_cpu(), tmp_path / "c", lambda s, n: measured((7.0,)), fresh=True)
    assert len(fake.asked) == 1
    assert result.rows[0].images_per_s == 7.0


def test_another_grid_in_the_same_folder_is_refused_and_nothing_lost(tmp_path: Path) -> None:
    go(on_cpu(batch_size="10,20"), tmp_path / "c")
    before = (tmp_path / "c" / kept_rows.ROWS).read_bytes()
    with pytest.raises(UsageError, match=r"--batch-size 10,20 there, 10,30 here") as caught:
        go(on_cpu(batch_size="10,30"), tmp_path / "c")
    assert "--fresh" in str(caught.value)
    assert (tmp_path / "c" / kept_rows.ROWS).read_bytes() == before


def test_rows_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    go(on_cpu(), tmp_path / "c")
    path = tmp_path / "c" / kept_rows.GRID
    content = json.loads(path.read_text())
    content["machine"]["devices"]["cpu"] = "Abacus 1"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="cpu was Abacus 1"):
        go(on_cpu(), tmp_path / "c")


def test_a_device_that_comes_later_adds_its_rows() -> None:
    one = kept_rows.Machine(torch="2", cores=2, devices={"cpu": "a"})
    other = {"torch": "2", "cores": 2, "devices": {"cuda:0": "b"}}
    assert one.differences(other) == []
    assert one.differences({**other, "cores": 4}) == ["cores 4 then, 2 now"]


def test_a_half_written_row_is_done_again(tmp_path: Path) -> None:
    grid, folder = on_cpu(batch_size="10,20,30"), tmp_path / "c"
    go(grid, folder)
    path = folder / kept_rows.ROWS
    path.write_bytes(path.read_bytes()[:-20])
    result, fake = go(grid, folder)
    assert fake.batches == [30]
    assert all(row.runs for row in result.rows)
    assert len(path.read_text().splitlines()) == 3


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    grid, folder = on_cpu(batch_size="10,20"), tmp_path / "c"
    go(grid, folder)
    path = folder / kept_rows.ROWS
    path.write_text("{}x\n" + path.read_text())
    with pytest.raises(HastenError, match=r"rows\.jsonl, line 1"):
        go(grid, folder)


def test_rows_without_their_grid_are_not_guessed_at(tmp_path: Path) -> None:
    go(on_cpu(), tmp_path / "c")
    (tmp_path / "c" / kept_rows.GRID).unlink()
    with pytest.raises(UsageError, match="has lost its grid"):
        go(on_cpu(), tmp_path / "c")
    (tmp_path / "c" / kept_rows.GRID).write_text("[]")
    with pytest.raises(UsageError, match="cannot read"):
        go(on_cpu(), tmp_path / "c")


def test_a_removed_folder_is_told_while_running(tmp_path: Path) -> None:
    def remove(settings: TrainSettings, number: int) -> Measured:
        for path in (tmp_path / "c").iterdir():
            path.unlink()
        (tmp_path / "c").rmdir()
        return measured()

    with pytest.raises(HastenError, match="removed"):
        go(on_cpu(), tmp_path / "c", remove)


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        go(on_cpu(), tmp_path / "c")


def test_the_default_name_is_the_same_for_the_same_grid() -> None:
    name = kept_rows.default_name(on_cpu(batch_size="10,20"))
    assert name.startswith("digits-")
    assert name == kept_rows.default_name(on_cpu(batch_size="10,20", repeat=9))
    assert name != kept_rows.default_name(on_cpu(batch_size="10,30"))
    odd = kept_rows.default_name(on_cpu(data="/some/Übung nr. 1/"))
    assert odd.isascii() and Path(odd).name == odd


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfDeviceMemory("out of memory on cpu\nTry less"), "out of memory on cpu"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_trial_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    said: list[str] = []

    def fail(settings: TrainSettings, number: int) -> Measured:
        if settings.batch_size == 20:
            raise error
        return measured()

    grid = on_cpu(batch_size="10,20,30", repeat=2)
    result, fake = go(grid, tmp_path / "c", fail, say=said.append)
    assert fake.batches == [10, 20, 30, 10, 30]  # not tried in vain a second time
    assert [len(row.runs) for row in result.rows] == [2, 0, 2]
    assert [row.number for row in result.failed] == [2]
    assert str(result.rows[1].failed).startswith(reason)
    assert said[2] == f"[2/6] cpu, batch 20, workers auto: failed: {reason}"
    assert f"Run 2 failed: {reason}" in findings(result)
    again, fake = go(grid, tmp_path / "c")
    assert fake.batches == [20, 20]  # the reason may be gone
    assert not again.failed


def test_a_trial_that_fails_in_a_later_repeat_keeps_its_figures(tmp_path: Path) -> None:
    def fail_second(settings: TrainSettings, number: int) -> Measured:
        if number == 2:
            raise RuntimeError("no")
        return measured()

    result, _ = go(on_cpu(repeat=3), tmp_path / "c", fail_second)
    assert result.rows[0].images_per_s == 200.0
    assert result.rows[0].failed == "RuntimeError: no"


def test_the_first_row_that_worked_is_what_others_are_compared_with(tmp_path: Path) -> None:
    def act(settings: TrainSettings, number: int) -> Measured:
        if number == 1:
            raise RuntimeError("no")
        return measured((10.0 * number,))

    result, _ = go(on_cpu(batch_size="10,20,40"), tmp_path / "c", act)
    assert [row.ratio for row in result.rows] == [None, 1.0, 1.5]
    assert result.first is result.rows[1]
    assert [row.number for row in result.sorted(fastest_first=True)] == [3, 2, 1]


def test_nothing_that_worked_is_no_best(tmp_path: Path) -> None:
    def fail(settings: TrainSettings, number: int) -> Measured:
        raise RuntimeError("no")

    result, _ = go(on_cpu(), tmp_path / "c", fail)
    content = result.to_json()
    assert content["best"] is None
    assert content["rows"][0]["ratio"] is None
    assert content["rows"][0]["spread"]["images_per_s"] is None
    assert math.isnan(content["rows"][0]["images_per_s"])
    assert findings(result) == ["Run 1 failed: RuntimeError: no"]


# --- figures --------------------------------------------------------------------------------------


def test_speed_leaves_out_the_first_epoch_where_there_are_more() -> None:
    assert measured((100.0, 200.0, 400.0, 300.0)).images_per_s == 300.0
    assert measured((100.0, 200.0)).epoch_seconds == 5.0
    assert measured((100.0,)).images_per_s == 100.0


def test_a_measurement_survives_json() -> None:
    run = measured(accuracy=None)
    assert Measured.from_json(json.loads(json.dumps({**run.to_json(), "new": 1}))) == run


def comparison(*runs: list[Measured], left_out: tuple[LeftOut, ...] = ()) -> Comparison:
    """One whose first trial has these runs, and so on."""
    sizes = ",".join(str(10 * number) for number in range(1, len(runs) + 1))
    grid = on_cpu(batch_size=sizes)
    trials, _ = grid.trials()
    return Comparison(
        rows=rows_of(trials, {n: r for n, r in enumerate(runs, 1) if r}, {}),
        left_out=left_out,
        varying=grid.varying,
        folder=Path("c"),
        ran=1,
    )


def test_a_row_has_medians_and_spread_over_its_runs() -> None:
    row = comparison(
        [measured((1, v), accuracy=a) for v, a in ((20, 0.8), (10, 0.9), (40, 0.7))]
    ).rows[0]
    content = row.to_json()
    assert content["images_per_s"] == 20
    assert content["accuracy"] == 0.8
    assert content["spread"]["images_per_s"] == (10, 40)
    assert content["spread"]["accuracy"] == (0.7, 0.9)
    assert content["repeats"] == 3
    assert [epoch["images_per_s"] for epoch in content["epochs"]] == [1, 20]
    assert [epoch["val_loss"] for epoch in content["epochs"]] == [2.0, 1.0]


def test_a_row_names_what_auto_chose_beside_what_was_asked() -> None:
    row = comparison(
        [
            measured(precision="bfloat16", channels_last=True, batch_size=64),
            measured(precision="float32", channels_last=True, batch_size=64),
        ]
    ).rows[0]
    content = row.to_json()
    assert row.precision == "bfloat16, channels last / float32, channels last"
    assert content["precision"] == "bfloat16 / float32"
    assert content["channels_last"] == "on"
    assert content["batch_size"] == 64
    assert content["settings"]["precision"] == "auto"
    assert content["settings"]["channels_last"] == "auto"
    assert set(content["settings"]) == set(AXES)


def test_one_run_has_no_spread() -> None:
    assert comparison([measured()]).rows[0].speed_spread is None


def test_faster_and_learning_less_is_no_gain() -> None:
    result = comparison(
        [measured((1, 100), accuracy=0.9)],
        [measured((1, 300), accuracy=0.8)],
        [measured((1, 200), accuracy=0.899)],
    )
    assert result.fastest is result.rows[1]
    assert result.best is result.rows[2]
    lines = findings(result)
    assert lines[0].startswith("Fastest: run 2 ") and "3.00 times run 1" in lines[0]
    assert "learns less: accuracy 80.00%, where run 1 has 90.00%" in lines[1]
    assert "run 3 (cpu, batch 30, workers auto)" in lines[1]


def test_fewer_epochs_are_named_as_why_it_learned_less() -> None:
    result = comparison([measured((1, 100))], [measured((300,), accuracy=0.5)])
    line = findings(result)[1]
    assert "after 1 epochs, where run 1 has 90.00% after 2" in line
    assert "None that is faster learns as well as run 1." in line


@pytest.mark.parametrize(
    ("accuracy", "images", "less"),
    [
        (0.896, 10_000_000, False),  # too little to matter
        (0.89, 10_000, False),  # may be chance
        (0.88, 10_000, True),
        (0.88, 360, False),
        (0.70, 360, True),
        (0.95, 360, False),
        (None, 360, False),
    ],
)
def test_clearly_less_accuracy_is_more_than_chance(
    accuracy: float | None, images: int, less: bool
) -> None:
    result = comparison(
        [measured(accuracy=0.9, val_images=images)],
        [measured(accuracy=accuracy, val_images=images)],
    )
    assert learns_less(result.rows[1], result.first) is less


def test_rows_whose_spreads_meet_are_not_told_apart() -> None:
    result = comparison(
        [measured((1, 100)), measured((1, 210))],
        [measured((1, 200)), measured((1, 300))],
        [measured((1, 50)), measured((1, 60))],
    )
    fastest = result.rows[1]
    assert as_fast(result.rows[0], fastest)
    assert not as_fast(result.rows[2], fastest)
    assert "Run 1 is as fast within the spread of the repeats." in findings(result)


def test_how_speed_was_measured_is_said() -> None:
    once = findings(comparison([measured((5.0,))], [measured((6.0,))]))
    assert any("only epoch" in line for line in once)
    assert any("run once" in line for line in once)
    mixed = findings(comparison([measured((5.0,))] * 2, [measured((6.0, 7.0))] * 2))
    assert any("runs of one epoch" in line for line in mixed)
    assert not any("run once" in line for line in mixed)
    steady = findings(comparison([measured()] * 2))
    assert len(steady) == 1


def test_a_batch_that_holds_all_images_is_said() -> None:
    lines = findings(comparison([measured(batch_size=2000)] * 2))
    assert lines[1] == "Batch 2000 is more than the 1,000 training images: an epoch is one step."


def test_absent_devices_are_among_the_findings() -> None:
    result = comparison([measured()], left_out=(LeftOut(device="cuda", reason="none"),))
    assert "Left out: cuda, which is not here." in findings(result)


# --- real training --------------------------------------------------------------------------------


def test_a_real_run_is_measured_and_its_data_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    loads: list[str] = []
    load = comparing.recipe.load_data

    def counted(settings: TrainSettings, say: Callable[[str], None]) -> Any:
        loads.append(settings.data)
        return load(settings, say)

    monkeypatch.setattr(comparing.recipe, "load_data", counted)
    grid = on_cpu(batch_size="256,2000", epochs="1", precision="float32", channels_last="off")
    said: list[str] = []
    result = compare(grid, tmp_path / "c", say=said.append)
    assert not result.failed, said
    assert loads == ["digits"]
    for row in result.rows:
        assert math.isfinite(row.loss) and 0 <= (row.accuracy or -1) <= 1
        assert row.run_seconds > row.epoch_seconds > 0
        assert row.precision == "float32"
        assert row.runs[0].train_images + row.runs[0].val_images == 1797
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert any("Batch 2000" in line for line in findings(result))


def test_checkpoint_axes_make_runs_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path | None] = []

    def note(settings: TrainSettings, around: Any, data: Any = None) -> Any:
        if data.name != "warm-up":
            folders.append(around.folder)
        raise HastenError("enough")

    monkeypatch.setattr(comparing.recipe, "train", note)
    compare(on_cpu(keep="1,2"), tmp_path / "c", say=quiet)
    assert len(folders) == 2 and None not in folders
    assert not any(folder.exists() for folder in folders if folder)
    folders.clear()
    compare(on_cpu(batch_size="1,2"), tmp_path / "d", say=quiet)
    assert folders == [None, None]


def test_a_model_that_cannot_be_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model gigantic"):
        compare(on_cpu(model="small,gigantic"), tmp_path / "c", say=quiet)
    assert (tmp_path / "c" / kept_rows.ROWS).read_bytes() == b""


def test_data_that_differs_between_trials_is_kept_only_for_a_few() -> None:
    runner = Runner(quiet)
    trials, _ = on_cpu(seed="0,1,2,3").trials()
    runner.prepared(trials)
    assert len(runner._data) == 3


def test_compared_runs_are_fed_by_hasten_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    settings = TrainSettings(data="digits", epochs=1, device="cpu", precision="float32")
    found = Runner(lambda line: None)(settings)
    assert found.feed.startswith("gather, 1 thread - 1,438 samples in memory")
