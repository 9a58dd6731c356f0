"""Starting processes and threads: quietly, and with a clear word where there can be no more."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hasten.errors import UsageError

_one_at_a_time = threading.Lock()


def _in_child() -> None:
    """The thread that holds it may not be there."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def no_workers_here() -> str:
    """Why this process cannot have worker processes; "" where it can.

    Python lets no daemonic process start any (a worker of a DataLoader, of a `multiprocessing.Pool`
    or of hasten's own): they would outlive it.
    """
    if multiprocessing.current_process().daemon:
        return "this process is daemonic (a worker itself), and may start no processes"
    return ""


def refuse_workers_here(count: int) -> None:
    """Before processes are started that somebody asked for.

    Raises:
        UsageError: this process cannot have any.
    """
    alone = no_workers_here()
    if alone:
        raise UsageError(
            f"{count} worker process{'es' * (count > 1)} cannot be started: {alone}. Leave "
            "num_workers out (or give 0), or make the process that loads with daemon=False"
        )


@contextmanager
def unwarned() -> Iterator[None]:
    """Within, Python (3.12 or later) does not warn that this process has threads and is forked.

    Whoever uses a Loader has not asked for a fork, and cannot do without PyTorch's threads. What
    runs in the child uses no lock that a thread of this process may hold at that moment: none of
    PyTorch's pool, as it computes with one thread, and Python makes its own anew.
    """
    # Filters are of the whole process: two threads at once would put back each other's.
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        yield


@contextmanager
def room_for(what: str, wanted: int) -> Iterator[None]:
    """Within, `what` ("processes", "threads") are started, of which so many are wanted.

    Raises:
        UsageError: there can be no more of them, for a limit of the user, container or machine.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise UsageError(
            f"no more {what} can be started ({error.strerror}), and {wanted} workers were to be: "
            f"{REMEDIES[error.errno]}"
        ) from error
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise UsageError(
            f"no more {what} can be started ({error}), and {wanted} workers were to be: "
            f"{REMEDIES[errno.EAGAIN]}"
        ) from error


_FILES = "use fewer num_workers, or raise the limit of open files (`ulimit -n`)"
REMEDIES = {  # by errno
    errno.EAGAIN: "use fewer num_workers, or raise the limit (`ulimit -u`, pids of the container)",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "use fewer num_workers, or give the process more memory (`ulimit -v`, container)",
}


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits, so that a process forked now does not get it before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_is_there() -> bool:
    """Whether processes can be started that begin as this one is, without its script run again."""
    return "fork" in multiprocessing.get_all_start_methods()
