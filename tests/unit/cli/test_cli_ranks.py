"""How `hasten train` ends in several processes, by --devices and by torchrun: what status, and that
each thing is said once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import warm

OWN = [sys.executable, "-m", "hasten", "train", "--devices", "2"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("-m", "hasten", "train"),
]
QUICK = ["--precision", "float32", "--channels-last", "off", "--progress", "off"]
THROUGH = pytest.mark.parametrize("command", [OWN, TORCHRUN], ids=["devices", "torchrun"])

MODEL = """
import os
from torch import nn

class Breaks(nn.Module):
    def __init__(self, classes, channels, image_size):
        super().__init__()
        self.layer, self.calls = nn.Linear(channels * image_size**2, classes), 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls == 5 and os.environ["RANK"] == "1":
            raise ValueError("a model that breaks")
        return self.layer(x.flatten(1))
"""


def start(
    command: list[str], folder: Path, *options: str, forked: bool = True
) -> subprocess.Popen[str]:
    """Start it, or have it and its ranks forked from a process that has torch imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"}
    return (warm.Popen if forked else subprocess.Popen)(
        [*command, "--runs", str(folder), "--name", "run", *QUICK, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=warm.forking_ranks(environment) if forked else environment,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status of the processes, and what was said and told.

    torchrun ends with 1 whatever its processes end with; it reports theirs.
    """
    said, told = process.communicate(timeout=240)
    status = process.returncode
    if "torch.distributed.run" in process.args and status:  # type: ignore[operator]
        assert status == 1
        reported = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", told, re.DOTALL)
        assert reported is not None, told
        status = int(reported[1])
    return status, said, told


@THROUGH
def test_a_run_that_is_done_ends_with_0_and_says_it_once(
    command: list[str], tmp_path: Path
) -> None:
    options = ["--epochs", "1", "--batch-size", "auto", "--sync-batchnorm"]
    status, said, told = ended(start(command, tmp_path, *options, forked=command is TORCHRUN))
    assert status == 0, told
    size = "Batch size: 128 fits, 64 on each of 2 devices"
    for line in ("Using device: cpu", size, "Validation accuracy: "):
        assert said.count(line) == 1, line
    assert "Traceback" not in told
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "ranks" / "rank-1.log").exists()


@THROUGH
def test_a_failure_of_one_ends_all_with_1_and_is_told_by_the_first(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    model = ["--model", f"{tmp_path / 'own.py'}:Breaks"]
    status, _, told = ended(start(command, tmp_path, *model))
    assert status == 1, told
    assert told.count("error: rank 1 failed: ") == 1, told
    assert told.count("rank 1: error: ") <= 1  # its own, which need not come
    assert "a model that breaks" in told


@THROUGH
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--batch-size", "many"], "--batch-size is a whole number or auto, not 'many'"),
        (["--batchsize", "8"], "No such option"),
        (["nowhere"], "nowhere is neither a data set nor a folder here"),
    ],
)
def test_wrong_use_ends_all_with_2_and_is_told_once(
    command: list[str], options: list[str], word: str, tmp_path: Path
) -> None:
    status, _, told = ended(start(command, tmp_path, *options))
    assert status == 2, told
    assert told.count(word) == 1, told


@THROUGH
def test_a_notice_to_one_ends_all_with_75_once_they_have_saved(
    command: list[str], tmp_path: Path
) -> None:
    process = under_way(command, tmp_path)
    rank_of(process, 1).send_signal(signal.SIGTERM)
    status, _, told = ended(process)
    assert status == 75, told
    assert told.count("stopped by SIGTERM after step") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_one_that_is_killed_is_named(tmp_path: Path) -> None:
    process = under_way(OWN, tmp_path)
    rank_of(process, 1).kill()
    status, _, told = ended(process)
    assert status == 128 + signal.SIGKILL, told
    assert told.count("error: rank 1 was ended by SIGKILL") == 1
    assert "Traceback" not in told


def under_way(command: list[str], tmp_path: Path) -> subprocess.Popen[str]:
    """A run that has done an epoch, and has many to go."""
    process = start(command, tmp_path, "--epochs", "5000", forked=False)
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and '"epoch"' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """One of the processes that a launcher has started."""
    started = psutil.Process(process.pid).children(recursive=True)
    return next(
        one
        for one in started
        if one.environ().get("RANK") == str(rank) and "train" in one.cmdline()
    )
