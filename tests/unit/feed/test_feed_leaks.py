"""Nothing is left behind: no thread, process or shared memory, however an epoch ends.

`conftest.py` fails any test that leaves a thread, a process, an open file or shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest

import warm
from hasten.feed import Loader

PLANS = ["threads", "processes"]


def _busy() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return any(name.startswith("hasten-feed") for name in names) or bool(
        multiprocessing.active_children()
    )


@pytest.mark.parametrize("plan", PLANS)
def test_break(plan: str) -> None:
    loader = Loader(kinds.Fetching(200), 4, plan=plan)
    for _ in loader:
        assert _busy()
        break
    assert not _busy()


@pytest.mark.parametrize("plan", PLANS)
def test_an_exception_in_the_loop(plan: str) -> None:
    loader = Loader(kinds.Fetching(200), 4, plan=plan)
    with pytest.raises(ZeroDivisionError):
        _divide(loader)
    gc.collect()
    assert not _busy()


def _divide(loader: Loader) -> None:
    for _ in loader:
        1 / 0  # noqa: B018


@pytest.mark.parametrize("plan", PLANS)
def test_an_iterator_that_is_dropped_or_closed_with_its_loader(plan: str) -> None:
    with Loader(kinds.Fetching(200), 4, plan=plan) as loader:
        batches = iter(loader)
        next(batches)
        del batches
        gc.collect()
        assert not _busy()
        batches = iter(loader)
        next(batches)
        assert _busy()
    assert not _busy()
    assert list(batches) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_end_by_themselves_where_a_fork_of_somebody_else_holds_their_pipes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminated: list[int] = []
    terminate = multiprocessing.process.BaseProcess.terminate

    def noting(process: Any) -> None:
        terminated.append(process.pid)
        terminate(process)

    loader = Loader(kinds.Fetching(8), 4, num_workers=2, persistent_workers=True)
    list(loader)
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:  # as the worker of another DataLoader: it knows nothing of the pipes it holds
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", noting)
        loader.close()
        assert not terminated
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(holder, 0)


def test_persistent_workers_end_with_the_loader() -> None:
    loader = Loader(kinds.Plain(), 4, num_workers=1, persistent_workers=True)
    list(loader)
    assert _busy()
    loader.close()
    assert not _busy()
    assert len(list(loader)) == 6, "a closed loader can be used again"
    del loader
    gc.collect()
    assert not _busy()


@pytest.mark.parametrize("left", ["break", "error", "dropped"])
def test_persistent_workers_stay_when_an_epoch_is_left(left: str) -> None:
    """They were ended, and started again for each epoch."""
    with Loader(kinds.Plain(), 4, num_workers=2, shuffle=True, persistent_workers=True) as loader:
        expected = list(loader)
        workers = {process.pid for process in multiprocessing.active_children()}
        assert len(workers) == 2
        for _ in range(3):
            loader.set_epoch(0)
            if left == "dropped":
                next(iter(loader))
            else:
                with contextlib.suppress(ZeroDivisionError):
                    for _batch in loader:
                        if left == "break":
                            break
                        raise ZeroDivisionError
            gc.collect()
        loader.set_epoch(0)
        assert kinds.same(list(loader), expected)
        assert {process.pid for process in multiprocessing.active_children()} == workers
        next(iter(loader))
    assert not _busy()


@pytest.mark.parametrize("plan", PLANS)
def test_a_failing_sample(plan: str) -> None:
    class Failing(kinds.Fetching):
        def fetch(self, index: int, key: int) -> Any:
            return 1 / (index - 50)

    loader = Loader(Failing(200), 4, plan=plan)
    with pytest.raises(ValueError, match="sample 50"):
        list(loader)
    gc.collect()
    assert not _busy()


_SCRIPT = """
import sys, threading, time
sys.path.insert(0, {folder!r})
import feed_datasets as kinds
from hasten.feed import Loader

class Slow(kinds.Fetching):
    def fetch(self, index, key):
        time.sleep(0.01)
        return super().fetch(index, key)

loader = Loader(Slow(10_000), 4, {options})
batches = iter(loader)
next(batches)
if {left_open}:
    # Here it is let go of when the modules that it needs have been taken apart already.
    import torch

    torch.kept = [batches, loader]
    del batches, loader
    print("started", flush=True)
    sys.exit(0)
try:
    for number, batch in enumerate(batches):
        if number == 2:
            print("started", flush=True)
except KeyboardInterrupt:
    batches.close()
    print([t.name for t in threading.enumerate() if t.name.startswith("hasten")])
    print("stopped", flush=True)
"""


def _children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("options", ["plan='threads'", "num_workers=2"])
@pytest.mark.parametrize("left_open", [False, True], ids=["ctrl-c", "exit"])
def test_ctrl_c_and_interpreter_exit(options: str, left_open: bool) -> None:
    folder = str(Path(__file__).parent)
    script = _SCRIPT.format(folder=folder, options=options, left_open=left_open)
    process = warm.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        workers = _children(process.pid)
        if not left_open:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        output, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert output == ("" if left_open else "[]\nstopped\n")
    deadline = time.monotonic() + 10
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_alive, workers))
