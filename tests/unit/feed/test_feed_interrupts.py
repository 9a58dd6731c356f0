"""Ctrl-C at any moment, and other ways to leave: nothing is left behind, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc and /dev/shm"
)

_SCRIPT = """
import multiprocessing, sys, threading, time
sys.path.insert(0, {folder!r})
import feed_datasets as kinds
import torch
from torch.utils.data import DataLoader
from hasten.feed import Loader

class Slow(kinds.Fetching):
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.rand(30_000), index
    def fetch(self, index, key):
        time.sleep(0.001)
        return torch.full((30_000,), index), index

class Stream(kinds.Stream):
    def __iter__(self):
        for index, values in super().__iter__():
            time.sleep(0.001)
            yield index, values

def work():
    global loader
    loader = {loader}
    while True:
        for batch in loader:
            pass

for _ in range({rounds}):
    loader = None
    try:
        print("started", flush=True)
        work()
    except KeyboardInterrupt:
        pass
    if loader is not None:
        loader.close()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("hasten")]
    print(threads, multiprocessing.active_children(), flush=True)
"""

_ROUNDS = 6

LOADERS = {
    "threads": "Loader(Slow(400), 8, plan='threads')",
    "inline": "Loader(Slow(400), 8, plan='inline')",
    "processes": "Loader(Slow(400), 8, num_workers=2)",
    "persistent": "Loader(Slow(40), 8, num_workers=2, persistent_workers=True)",
    "stream": "Loader(Stream(400), 8, num_workers=2)",
    "taken over": "Loader.from_dataloader(DataLoader(Slow(400), 8, num_workers=2))",
    "made ahead": "Loader.from_dataloader(DataLoader(Slow(400), 8), plan='processes')",
    "as it is": "Loader.from_dataloader(DataLoader(Stream(400), 8))",
}


def _processes(group: int) -> list[int]:
    """Of a process group, those that run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_ctrl_c_at_any_moment(kind: str) -> None:
    moments = random.Random(kind)
    before = _shared_memory()
    folder = str(Path(__file__).parent)
    script = _SCRIPT.format(folder=folder, loader=LOADERS[kind], rounds=_ROUNDS)
    process = warm.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    try:
        for _ in range(_ROUNDS):
            assert process.stdout.readline() == "started\n"
            time.sleep(moments.uniform(0, 0.4))  # while it plans, starts workers, or iterates
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
            said.append(process.stdout.readline())
        output, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert said == ["[] []\n"] * _ROUNDS
    assert (process.returncode, output, errors) == (0, "", "")
    ended = time.monotonic() + 10
    while _processes(process.pid) and time.monotonic() < ended:
        time.sleep(0.02)
    assert not _processes(process.pid)
    left = [name for name in _shared_memory() - before if name.startswith("torch_")]
    assert not [name for name in left if not Path(f"/proc/{name.split('_')[1]}").exists()]


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _run(body: str) -> subprocess.CompletedProcess[str]:
    text = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import feed_datasets as kinds
from torch.utils.data import DataLoader
from hasten.feed import Loader
{body}
"""
    return warm.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["taken over", "made ahead"])
def test_the_interpreter_ends_with_an_iterator_open(kind: str) -> None:
    loader = LOADERS[kind].replace("Slow(", "kinds.Fetching(")
    done = _run(f"batches = iter({loader})\nnext(batches)\nprint('first', flush=True)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")


@pytest.mark.parametrize("kind", ["processes", "made ahead"])
def test_an_exception_that_nobody_catches(kind: str) -> None:
    loader = LOADERS[kind].replace("Slow(", "kinds.Fetching(")
    done = _run(f"for batch in {loader}:\n    1 / 0")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.strip().endswith("ZeroDivisionError: division by zero")
