"""kill -9 at random moments, then --resume: the weights are those of a run never killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import warm

KILLS = 10
SEED = 20261130
# One thread: two trials run beside each other, and sums in one order are the same bits.
_WORDS = (
    "--device cpu --precision float32 --channels-last off --num-workers 0 --epochs 3"
    " --batch-size 16 --progress off --model lesson --image-size 20"
)
SETTINGS = _WORDS.split()


def start(runs: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"}
    command = [sys.executable, "-m", "hasten", "train", *words, "--checkpoint-every", "7 steps"]
    log = (runs / f"log-{time.monotonic_ns()}.txt").open("wb")
    with log:
        return warm.Popen(command, stdout=log, stderr=log, env=environment)


def began(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run is in its folder: before, there is nothing that could be lost."""
    while not (folder / "config.json").exists():
        assert process.poll() is None, "the run ended before it began"
        time.sleep(0.01)


def whole(runs: Path, name: str) -> tuple[bytes, float]:
    """The final weights of a run left alone, and the seconds from its beginning to its end."""
    process = start(runs, *SETTINGS, "--runs", str(runs), "--name", name)
    began(runs / name, process)
    since = time.monotonic()
    assert process.wait(120) == 0
    return weights(runs / name), time.monotonic() - since


def weights(folder: Path) -> bytes:
    from hasten.train import checkpoint

    newest, passed_over = checkpoint.newest(folder / checkpoint.FOLDER)
    assert newest is not None and not passed_over
    state = checkpoint.load(newest, map_location="cpu").model
    return b"".join(state[key].numpy().tobytes() for key in sorted(state))


def trial(runs: Path, number: int, delay_s: float) -> tuple[bool, bytes]:
    """Kill a run after a time, resume it; whether the kill came before its end, and its weights."""
    name = f"killed-{number}"
    process = start(runs, *SETTINGS, "--runs", str(runs), "--name", name)
    began(runs / name, process)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    killed = process.wait(60) == -signal.SIGKILL
    resumed = start(runs, "--resume", str(runs / name), "--progress", "off")
    assert resumed.wait(120) == 0, sorted(runs.glob("log-*"))[-1].read_text()
    return killed, weights(runs / name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_any_moment_ends_with_the_weights_of_one_never_killed(
    tmp_path: Path,
) -> None:
    expected, _ = whole(tmp_path, "whole")  # what is read from the disk for it takes its time
    again, seconds = whole(tmp_path, "again")
    assert again == expected
    moments = random.Random(SEED)
    delays = [moments.uniform(0.0, seconds) for _ in range(KILLS)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda n: trial(tmp_path, n, delays[n]), range(KILLS)))
    same = [found == expected for _, found in results]
    assert all(same), f"{same.count(False)} of {KILLS} differ (delays {delays})"
    assert sum(killed for killed, _ in results) >= KILLS // 2, "hardly any kill came in time"
