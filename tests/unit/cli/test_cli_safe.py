"""The command line where something is wrong on purpose: damage, foreign files, no readers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hasten.cli.app import _run
from hasten.train import checkpoint
from hasten.vision import models

_WORDS = (
    "--device cpu --precision float32 --channels-last off --num-workers 0 --model lesson"
    " --image-size 16 --batch-size 128 --val-fraction 0.5"
)
QUICK = _WORDS.split()

Ran = tuple[int, str]


@pytest.fixture
def hasten(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*words: object) -> Ran:
        status = _run([str(word) for word in words])
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return status, told.out + told.err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    words = [*QUICK, "--epochs", "2", "--runs", str(runs), "--name", "run", "--progress", "off"]
    assert _run(["train", *words]) == 0
    return runs / "run"


@pytest.fixture
def half(trained: Path, tmp_path: Path) -> Path:
    """A run that was killed in its second epoch."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "model.safetensors").unlink()
    newest, _ = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    shutil.rmtree(newest)
    (folder / "checkpoints" / "best.json").unlink()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.find(folder), map_location="cpu").model


@pytest.mark.parametrize("option", ["--runs", "--resume"])
def test_an_empty_name_is_named(hasten: Callable[..., Ran], option: str) -> None:
    status, told = hasten("train", option, "")
    assert status == 2
    assert f"{option} is an empty name" in told


def test_a_wrong_hasten_device_is_told(
    hasten: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_DEVICE", "nonsense")
    status, told = hasten("devices")
    assert status == 0
    assert "unknown device 'nonsense' (from the environment variable HASTEN_DEVICE)" in told
    monkeypatch.setenv("HASTEN_DEVICE", "cpu")
    assert "HASTEN_DEVICE" not in hasten("devices")[1]


def altered(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"batch_size": 128', b'"batch_size": 64'))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [altered, cut, Path.unlink])
def test_settings_that_are_damaged_are_taken_from_a_checkpoint(
    hasten: Callable[..., Ran], half: Path, trained: Path, damage: Callable[[Path], None]
) -> None:
    damage(half / "config.json")
    status, told = hasten("train", "--resume", half, "--progress", "plain")
    assert status == 0, told
    assert f"The settings are taken from {half / 'checkpoints' / 'step-'}" in told
    assert all(torch.equal(value, weights(half)[name]) for name, value in weights(trained).items())


def test_damaged_lines_of_the_log_are_told_and_left_out(
    hasten: Callable[..., Ran], half: Path, trained: Path
) -> None:
    log = half / "metrics.jsonl"
    first, *rest = log.read_text().splitlines()
    log.write_text("\n".join([first.replace('"epoch": 1', '"epoch": 2'), "[[[", *rest]) + "\n")
    status, told = hasten("train", "--resume", half, "--progress", "plain")
    assert status == 0, told
    assert f"{log} has 2 damaged lines" in told
    assert all(torch.equal(value, weights(half)[name]) for name, value in weights(trained).items())


def test_a_whole_model_is_loaded_only_by_trust(hasten: Callable[..., Ran], tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (16, 16)).save(tmp_path / "black.png")
    model = models.create("lesson", classes=10, channels=1, image_size=16)
    torch.save(model, tmp_path / "whole.pt")
    given = "--model lesson --classes 10 --channels 1 --image-size 16 --device cpu"
    words = given.split()
    command = ["predict", tmp_path / "whole.pt", tmp_path / "black.png", *words]
    status, told = hasten(*command)
    assert status == 1
    assert "never runs code from a checkpoint" in told
    assert "--trust" in told
    status, told = hasten(*command, "--trust")
    assert status == 0, told
    assert "whatever program" in told
    assert "black.png" in told


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_training_goes_on_when_its_reader_leaves(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m hasten train "$@" | head -n 1; exit ${{PIPESTATUS[0]}}'
    words = [*QUICK, "--epochs", "2", "--name", "run"]
    done = subprocess.run(
        ["bash", "-c", command, "-", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Using device")
    assert len(done.stdout.splitlines()) == 1
    assert "Broken pipe" not in done.stderr
    assert (tmp_path / "runs" / "run" / "model.safetensors").is_file()
    assert (
        checkpoint.load(checkpoint.find(tmp_path / "runs" / "run"), map_location="cpu").meta[
            "epoch"
        ]
        == 2
    )
