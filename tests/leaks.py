"""What a test may leave behind: threads, processes, open files, shared memory, variables.

Looked at before and after each test, in a fraction of a millisecond; where something is left, it
gets a moment to go by itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import warm

_PATIENCE_S = 5.0
# Threads that libraries keep for the life of the process, by the start of their names.
_LASTING_THREADS = ("pydevd", "tqdm_monitor", "ThreadPoolExecutor-tqdm", "IPython", "asyncio_")
# Variables that pytest and torch's compiler set for themselves.
_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
# What libraries keep open, by the end of its name: matplotlib its fonts.
_LASTING_FILES = (".ttf", ".otf")
_FILES = Path("/proc/self/fd")
_MEMORY = Path("/dev/shm")

own: set[int] = {os.getpid()}
"""Process ids: of this one, and of those that it has forked, or started by multiprocessing."""


def note_children() -> None:
    """From now on, keep in `own` whom this process starts."""
    fork, start = os.fork, multiprocessing.process.BaseProcess.start

    def forked() -> int:
        child = fork()
        own.add(child or os.getpid())
        return child

    def started(process: Any) -> None:
        start(process)
        own.add(process.pid)

    os.fork = forked
    multiprocessing.process.BaseProcess.start = started  # type: ignore[method-assign]


class Before:
    """How things stand before a test; `left` says what is more afterwards."""

    def __init__(self) -> None:
        self._threads = _threads()
        self._children = _children()
        self._files = files()
        self._memory = _segments()  # anybody's: process ids come again
        self._environment = dict(os.environ)

    def left(self, patience_s: float = _PATIENCE_S) -> dict[str, Any]:
        """What the test has left, by kind; a thread told to stop may still be on its way out.

        Processes that are left are killed.
        """
        found = {
            "threads": self._after(lambda: _threads() - self._threads, patience_s),
            "processes": self._after(lambda: _children() - self._children, patience_s),
            "open files": self._after(self._new_files, patience_s),
            "shared memory": self._after(lambda: _memory() - self._memory, patience_s),
            "environment variables": self._changed(),
        }
        for child in found["processes"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        multiprocessing.active_children()  # waits for its own that have ended
        return {kind: what for kind, what in found.items() if what}

    @staticmethod
    def _after(look: Callable[[], Any], patience_s: float) -> Any:
        found = look()
        if not found:
            return found
        gc.collect()
        multiprocessing.active_children()
        deadline = time.monotonic() + patience_s
        while (found := look()) and time.monotonic() < deadline:
            time.sleep(0.01)
            multiprocessing.active_children()
        return found

    def _new_files(self) -> dict[int, str]:
        lasting = _lasting_files()
        return {
            number: target
            for number, target in files().items()
            if self._files.get(number) != target
            and number not in lasting
            and not target.endswith(_LASTING_FILES)
        }

    def _changed(self) -> list[str]:
        before, now = self._environment, os.environ
        names = (before.keys() | now.keys()) - _SET_BY_OTHERS
        return sorted(name for name in names if before.get(name) != now.get(name))


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(_LASTING_THREADS)}


def files() -> dict[int, str]:
    """Of each open descriptor, what it is of; nothing where the system does not tell."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_FILES):  # noqa: PTH208 - hot
            with contextlib.suppress(OSError):  # that of the listing itself, closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - hot
    return found


def _lasting_files() -> set[int | None]:
    """Of the servers that multiprocessing and the tests keep for the life of the process."""
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    return {tracker._fd, server._forkserver_alive_fd, warm.lasting()[1]}


def _children() -> set[int]:
    """Processes that this one has started, however, and that run or have not been waited for."""
    return _own_children() | warm.unfinished


def _own_children() -> set[int]:
    global _others
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (AttributeError, ChildProcessError):  # there are none, which is usual
        return set()
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    me, found, others = os.getpid(), set(), set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot
        if not name.isdecimal():
            continue
        if name in _others:
            others.add(name)
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == me:
            found.add(int(name))
        else:
            others.add(name)
    _others = others
    return found - {tracker._pid, server._forkserver_pid, warm.lasting()[0]}


_others: set[str] = set()
"""Process ids, as written, that were seen to be somebody else's."""


def _segments() -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(_MEMORY))  # noqa: PTH208 - hot
    return set()


def _memory() -> set[str]:
    """Segments of this process, or of ones that it started: torch_PID_…, and of hasten's feed.

    Other programs' come and go as they like.
    """
    found = set()
    for name in _segments():
        if name.startswith("torch_"):
            whose = name.split("_")[1]
            if whose.isdecimal() and int(whose) in own:
                found.add(name)
        elif name.startswith("hasten-feed-"):
            found.add(name)
    return found
