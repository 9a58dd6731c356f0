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
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_IMPORTED = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.run"),
    *("hasten.cli.app", "hasten.simulate", "hasten.script.rehearsal.child"),
)
_WRITES_NO_BYTECODE, _TELLS_CRASHES = "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER"

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
                start_new_session=True,
            )
        _server = process, ours
        atexit.register(_end)
    return _server[1]


def _end() -> None:
    assert _server is not None
    _server[1].close()
    _server[0].wait()


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` for a program in Python."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        preexec, close_fds, pass_fds, folder, environment, _, _, shell, *rest = rest
        streams = rest[:6]
        fit = args[0] == sys.executable and executable in (None, args[0]) and close_fds
        assert fit and not (preexec or pass_fds or shell), "this is for subprocess"
        asked = {
            "arguments": [os.fspath(arg) for arg in args[1:]],
            "folder": str(Path.cwd() if folder is None else folder),
            "environment": dict(os.environ if environment is None else environment),
        }
        text = json.dumps(asked).encode()
        given = [n if each == -1 else each for n, each in enumerate((*streams[:1], *streams[3::2]))]
        self._line, theirs = socket.socketpair()
        try:
            with theirs, _lock:
                socket.send_fds(_started(), [b"\n"], [theirs.fileno()])
            socket.send_fds(self._line, [len(text).to_bytes(8, "big")], given)
            self._line.sendall(text)
            self.pid = self._told()
        except BaseException:
            self._line.close()
            raise
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]
        unfinished.add(self.pid)

    def _told(self) -> int:
        text = b""
        while not text.endswith(b"\n"):
            more = self._line.recv(1)
            if not more:
                raise ChildProcessError("the process that is forked for programs has ended")
            text += more
        return int(text)

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


def subprocesses() -> SimpleNamespace:
    """What stands for the module `subprocess` where another one starts Python by it."""
    return SimpleNamespace(**vars(subprocess) | {"Popen": Popen, "run": run})


# --- the process that is forked -------------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each that asks; returns, in the fork, what it is to be."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
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
                return _become(line)
            running[os.pidfd_open(pid)] = pid, line


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
    _take_environment(asked["environment"])
    _open_streams()
    # What a fresh process draws for itself.
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    return asked


def _take_environment(environment: dict[str, str]) -> None:
    names = {name for name in environment.keys() | os.environ.keys() if name.startswith("PYTHON")}
    names -= {_WRITES_NO_BYTECODE, _TELLS_CRASHES, "PYTHONUNBUFFERED"}
    wrong = {name for name in names if environment.get(name) != os.environ.get(name)}
    assert not wrong, f"{wrong} are read when Python starts: this is for subprocess"
    threads = environment.get("OMP_NUM_THREADS")
    if threads != os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads) if threads else os.cpu_count() or 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get(_WRITES_NO_BYTECODE))
    if environment.get(_TELLS_CRASHES):
        import faulthandler

        faulthandler.enable()


def _open_streams() -> None:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
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


def _prepare(asked: dict[str, Any]) -> tuple[str, ModuleType]:
    """Make an empty program of this process; what is to run in it."""
    how, *arguments = asked["arguments"]
    sys.modules["hasten tests: warm"] = sys.modules["__main__"]  # else its names are taken from it
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    if how == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[1:]]
    elif how == "-m":
        sys.path[0], sys.argv = asked["folder"], arguments
    else:
        assert not how.startswith("-"), f"{how}: this is for subprocess"
        sys.path[0], sys.argv = str(Path(how).resolve().parent), [how, *arguments]
        module.__file__ = how
    return how, module


if __name__ == "__main__":
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    _how, _module = _prepare(_asked)
    # Here, so that Python itself meets what comes out of it.
    if _how == "-c":
        exec(_asked["arguments"][1], _module.__dict__)
    elif _how == "-m":
        runpy._run_module_as_main(_asked["arguments"][1])  # type: ignore[attr-defined]
    else:
        exec(compile(Path(_how).read_bytes(), _how, "exec"), _module.__dict__)
