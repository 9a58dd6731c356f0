"""Starts programs in Python as forks of a process that has torch imported, two seconds sooner each.

`Popen` and `run` are those of `subprocess` for commands that begin with this Python and go on with
`-c`, `-m` or a file. Each program is a process of its own, as it would be otherwise, with its own
arguments, variables, folder, streams and end, and in a session of its own. It finds modules
imported that it would have imported itself, or left alone. What looks at that, or at how it was
started, is for `subprocess`.

The process that is forked has no thread and has run nothing. It ends with the one that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

_IMPORTED = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.run"),
    *("hasten.cli.app", "hasten.simulate", "hasten.script.rehearsal.child"),
)
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_FORKS_RANKS = "HASTEN_TESTS_FORK_RANKS"
_WRITES_NO_BYTECODE, _TELLS_CRASHES = "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER"


def _path_of(environment: Mapping[str, str]) -> list[str]:
    parts = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(part).absolute()) for part in parts if part]


_PATH = _path_of(os.environ)

unfinished: set[int] = set()
"""Programs that were started and not waited for: what a test leaves of them is a leak."""

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def lasting() -> tuple[int | None, int | None]:
    """The process that is forked, and the descriptor to it; kept for the life of this one."""
    return (None, None) if _server is None else (_server[0].pid, _server[1].fileno())


def _started() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_PATH)},
                start_new_session=True,
            )
        _server = process, ours
        atexit.register(_end)
    return _server[1]


def _end() -> None:
    assert _server is not None
    _server[1].close()
    _server[0].wait()


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A program that a process is asked to fork for."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        preexec, close_fds, pass_fds, folder, environment, _, _, shell, *rest = rest
        fit = args[0] == sys.executable and executable in (None, args[0]) and close_fds
        assert fit and not (preexec or pass_fds or shell), "this is for subprocess"
        asked = {
            "arguments": [os.fspath(arg) for arg in args[1:]],
            "folder": str(Path.cwd() if folder is None else folder),
            "environment": dict(os.environ if environment is None else environment),
        }
        text = json.dumps(asked).encode()
        pipes = rest[:6]
        inner = (pipes[0], pipes[3], pipes[5])  # where -1 is the stream of this process
        given = [number if each == -1 else each for number, each in enumerate(inner)]
        self._line, theirs = socket.socketpair()
        try:
            with theirs, _lock:
                socket.send_fds(self._forker(), [b"\n"], [theirs.fileno()])
            socket.send_fds(self._line, [len(text).to_bytes(8, "big")], given)
            self._line.sendall(text)
            self.pid = self._told()
        except BaseException:
            self._line.close()
            raise
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._begun()

    def _forker(self) -> socket.socket:
        """Where to ask."""
        raise NotImplementedError

    def _begun(self) -> None:
        """It runs."""
        raise NotImplementedError

    def _told(self) -> int:
        text = b""
        while not text.endswith(b"\n"):
            more = self._line.recv(1)
            if not more:
                raise ChildProcessError("the process that is forked for programs has ended")
            text += more
        return int(text)


class Popen(_Forked):
    """`subprocess.Popen` for a program in Python."""

    def _forker(self) -> socket.socket:
        return _started()

    def _begun(self) -> None:
        unfinished.add(self.pid)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._line], [], [], 0)[0]:
            return 0, 0
        status = self._told()
        self._line.close()
        unfinished.discard(self.pid)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:  # type: ignore[override]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: list[str], *, capture_output: bool = False, timeout: float | None = None,
    check: bool = False, **how: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run`."""
    if capture_output:
        how.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(command, **how) as process:
        try:
            said, told = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, said, told)
    if check:
        done.check_returncode()
    return done


if sys.platform != "linux":  # what tells of an end, and much that is tested, is Linux's
    Popen, run = subprocess.Popen, subprocess.run  # type: ignore[misc,assignment]


def forking_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a launcher that was forked forks its ranks, too.

    They are its children, as ever; by their variables and command, as the system tells them, they
    are copies of the process that was forked.
    """
    return {**environment, _FORKS_RANKS: "1"}


def subprocesses() -> SimpleNamespace:
    """What stands for the module `subprocess` where another one starts Python by it."""
    return SimpleNamespace(**vars(subprocess) | {"Popen": Popen, "run": run})


# --- the process that is forked -------------------------------------------------------------------


def _serve(control: socket.socket, *, for_parent: bool = False) -> dict[str, Any]:
    """Fork for each that asks; returns, in the fork, what it is to be.

    Args:
        control: where they ask.
        for_parent: forks are to be children of this process's parent.
    """
    running: dict[int, tuple[int, socket.socket]] = {}  # by what tells of the end
    while True:
        for ready in select.select([control, *running], [], [])[0]:
            if ready in running:
                pid, line = running.pop(ready)
                os.close(ready)
                status = os.waitpid(pid, 0)[1]
                with line, contextlib.suppress(OSError):  # nobody waits for it
                    line.sendall(b"%d\n" % status)
                continue
            word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                os._exit(0)
            line = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if not pid:
                control.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    other.close()
                if for_parent:
                    _be_given_away()
                return _become(line)
            if for_parent:
                os.waitpid(pid, 0)
                line.close()
                continue
            running[os.pidfd_open(pid)] = pid, line


def _be_given_away() -> None:
    """Go on in a fork whose parent has ended."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)


def _become(line: socket.socket) -> dict[str, Any]:
    with line:
        head, streams, _, _ = socket.recv_fds(line, 8, 3)
        left = int.from_bytes(head, "big")
        text = b""
        while len(text) < left:
            text += line.recv(left - len(text))
        os.setsid()
        line.sendall(b"%d\n" % os.getpid())
    asked: dict[str, Any] = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.chdir(asked["folder"])
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]  # where new processes look for a file
    _take_environment(asked["environment"])
    _open_streams(at_once="-u" in asked["arguments"][:1])
    return asked


def _take_environment(environment: dict[str, str]) -> None:
    names = {name for name in environment.keys() | os.environ.keys() if name.startswith("PYTHON")}
    names -= {"PYTHONPATH", _WRITES_NO_BYTECODE, _TELLS_CRASHES, "PYTHONUNBUFFERED"}
    wrong = {name for name in names if environment.get(name) != os.environ.get(name)}
    assert not wrong, f"{wrong} are read when Python starts: this is for subprocess"
    sys.path[1:] = [folder for folder in sys.path[1:] if folder not in _path_of(os.environ)]
    sys.path[1:1] = _path_of(environment)
    import numpy
    import torch

    threads = environment.get("OMP_NUM_THREADS")
    if threads != os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    os.environ.clear()
    os.environ.update(environment)
    # What a fresh process draws for itself.
    numpy.random.seed()
    torch.default_generator.seed()
    sys.dont_write_bytecode = bool(environment.get(_WRITES_NO_BYTECODE))
    if environment.get(_TELLS_CRASHES):
        import faulthandler

        faulthandler.enable()


def _open_streams(*, at_once: bool = False) -> None:
    at_once = at_once or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        file: Any = io.FileIO(number, "w" if number else "r", closefd=False)
        if not number or not at_once:
            file = io.BufferedWriter(file) if number else io.BufferedReader(file)
        stream = io.TextIOWrapper(
            file,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=number == 2 or file.isatty(),
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _prepare(arguments: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """Make an empty program of this process; the code to run, and in what names."""
    at = next(n for n, word in enumerate(arguments) if word != "-u")
    how, *rest = arguments[at:]
    module = sys.modules["__main__"] = ModuleType("__main__")
    names = module.__dict__
    names["__builtins__"] = __builtins__
    if how == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        return compile(rest[0], "<string>", "exec"), names
    if how == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), rest
        text = f"runpy._run_module_as_main({rest[0]!r})"
        return compile(text, "<frozen runpy>", "exec"), {"runpy": runpy}
    assert not how.startswith("-"), f"{how}: this is for subprocess"
    sys.path[0], sys.argv = str(Path(how).resolve().parent), [how, *rest]
    module.__file__ = how
    return compile(Path(how).read_bytes(), how, "exec"), names


# --- ranks ----------------------------------------------------------------------------------------


class _Rank(_Forked):
    """What a launcher starts: a child of it, as ever."""

    asked_at: socket.socket

    def _forker(self) -> socket.socket:
        return self.asked_at

    def _begun(self) -> None:
        self._line.close()


def _fork_ranks() -> dict[str, Any] | None:
    """Have this process, a launcher from now on, fork its ranks from a copy of how it is now.

    Returns:
        In a rank, what it is to be.
    """
    import ctypes

    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    _Rank.asked_at, theirs = socket.socketpair()
    if not os.fork():
        os.setsid()
        _Rank.asked_at.close()
        return _serve(theirs, for_parent=True)
    theirs.close()
    # The copy's children's children are this process's once their parents have ended.
    assert ctypes.CDLL(None, use_errno=True).prctl(_ADOPT, 1, 0, 0, 0) == 0
    subprocess_handler.Popen = _Rank
    return None


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if os.environ.pop(_FORKS_RANKS, None):
        _asked = _fork_ranks() or _asked
    _code, _names = _prepare(_asked["arguments"])
    exec(_code, _names)  # here: Python itself meets what comes out, and no function is around it
