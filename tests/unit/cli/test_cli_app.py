"""The `hasten` command around its sub-commands: streams, signals, and errors of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import app


def hasten(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which `hasten` is the command."""
    command = f'hasten() {{ "{sys.executable}" -m hasten "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_closed_streams_are_nowhere_and_no_error(tmp_path: Path) -> None:
    ran = hasten("hasten --version <&- >&-", tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    ran = hasten("hasten devices --json <&- >&- 2>&-", tmp_path)
    assert ran.returncode == 0


def test_a_closed_stream_gives_its_number_to_no_data_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    app._open_what_is_closed()
    opened = [sys.stdin, sys.stdout, sys.stderr]
    assert all(stream is not None and stream.name == os.devnull for stream in opened)
    for stream in opened:
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "devices --json", "devices"])
def test_output_to_a_full_disk(arguments: str, tmp_path: Path) -> None:
    ran = hasten(f"hasten {arguments} >/dev/full", tmp_path)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert ran.stderr.endswith(
        "error: No space left on device; is the output going to a disk that is full?\n"
    )


def test_the_current_folder_was_deleted(tmp_path: Path) -> None:
    ran = hasten("mkdir gone; cd gone; rmdir ../gone; hasten devices", tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.endswith("error: the current folder was deleted; cd to another one\n")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "error: 'a/b': Permission denied"),
        (MemoryError(), 1, "error: there is not enough memory for this"),
        (MemoryError("8 GiB"), 1, "error: there is not enough memory for this: 8 GiB"),
    ],
)
def test_what_no_command_has_words_for(
    raised: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hasten.vision import recipe

    def fails(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(recipe, "train", fails)
    assert app._run(["train"]) == status
    assert capsys.readouterr().err == said + "\n"
