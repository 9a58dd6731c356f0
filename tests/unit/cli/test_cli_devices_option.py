"""`hasten train --devices N`: several processes on this machine, as one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm
from hasten.cli.app import main

LISTENING = "0A"


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def listening(pids: list[int]) -> list[str]:
    """Addresses, as the kernel writes them, that processes listen on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_processes_train_on_loopback_alone_and_stop_at_ctrl_c(tmp_path: Path) -> None:
    # fsdp has more groups of processes than ddp, and so more that could listen.
    options = "--devices 2 --strategy fsdp --epochs 2000 --precision float32 --channels-last off"
    command = [sys.executable, "-m", "hasten", "train", *options.split()]
    command += ["--batch-size-per-device", "16", "--runs", str(tmp_path), "--name", "run"]
    command += ["--progress", "plain"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and '"epoch"' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = children(process.pid)
    addresses = listening([process.pid, *ranks])
    process.send_signal(signal.SIGINT)
    said, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert len(ranks) == 2
    assert addresses and set(addresses) == {"0100007F"}  # 127.0.0.1
    assert "Batch size: 32, 16 on each of 2 devices; learning rate 0.003" in said
    assert said.count("Using device: cpu") == 1
    assert told.count("stopped by SIGINT") == 1
    assert f"hasten train --resume {tmp_path / 'run'} --devices 2" in told
    assert "Traceback" not in told
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "Epoch [1/2000]" in (tmp_path / "run" / "ranks" / "rank-1.log").read_text()


@pytest.mark.parametrize(("number", "who"), [("SIGTERM", "launcher"), ("SIGUSR1", "rank")])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_notice_ends_it_with_75_when_it_has_saved(tmp_path: Path, number: str, who: str) -> None:
    options = "--devices 2 --epochs 2000 --precision float32 --channels-last off --progress off"
    command = [sys.executable, "-m", "hasten", "train", *options.split()]
    process = warm.Popen(
        [*command, "--runs", str(tmp_path), "--name", "run"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=warm.forking_ranks({**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"}),
    )
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and '"epoch"' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told_one = process.pid if who == "launcher" else max(children(process.pid))
    os.kill(told_one, getattr(signal, number))
    _, told = process.communicate(timeout=120)
    assert process.returncode == 75, told
    assert f"stopped by {number}" in told
    assert "Traceback" not in told
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices", "0"], "--devices is 0: at least 1"),
        (["--batch-size-per-device", "0"], "--batch-size-per-device is 0"),
        (["--batch-size", "8", "--batch-size-per-device", "8"], "give --batch-size, of all"),
        (["--strategy", "tpu"], "no strategy 'tpu'"),
        (["--strategy", "dp", "--device", "cpu"], "cpu is the only one of its kind"),
        (["--sync-batchnorm", "--device", "cpu"], "sync_batchnorm is for several processes"),
    ],
)
def test_what_cannot_be_is_said(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--epochs", "1", "--runs", str(tmp_path), *options])
    assert stop.value.code == 2
    assert word in capsys.readouterr().err


def test_under_a_launcher_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as stop:
        main(["train", "--devices", "2", "--runs", str(tmp_path)])
    assert stop.value.code == 2
    assert "a launcher has done so: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["evaluate runs/x", "predict runs/x cat.jpg", "compare digits"],
    ids=lambda command: command.split()[0],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_one_process_does_is_refused_under_a_launcher_and_said_once(
    command: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert ("is done by one process, and a launcher has started 2" in told) == (rank == "0")
