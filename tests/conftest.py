"""Police leaks: a test that leaves anything behind, or a process group, fails."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
