"""A signal that comes while a thread is waited for ends the waiting, and not the thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import Dataset

from hasten.feed import Loader
from hasten.feed.awaited import Awaited
from hasten.train.background import Background

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals here")


class Rung(Exception):
    """What the handler of an alarm raises."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_it_is_alive_and_can_be_waited_for_again(timeout: float | None) -> None:
    go = threading.Event()
    thread = Awaited(go.wait, name="hasten-test")
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Rung):
        thread.join(timeout)
    assert thread.is_alive()
    thread.join(0.01)
    assert thread.is_alive(), "it was waited for in vain"
    go.set()
    thread.join(timeout)
    assert not thread.is_alive()
    thread.join()


@pytest.mark.usefixtures("alarm")
def test_a_checkpoint_under_way_is_still_under_way() -> None:
    go = threading.Event()
    writer = Background("hasten-test")
    writer.start(lambda: (go.wait(), None)[1])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Rung):
        writer.wait()
    assert writer.busy
    go.set()
    writer.wait()
    assert not writer.busy


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_does_not_wait_for_what_it_has_not() -> None:
    go = threading.Event()
    thread = Awaited(go.wait, name="hasten-test")
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


_ENDS = """
import signal, threading, time
from hasten.train.background import Background

def ring(number, frame):
    raise KeyboardInterrupt

def write():
    started.set()
    time.sleep(1)
    print("written", flush=True)

started = threading.Event()
signal.signal(signal.SIGALRM, ring)
writer = Background("hasten-test")
writer.start(write)
started.wait()
signal.setitimer(signal.ITIMER_REAL, 0.2)
writer.wait()
"""


def test_a_program_that_is_interrupted_ends_after_what_it_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "written\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr


_TRIAL = """
import signal, sys, time
import torch
from torch.utils.data import Dataset
from hasten.feed import Loader, apart

class Computing(Dataset):
    def __init__(self):
        self.rows = torch.randn(64, 300, 300)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return (self.rows[index] @ self.rows[index]).sum()

def ring(number, frame):
    raise KeyboardInterrupt

started = apart.Awaited.start

def start(self):
    started(self)
    signal.setitimer(signal.ITIMER_REAL, 0.03)

apart.Awaited.start = start
apart.measure = lambda *_, **__: [torch.randn(700, 700) @ torch.randn(700, 700) for _ in range(15)]
signal.signal(signal.SIGALRM, ring)
torch.set_num_threads(1)
Loader(Computing(), 4).plan
"""


def test_a_trial_that_is_interrupted_aborts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "trial.py"  # a file: its code is read, and so tried in a thread
    script.write_text(_TRIAL)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "KeyboardInterrupt" in done.stderr
    assert "_by_thread" in done.stderr, "not in a trial"
    assert done.returncode == 130 or done.returncode == -signal.SIGINT, done.stderr


class Slow(Dataset[int]):
    """Some time for each sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2)
        return index


class SlowByKey(Slow):
    def fetch(self, index: int, key: int) -> int:
        return self[index]


@pytest.mark.parametrize(("dataset", "threads"), [(Slow(), 1), (SlowByKey(), 3)])
def test_ctrl_c_while_threads_are_ended_leaves_none_of_them(
    dataset: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, interrupts = Awaited.join, [KeyboardInterrupt()]

    def interrupted(thread: Awaited, timeout: float | None = None) -> None:
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    loader = Loader(dataset, 4, plan="threads", num_workers=threads)
    batches: Any = iter(loader)
    next(batches)
    monkeypatch.setattr(Awaited, "join", interrupted)
    assert _of_the_feed() == threads
    with pytest.raises(KeyboardInterrupt):
        batches.close()
    assert _of_the_feed() == 0
    assert not interrupts


def _of_the_feed() -> int:
    return len([t for t in threading.enumerate() if t.name.startswith("hasten-feed")])
