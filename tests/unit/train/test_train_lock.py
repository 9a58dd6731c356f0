"""Two runs in one folder are refused; a dead one's lock is not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_helpers import INTERRUPT, Hook, loader, trainer

import warm
from hasten.errors import HastenError, Interrupted, UsageError
from hasten.train import result, weights
from hasten.train.lock import NAME, FolderLock, refuse_living

_HOLDER = """
import sys, time, pathlib
from hasten.train.lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""


def holder(folder: Path) -> subprocess.Popen[bytes]:
    process = warm.Popen([sys.executable, "-c", _HOLDER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        for take in (FolderLock, refuse_living):
            with pytest.raises(UsageError, match=f"under way in {tmp_path} .process {process.pid}"):
                take(tmp_path)
    finally:
        end(process)
    refuse_living(tmp_path)
    assert (tmp_path / NAME).exists()  # left by the kill
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert not (tmp_path / NAME).exists()


def test_a_second_run_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()


def test_a_forked_worker_does_not_hold_it_on(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys, time\n"
        "from hasten.train.lock import FolderLock\n"
        "lock = FolderLock(pathlib.Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    time.sleep(120)\n"
        "time.sleep(0.2)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = warm.run([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    child = int(done.stdout)
    try:
        FolderLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_without_a_word_in_it_is_still_a_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / NAME).write_text("?")
        with pytest.raises(UsageError, match="another process"):
            FolderLock(tmp_path)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "run" / NAME).symlink_to(tmp_path / "outside")
    with pytest.raises(HastenError, match="it is a link"):
        FolderLock(tmp_path / "run")
    assert (tmp_path / "outside").read_text() == "mine"


def test_a_removed_folder_is_noticed(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        assert lock.in_place
        (tmp_path / NAME).unlink()
        assert not lock.in_place
        with FolderLock(tmp_path):  # another run has come in its place
            lock.release()
            assert (tmp_path / NAME).exists()


def test_a_run_locks_its_folder_and_gives_it_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said: list[str] = []

    def second() -> None:
        for resume in (True, False):
            with pytest.raises(UsageError) as error:
                trainer(folder=folder, resume=resume).fit(loader(), epochs=2)
            said.append(str(error.value))

    trainer(loss=Hook(7, second), folder=folder).fit(loader(), epochs=2)
    assert "a run is under way in" in said[0]
    assert "holds a run already" in said[1]
    assert not (folder / NAME).exists()
    trainer(folder=folder, resume=True).fit(loader(), epochs=3)


def test_the_lock_is_given_free_by_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer(loss=Hook(7, fail), folder=tmp_path / "run").fit(loader(), epochs=2)
    FolderLock(tmp_path / "run").release()


def test_what_is_written_last_is_written_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    refused: list[str] = []

    def refusing(name: str, real: Any) -> Any:
        def write(*given: Any) -> Any:
            with pytest.raises(UsageError, match="a run is under way in"):
                trainer(folder=folder, resume=True).fit(loader(), epochs=3)
            refused.append(name)
            return real(*given)

        return write

    monkeypatch.setattr(weights, "export", refusing("weights", weights.export))
    monkeypatch.setattr(result, "write_report", refusing("report", result.write_report))
    page = refusing("page", lambda known: known)
    trainer(folder=folder).fit(loader(), epochs=2, page=page)
    assert refused == ["page", "weights", "report"]
    refuse_living(folder)

    refused.clear()
    stopped = trainer(folder=folder, resume=True, loss=Hook(7, INTERRUPT))
    with pytest.raises(Interrupted):
        stopped.fit(loader(), epochs=4)
    assert refused == ["report"]
    refuse_living(folder)


def test_a_folder_taken_by_another_run_is_left_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    others: list[FolderLock] = []

    def page(known: Any) -> Any:
        shutil.rmtree(folder)
        folder.mkdir()
        others.append(FolderLock(folder))
        return known

    with pytest.raises(UsageError, match="a run is under way in"):
        trainer(folder=folder).fit(loader(), epochs=1, page=page)
    assert [path.name for path in folder.iterdir()] == [NAME]
    others[0].release()
