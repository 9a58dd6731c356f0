"""What `conftest.py` holds every test to: each kind of leak is seen, and nothing else is."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leaks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Undo = Callable[[], Any]


def a_file(folder: Path) -> Undo:
    number = os.open(folder / "file", os.O_CREAT | os.O_RDWR)
    return lambda: os.close(number)


def a_pipe(folder: Path) -> Undo:
    ends = os.pipe()
    return lambda: [os.close(end) for end in ends]


def a_socket(folder: Path) -> Undo:
    return socket.socket().close


def a_forked_child(folder: Path) -> Undo:
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    return lambda: os.waitpid(child, 0)


def a_program(folder: Path) -> Undo:
    program = subprocess.Popen(["sleep", "100"])
    return program.wait


def a_child_that_nobody_waited_for(folder: Path) -> Undo:
    child = os.fork()
    if child == 0:
        os._exit(0)
    return lambda: os.waitpid(child, 0)


def a_process(folder: Path) -> Undo:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    process.start()

    def undo() -> None:
        process.join()
        process.close()

    return undo


def a_thread(folder: Path) -> Undo:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()

    def undo() -> None:
        end.set()
        thread.join()

    return undo


def a_segment(folder: Path) -> Undo:
    path = Path(f"/dev/shm/torch_{os.getpid()}_leak")
    path.touch()
    return path.unlink


def a_segment_of_a_worker(folder: Path) -> Undo:
    worker = multiprocessing.get_context("fork").Process(target=print)
    worker.start()
    path = Path(f"/dev/shm/torch_{worker.pid}_leak")
    path.touch()
    worker.join()
    worker.close()
    return path.unlink


def a_variable(folder: Path) -> Undo:
    os.environ["HASTEN_LEAK"] = "1"
    return lambda: os.environ.pop("HASTEN_LEAK")


@pytest.mark.parametrize(
    ("leak", "kind"),
    [
        (a_file, "open files"),
        (a_pipe, "open files"),
        (a_socket, "open files"),
        (a_forked_child, "processes"),
        (a_program, "processes"),
        (a_child_that_nobody_waited_for, "processes"),
        (a_process, "processes"),
        (a_thread, "threads"),
        (a_segment, "shared memory"),
        (a_segment_of_a_worker, "shared memory"),
        (a_variable, "environment variables"),
    ],
)
def test_each_kind_is_seen_until_it_is_undone(leak: Any, kind: str, tmp_path: Path) -> None:
    before = leaks.Before()
    undo = leak(tmp_path)
    try:
        left = before.left(patience_s=0)
    finally:
        undo()
    assert kind in left
    assert before.left() == {}


def test_what_was_there_before_is_no_leak(tmp_path: Path) -> None:
    undo = [leak(tmp_path) for leak in (a_file, a_forked_child, a_thread, a_segment, a_variable)]
    pid = max(leaks._children())
    try:
        assert leaks.Before().left(patience_s=0) == {}
    finally:
        os.kill(pid, 9)
        for step in undo:
            step()


def test_what_goes_by_itself_is_waited_for() -> None:
    before = leaks.Before()
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    assert before.left() == {}
    assert not thread.is_alive()


def test_segments_of_other_programs_are_theirs(tmp_path: Path) -> None:
    before = leaks.Before()
    path = Path(f"/dev/shm/torch_{os.getppid()}_leak_test")
    path.touch()
    try:
        assert before.left(patience_s=0) == {}
    finally:
        path.unlink()


def test_segments_of_a_process_that_had_the_same_id_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_MEMORY", tmp_path)
    monkeypatch.setattr(leaks, "own", {os.getpid()})
    (tmp_path / "torch_123_1_0").touch()
    before = leaks.Before()
    leaks.own.add(123)
    assert "shared memory" not in before.left(0)
    (tmp_path / "torch_123_2_0").touch()
    assert before.left(0)["shared memory"] == {"torch_123_2_0"}


def test_a_test_that_leaks_fails(tmp_path: Path) -> None:
    for name in ("conftest.py", "leaks.py", "warm.py"):
        shutil.copy(Path(__file__).parents[1] / name, tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os\n\n"
        "def test_clean(): pass\n\n"
        "def test_leaking(): os.open('test_it.py', os.O_RDONLY)\n\n"
        "def test_next(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed, 1 error" in done.stdout
    assert "left behind: open files" in done.stdout
