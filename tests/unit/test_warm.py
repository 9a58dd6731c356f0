"""Programs that are forked are what they would be if they were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import leaks
import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")

TELLS = """
import atexit, os, sys, threading
atexit.register(print, "at its end", flush=True)
def last():
    threading.main_thread().join()
    print("a thread", flush=True)
threading.Thread(target=last).start()
print(__name__, sys.argv, sys.path, os.getcwd(), os.environ.get("WORD"), sys.stdin.read())
print("to the other", file=sys.stderr)
print(sorted(os.listdir("/proc/self/fd")), sys.stdout.line_buffering, sys.stdout.encoding)
"""


def both(command: list[str], read: Path | None = None, **how: object) -> list[tuple[int, str, str]]:
    """What comes of a program that is forked, and of one that is started."""
    found = []
    for run in (warm.run, subprocess.run):
        with Path(read or os.devnull).open() as file:
            how |= {"stdin": file, "capture_output": True, "text": True}
            done = run([sys.executable, *command], **how)  # type: ignore[operator]
        found.append((done.returncode, done.stdout, done.stderr))
    return found


def test_a_text_a_file_and_a_module_run_as_they_do_otherwise(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TELLS)
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"WORD": "one of its own", "PYTHONPATH": paths}
    for command in (["-c", TELLS, "-x", "1"], ["program.py", "2"], ["-m", "program", "3"]):
        forked, started = both(command, program, cwd=tmp_path, env=environment)
        assert forked == started
        assert all(word in forked[1] for word in ("one of its own", "import atexit", "at its end"))


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(5)",
        "raise SystemExit('a word')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import os; print('not flushed'); os.abort()",
        "import sys; sys.excepthook = lambda *error: print('caught', error[0]); 1 / 0",
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('^C')",
    ],
)
def test_it_ends_as_it_does_otherwise(text: str) -> None:
    forked, started = both(["-c", text])
    assert forked == started


def test_an_error_is_told_and_the_next_program_knows_nothing_of_it() -> None:
    done = warm.run(
        [sys.executable, "-c", "import torch\ntorch.add = None\nraise ValueError('why it failed')"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: why it failed"
    warm.run([sys.executable, "-c", "import torch; torch.add(1, 2)"], check=True)


def test_one_that_hangs_is_ended_alone() -> None:
    hangs = [sys.executable, "-c", "print('it began', flush=True); import time; time.sleep(900)"]
    with warm.Popen(hangs, stdout=subprocess.PIPE, text=True) as other:
        with pytest.raises(subprocess.TimeoutExpired) as passed:
            warm.run(hangs, capture_output=True, timeout=1.0)
        assert passed.value.stdout == b"it began\n"
        assert other.stdout is not None and other.stdout.readline() == "it began\n"
        assert other.poll() is None
        other.send_signal(signal.SIGTERM)
        assert other.wait(60) == -signal.SIGTERM


def test_one_that_is_left_is_a_leak() -> None:
    before = leaks.Before()
    process = warm.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    left = before.left(patience_s=0)
    assert left["processes"] == {process.pid}
    assert process.wait(60) == -signal.SIGKILL
    assert before.left() == {}


def test_what_only_a_start_takes_in_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("PYTHONOPTIMIZE", "PYTHONWARNINGS"):
        done = warm.run([sys.executable, "-c", ""], env=os.environ | {name: "other"})
        assert done.returncode == 1
        assert f"{{'{name}'}} are read when Python starts" in capfd.readouterr().err
    with pytest.raises(AssertionError, match="for subprocess"):
        warm.run(["true"])


def test_threads_are_those_of_its_variables() -> None:
    text = "import torch; print(torch.get_num_threads())"
    for threads in ("1", "2"):
        forked, started = both(["-c", text], env=os.environ | {"OMP_NUM_THREADS": threads})
        assert forked == started == (0, f"{threads}\n", "")


def test_no_two_draw_the_same_numbers() -> None:
    text = "import numpy, random, torch; print(torch.rand(1), numpy.random.rand(), random.random())"
    command = [sys.executable, "-c", text]
    one, other = (warm.run(command, capture_output=True).stdout.split() for _ in range(2))
    assert not set(one) & set(other)


def test_the_process_that_is_forked_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    text = (
        "import sys, warm\n"
        "warm.run([sys.executable, '-c', ''], check=True)\n"
        "print(warm.lasting()[0], flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=Path(warm.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    number = int(done.stdout)
    left = [psutil.Process(number)] if psutil.pid_exists(number) else []
    assert psutil.wait_procs(left, timeout=60)[1] == []


RANKS = """
import atexit, os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
atexit.register(Path(sys.argv[1], f"left-{rank}").touch)
tries = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("start", tries, rank, __name__, os.getpid() == os.getsid(0), file=sys.stderr)
if tries == 0 and rank == "0":
    time.sleep(60)
if tries == 0:
    raise KeyError("what it fails with")
Path(sys.argv[1], f"done-{rank}").touch()
"""


def test_ranks_that_a_launcher_forks_fail_are_told_of_and_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = warm.run(
        [sys.executable, *launcher, "--max-restarts=1", "ranks.py", str(tmp_path)],
        cwd=tmp_path,
        env=warm.forking_ranks(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for start in ("0 0", "0 1", "1 0", "1 1"):
        assert done.stderr.count(f"start {start} __main__ True\n") == 1
    assert done.stderr.count("KeyError: 'what it fails with'\n") == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ranks.py", "left-0", "left-1", "done-0", "done-1"}


@pytest.mark.parametrize("how", ["-c", "-m", "file"])
def test_no_function_is_around_it(how: str, tmp_path: Path) -> None:
    """A rehearsal names the calls that led to a line, and would name one."""
    text = "import inspect\nprint([f.function for f in inspect.stack() if 'warm' in f.filename])\n"
    program = tmp_path / "program.py"
    program.write_text(text)
    command = {"-c": ["-c", text], "-m": ["-m", "program"], "file": [str(program)]}[how]
    done = warm.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "['<module>']\n", done.stderr
