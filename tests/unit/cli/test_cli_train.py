"""`hasten train`: every option reaches the settings of the run, as what it stands for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.app import _run
from hasten.vision import recipe
from hasten.vision.settings import TrainSettings

GIVEN: dict[str, tuple[str, Any]] = {
    "data": ("photos", "photos"),
    "data_dir": ("place", "place"),
    "image_size": ("96", 96),
    "val_fraction": ("0.3", 0.3),
    "augment": ("light", "light"),
    "cache": ("disk", "disk"),
    "cache_bytes": ("1.5GB", 1_500_000_000),
    "normalize": ("--no-normalize", False),
    "model": ("lesson", "lesson"),
    "epochs": ("3", 3),
    "batch_size": ("auto", "auto"),
    "lr": ("0.5", 0.5),
    "optimizer": ("sgd", "sgd"),
    "weight_decay": ("0.1", 0.1),
    "schedule": ("cosine", "cosine"),
    "label_smoothing": ("0.1", 0.1),
    "accumulate": ("2", 2),
    "clip_norm": ("1", 1.0),
    "precision": ("float32", "float32"),
    "channels_last": ("on", "on"),
    "compile": ("--compile", True),
    "device": ("cpu", "cpu"),
    "num_workers": ("2", 2),
    "strategy": ("single", "single"),
    "sync_batchnorm": ("--sync-batchnorm", True),
    "plan": ("inline", "inline"),
    "seed": ("7", 7),
    "checkpoint_every": ("100 steps", "100 steps"),
    "keep": ("5", 5),
    "patience": ("4", 4),
    "log_every": ("11", 11),
    "hang_after_s": ("9", 9.0),
    "hang_exits": ("--hang-exits", True),
}


class Begun(Exception):
    """The run would begin, with these settings."""


def settings_of(words: list[str], monkeypatch: pytest.MonkeyPatch, runs: Path) -> TrainSettings:
    found: list[TrainSettings] = []

    def train(settings: TrainSettings, around: Any) -> Any:
        found.append(settings)
        raise Begun

    monkeypatch.setattr(recipe, "train", train)
    with pytest.raises(Begun):
        _run(["train", *words, "--runs", str(runs)])
    return found[0]


def test_every_setting_is_tried_here() -> None:
    assert set(GIVEN) == {field.name for field in dataclasses.fields(TrainSettings)}


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_reaches_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text, expected = GIVEN[name]
    words = (
        [text] if name == "data" or text.startswith("--") else ["--" + name.replace("_", "-"), text]
    )
    if name == "cache_bytes":
        words += ["--cache", "ram"]
    settings = settings_of(words, monkeypatch, tmp_path)
    assert getattr(settings, name) == expected
    assert type(getattr(settings, name)) is type(expected)


@pytest.mark.parametrize("text", ["much", "-1", "5 bananas", ""])
def test_no_number_of_bytes(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _run(["train", "--cache", "ram", f"--cache-bytes={text}", "--runs", str(tmp_path)]) == 2
    assert "such as 500MB or 20GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--channels-last", "off,on"], "off,on"),
        (["--precision=float32,bfloat16"], "float32,bfloat16"),
        (["--batch-size", "10,20"], "10,20"),
        (["--epochs", "1,2"], "1,2"),
        (["--epochs=1,2"], "1,2"),
        (["--lr", "0.1,0.2"], "0.1,0.2"),
        (["digits,fashion-mnist"], "digits,fashion-mnist"),
    ],
)
def test_lists_of_values_are_for_compare(
    words: list[str], values: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _run(["train", *words, "--runs", str(tmp_path)]) == 2
    told = capsys.readouterr().err.strip()
    assert told.endswith(f"; several values ({values}) are for hasten compare")


@pytest.mark.parametrize("words", [["--epochs", "x"], ["--model", "nosuch"], ["--lr", "x"]])
def test_other_mistakes_say_nothing_of_lists(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # An option with a comma that is right is no list that was refused.
    assert _run(["train", *words, "--data-dir", "a,b", "--runs", str(tmp_path)]) == 2
    assert "hasten compare" not in capsys.readouterr().err


def test_training_is_fed_by_hasten_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    words = ["train", "digits", "--epochs", "1", "--device", "cpu", "--precision", "float32"]
    assert _run([*words, "--json", "--runs", str(tmp_path / "runs")]) == 0
    feed = json.loads(capsys.readouterr().out)["feed"]
    assert feed.startswith("gather, 1 thread - 1,438 samples in memory")
