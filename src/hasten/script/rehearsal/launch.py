"""Starts the process that rehearses a script, waits for it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from hasten.script.rehearsal.child import OUTCOME, REQUEST
from hasten.script.rehearsal.request import Outcome, Request

_GRACE_S = 15.0  # beyond the script's limit: importing torch, and stopping by itself
_TAIL = 200  # lines of the script's output that are kept

# This hasten, wherever it was imported from, without a trace in the script's `sys.path`.
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import hasten; del sys.path[0]; "
    "from hasten.script.rehearsal.child import main; main()"
)
_HOME = str(Path(__file__).resolve().parents[3])


def rehearse(request: Request, *, output: IO[str] | int | None = None) -> Outcome:
    """Run a script in a fresh process on the simulated accelerator.

    Args:
        request: what to run, and for how long.
        output: where the script's own standard output goes; None drops it.

    Raises:
        UsageError: the script cannot be found.
        KeyboardInterrupt: Ctrl-C; the script's processes are ended first.
    """
    folder = Path(tempfile.mkdtemp(prefix="hasten-check-"))
    try:
        (folder / REQUEST).write_text(request.to_json())
        return _run(request, folder, subprocess.DEVNULL if output is None else output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(request: Request, folder: Path, output: IO[str] | int) -> Outcome:
    environment = dict(os.environ)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment.setdefault("MPLBACKEND", "Agg")  # no window waits for somebody to close it
    # A terminal would let a prompt wait for ever; a pipe or a file is the script's to read.
    stdin = subprocess.DEVNULL if sys.stdin is None or _is_terminal() else None
    command = [sys.executable, "-c", _START, str(folder), _HOME]
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=None if output is not subprocess.DEVNULL else subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    stopped = ""
    try:
        process.wait(request.timeout_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        stopped = (
            f"the limit of {request.timeout_s:g} s passed and the script did not stop by itself"
        )
    finally:
        _end(process)
    outcome = _read(folder, process.returncode, stopped)
    if outcome.ending == "died" and process.returncode and not request.as_module:
        # What can be told without running it is told all the same.
        outcome = dataclasses.replace(outcome, files=(request.script,))
    return outcome


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except ValueError:  # closed
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script and every process that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(folder: Path, status: int, stopped: str) -> Outcome:
    path = folder / OUTCOME
    if path.is_file():
        with contextlib.suppress(ValueError):
            return Outcome.from_json(path.read_text())
    if stopped:
        return Outcome(ending="time", said=(stopped,))
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Outcome(
        ending="died",
        error=f"the script's process ended with {how} before anything could be reported",
    )
