"""Police leaks: a test that leaves a thread, a process, a variable or a process group fails."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

import pytest

# Before torch loads its OpenMP: see docs/notes/001-threads-that-spin.md.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Threads that libraries keep for the life of the process, by the start of their names.
_LASTING_THREADS = ("pydevd", "ThreadPoolExecutor-tqdm", "IPython", "asyncio_")
# Variables that pytest and torch's compiler set for themselves.
_SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(_LASTING_THREADS)}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    threads, environment = _threads(), dict(os.environ)
    yield
    deadline = time.monotonic() + 5  # a thread told to stop may still be on its way out
    while time.monotonic() < deadline and (
        _threads() - threads or multiprocessing.active_children()
    ):
        time.sleep(0.01)
    left_threads = _threads() - threads
    left_processes = multiprocessing.active_children()
    changed = {
        key
        for key in (environment.keys() | os.environ.keys()) - _SET_BY_OTHERS
        if environment.get(key) != os.environ.get(key)
    }
    for process in left_processes:
        process.kill()
    assert not left_threads, f"threads left running: {left_threads}"
    assert not left_processes, f"processes left running: {left_processes}"
    assert not changed, f"environment variables left changed: {sorted(changed)}"
    distributed = __import__("torch").distributed
    assert not (distributed.is_available() and distributed.is_initialized()), (
        "a process group was left initialised"
    )
