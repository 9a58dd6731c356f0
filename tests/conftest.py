"""Police leaks: a test that leaves anything behind, or a process group, fails."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator

import pytest

import leaks

# Before torch loads its OpenMP: see docs/notes/001-threads-that-spin.md.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

leaks.note_children()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = leaks.Before()
    yield
    left = before.left()
    assert not left, "left behind: " + "; ".join(f"{kind} {what}" for kind, what in left.items())
    distributed = __import__("torch").distributed
    assert not (distributed.is_available() and distributed.is_initialized()), (
        "a process group was left initialised"
    )


@pytest.fixture
def refuse_forks(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, it has no process be started any more, as where the system allows for no more."""
    before = leaks.files()

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    yield lambda: monkeypatch.setattr(os, "fork", refused)
    gc.collect()
    for number, target in leaks.files().items():
        if number not in before and target.startswith("pipe:"):
            os.close(number)  # multiprocessing makes them before it forks, and forgets (3.11)
