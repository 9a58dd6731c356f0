"""`hasten compare`: its options, what it prints where, its files and exit statuses."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from hasten.cli import comparison_table
from hasten.cli.app import _run, app
from hasten.errors import Interrupted, OutOfDeviceMemory
from hasten.vision import comparing
from hasten.vision.compared import Epoch, Measured
from hasten.vision.grid import AXES, parse
from hasten.vision.settings import TrainSettings


def measured(settings: TrainSettings) -> Measured:
    """A run whose speed is ten times its batch size, and whose accuracy falls with it."""
    size = int(settings.batch_size)
    return Measured(
        epochs=tuple(
            Epoch(
                epoch=number,
                loss=0.5 / number,
                val_loss=0.4,
                accuracy=0.9 if size < 100 else 0.5,
                seconds=1000 / size,
                images_per_s=10.0 * size,
            )
            for number in range(1, settings.epochs + 1)
        ),
        run_seconds=3000 / size,
        precision="float32" if settings.precision == "auto" else settings.precision,
        channels_last=False,
        batch_size=size,
        feed="gather",
        train_images=1000,
        val_images=10_000,
    )


class Ran:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def trained() -> list[TrainSettings]:
    """The settings that were trained with, in order."""
    return []


@pytest.fixture
def act() -> dict[str, Callable[[TrainSettings], Measured]]:
    """What stands for training; a test may replace ``train``."""
    return {"train": measured}


@pytest.fixture
def hasten(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trained: list[TrainSettings],
    act: dict[str, Callable[[TrainSettings], Measured]],
) -> Any:
    class FakeRunner:
        def __init__(self, say: Any, *, save: bool) -> None:
            pass

        def prepared(self, trials: Any) -> Any:
            def run_one(settings: TrainSettings) -> Measured:
                trained.append(settings)
                return act["train"](settings)

            return run_one

    monkeypatch.setattr(comparing, "Runner", FakeRunner)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        status = _run(["compare", *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(status, captured.out, captured.err)

    return run


GRID = ("--device", "cpu", "--batch-size", "10,20,200", "--num-workers", "0", "--repeat", "2")


def test_every_setting_of_train_is_an_option() -> None:
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert set(AXES) <= names
    own = {"preset", "repeat", "sort", "name", "comparisons", "fresh", "csv", "plot", "json"}
    assert names - set(AXES) == own


def test_the_help_has_an_example(hasten: Any) -> None:
    ran = hasten("--help")
    assert ran.status == 0
    assert "hasten compare fashion-mnist" in ran.out
    assert "--clip-norm" in ran.out


def test_the_table_off_a_terminal_is_aligned_text(hasten: Any) -> None:
    ran = hasten(*GRID)
    assert ran.status == 0
    assert ran.err == ""
    lines = ran.out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("run  "))
    head, rows = lines[start], lines[start + 1 : start + 4]
    titles = "run device batch size workers precision epoch loss accuracy epoch s run s images/s"
    assert " ".join(head.split()) == f"{titles} min-max ratio"
    assert rows[1].split() == [
        *("2", "cpu", "20", "0", "float32", "2", "0.2500", "90.00%"),
        *("50.0", "150", "200", "200-200", "2.00x"),
    ]
    assert all(row.endswith("x") and len(row) == len(head) for row in rows)
    assert "[4/6] cpu, batch 10, workers 0: 100 images/s, 90.0 %" in lines
    assert "\x1b" not in ran.out and "\r" not in ran.out


def test_what_the_fastest_costs_is_said(hasten: Any) -> None:
    ran = hasten(*GRID)
    assert "But it learns less: accuracy 50.00%" in ran.out
    assert "The fastest that learns as well is run 2 " in ran.out


def test_sort_puts_the_fastest_first(hasten: Any) -> None:
    ran = hasten(*GRID, "--sort", "--json")
    assert [row["run"] for row in ran.json["rows"]] == [3, 2, 1]


def test_json_comes_last_and_alone_on_standard_output(hasten: Any) -> None:
    ran = hasten(*GRID, "--precision", "auto", "--json")
    assert len(ran.out.splitlines()) == 1
    assert "[1/6]" in ran.err and "run  device" in ran.err
    content = ran.json
    assert content["schema"] == 1 and content["hasten"]
    row = content["rows"][1]
    assert row["batch_size"] == 20 and row["num_workers"] == 0 and row["device"] == "cpu"
    assert row["precision"] == "float32" and row["settings"]["precision"] == "auto"
    assert (row["epoch_seconds"], row["run_seconds"], row["images_per_s"]) == (50.0, 150.0, 200.0)
    assert (row["loss"], row["accuracy"], row["ratio"], row["repeats"]) == (0.25, 0.9, 2.0, 2)
    assert row["spread"]["images_per_s"] == [200.0, 200.0]
    assert [epoch["epoch"] for epoch in row["epochs"]] == [1, 2]
    assert content["best"] == row
    assert content["left_out"] == []


def test_an_absent_device_is_left_out_and_said(hasten: Any) -> None:
    ran = hasten("--device", "cpu,cuda:77", "--batch-size", "10", "--repeat", "1", "--json")
    assert ran.status == 0
    assert ran.json["left_out"][0]["device"] == "cuda:77"
    assert "Left out cuda:77" in ran.err


def test_csv_has_a_row_a_trial(hasten: Any, tmp_path: Path) -> None:
    assert hasten(*GRID, "--csv", "rows.csv").status == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["images_per_s"] for row in rows] == ["100.0", "200.0", "2000.0"]
    assert rows[0]["epochs"] == "2"
    assert rows[0]["images_per_s_min"] == rows[0]["images_per_s_max"] == "100.0"
    assert set(AXES) <= set(rows[0])


def test_the_plot_is_in_the_folder_or_where_it_is_wanted(hasten: Any, tmp_path: Path) -> None:
    hasten(*GRID, "--name", "mine")
    folder = tmp_path / "comparisons" / "mine"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "comparison.svg").read_text()
    hasten(*GRID, "--name", "mine", "--plot", "speed.v2.png")
    assert (tmp_path / "speed.v2.png").exists() and (tmp_path / "speed.v2.svg").exists()


def test_a_file_that_cannot_be_written_is_said_before_anything_is_trained(
    hasten: Any, trained: list[TrainSettings]
) -> None:
    for option in ("--csv", "--plot"):
        ran = hasten(*GRID, option, "absent/file")
        assert ran.status == 2
        assert "absent" in ran.err
    assert trained == []


def test_a_csv_that_is_a_folder_is_told_and_the_rows_are_kept(hasten: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").mkdir()
    ran = hasten(*GRID, "--csv", "rows.csv")
    assert ran.status == 1
    assert "cannot write rows.csv" in ran.err and "kept in comparisons" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--batch-size", "10,x"), ("--batch-size x", "number")),
        (("--lr", "0.1,-2"), ("--lr -2", "above 0")),
        (("--device", "cuda:77"), ("cuda:77", "Here: ")),
        (("--preset", "all"), ("preset", "device, workers")),
        (("--name", "a/b"), ("--name", "--comparisons")),
        (("--repeat", "0"), ("repeat",)),
        (("--speed", "1"), ("--speed",)),
    ],
)
def test_wrong_usage_is_status_2_and_trains_nothing(
    hasten: Any,
    trained: list[TrainSettings],
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    ran = hasten(*arguments)
    assert ran.status == 2
    assert all(word in ran.err for word in words)
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_a_failed_trial_is_a_row_and_status_1(hasten: Any, act: Any) -> None:
    def fail(settings: TrainSettings) -> Measured:
        if settings.batch_size == 20:
            raise OutOfDeviceMemory("out of memory on cpu\nTry less")
        return measured(settings)

    act["train"] = fail
    ran = hasten(*GRID, "--json")
    assert ran.status == 1
    assert "Run 2 failed: out of memory on cpu\n" in ran.err
    assert "1 of 3 settings failed; the same command tries it again." in ran.err
    assert [row["failed"] for row in ran.json["rows"]] == [
        None,
        "out of memory on cpu\nTry less",
        None,
    ]
    assert ran.json["rows"][1]["images_per_s"] is None
    act["train"] = measured
    assert hasten(*GRID).status == 0


def test_when_all_fail_there_is_a_table_and_no_plot(hasten: Any, act: Any, tmp_path: Path) -> None:
    def fail(settings: TrainSettings) -> Measured:
        raise RuntimeError("no luck")

    act["train"] = fail
    ran = hasten(*GRID, "--name", "c", "--csv", "rows.csv")
    assert ran.status == 1
    assert "Run 3 failed: RuntimeError: no luck" in ran.out
    assert "3 of 3 settings failed" in ran.out
    assert not (tmp_path / "comparisons/c/comparison.png").exists()
    assert (tmp_path / "rows.csv").read_text().count("RuntimeError: no luck") == 3


def test_a_stopped_comparison_prints_the_command_that_goes_on(
    hasten: Any, act: Any, trained: list[TrainSettings]
) -> None:
    def stop(settings: TrainSettings) -> Measured:
        if len(trained) == 3:
            raise Interrupted("stopped by SIGINT", signal.SIGINT)
        return measured(settings)

    act["train"] = stop
    ran = hasten("digits", *GRID, "--normalize", "on", "--fresh", "--sort")
    assert ran.status == 130
    assert "2 of 6 runs are done" in ran.err
    told = ran.err.split("Go on with: ")[1].strip()
    expected = (
        "hasten compare digits --batch-size 10,20,200 --device cpu --num-workers 0 --normalize on"
        " --repeat 2 --sort"
    )
    assert told == expected
    act["train"] = measured
    trained.clear()
    ran = hasten(*told.split()[2:])
    assert ran.status == 0
    assert [settings.batch_size for settings in trained] == [200, 10, 20, 200]


def test_the_same_command_again_only_shows(hasten: Any, trained: list[TrainSettings]) -> None:
    hasten(*GRID)
    trained.clear()
    ran = hasten(*GRID)
    assert trained == []
    assert "Every run was done already" in ran.out and "run  device" in ran.out
    hasten(*GRID, "--fresh")
    assert len(trained) == 6


def test_a_changed_grid_under_the_same_name_is_refused(hasten: Any) -> None:
    hasten(*GRID, "--name", "c")
    ran = hasten(*GRID, "--name", "c", "--lr", "0.1")
    assert ran.status == 2
    assert "--lr default there, 0.1 here" in ran.err


def test_a_preset_with_an_option_over_it(hasten: Any, trained: list[TrainSettings]) -> None:
    hasten("--preset", "workers", "--num-workers", "3", "--device", "cpu", "--repeat", "1")
    assert [(s.batch_size, s.num_workers) for s in trained] == [(100, 3), (1000, 3), (10000, 3)]


def test_runs_are_of_two_epochs_unless_said_otherwise(
    hasten: Any, trained: list[TrainSettings]
) -> None:
    hasten(*GRID)
    hasten(*GRID, "--epochs", "1")
    assert {settings.epochs for settings in trained[:6]} == {2}
    assert {settings.epochs for settings in trained[6:]} == {1}


# --- terminals ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows_for_a_table(tmp_path: Path, **options: str) -> Any:
    grid = parse({"device": "cpu", "batch_size": "10,20", **options}, repeat=2)
    return comparing.compare(grid, tmp_path / "c", say=lambda text: None, run_one=measured)


def shown(result: Any, width: int) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    comparison_table.show(console, result.rows, result.varying)
    return stream.getvalue().splitlines()


def test_a_wide_terminal_gets_a_table_with_lines(tmp_path: Path) -> None:
    lines = shown(rows_for_a_table(tmp_path, lr="0.1,0.25", normalize="on,off"), 200)
    assert len({len(line) for line in lines}) == 1
    assert all(word in lines[1] for word in ("batch size", " lr ", "normalize", "ratio"))
    assert " 0.25 " in lines[-2]


@pytest.mark.parametrize("width", [100, 80, 60])
def test_a_narrow_terminal_gets_every_figure_unbroken(tmp_path: Path, width: int) -> None:
    lines = shown(rows_for_a_table(tmp_path), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in ("2  cpu, batch 20, workers auto", "200 images/s (200-200), 2.00x", "90.00%"):
        assert words in text


@pytest.mark.parametrize("width", [300, 60])
def test_brackets_and_control_codes_in_names_are_text(tmp_path: Path, width: int) -> None:
    folder = tmp_path / "[red]c\x1bts"
    folder.mkdir()
    result = rows_for_a_table(tmp_path, data=str(folder), batch_size="10")
    result = dataclasses.replace(result, varying=("data",))
    text = "\n".join(shown(result, width))
    assert "\x1b" not in text
    assert r"[red]c\x1bts" in text or width < 300


def test_on_a_terminal_what_is_under_way_is_shown_and_replaced(
    hasten: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    assert hasten(*GRID).status == 0
    text = terminal.getvalue()
    replaced = (
        "[1/6] cpu, batch 10, workers 0 ...\r\x1b[K[1/6] cpu, batch 10, workers 0: 100 images/s"
    )
    assert replaced in text


def test_an_error_does_not_stand_behind_what_was_under_way(
    hasten: Any, act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(settings: TrainSettings) -> Measured:
        raise KeyboardInterrupt

    act["train"] = stop
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert hasten(*GRID).status == 130
    assert terminal.getvalue().endswith("...\r\x1b[K")


def test_a_stream_of_few_letters_is_no_reason_to_fail(
    hasten: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Übung").mkdir()
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    assert hasten("Übung,digits", *GRID).status == 0
    sys.stdout.flush()
    assert b"\\xdcbung" in buffer.getvalue()


def test_another_grid_is_refused_before_a_comparison_is_announced(hasten: Any) -> None:
    first = hasten(*GRID, "--name", "one")
    assert first.out.splitlines()[0] == "Comparison: comparisons/one, 3 settings, 2 runs each"
    ran = hasten("--device", "cpu", "--batch-size", "10", "--name", "one")
    assert (ran.status, ran.out) == (2, "")
    assert "comparisons/one holds another comparison" in ran.err
