"""PyTorch's threads are let go while the loop waits for workers that want their cores."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hasten.devices import runtime
from hasten.feed import resting
from hasten.feed.resting import Rest


class World:
    """A clock of the test's own, and how often threads were let go."""

    def __init__(self) -> None:
        self.now = 0.0
        self.released = 0

    def clock(self) -> float:
        return self.now

    def release(self) -> None:
        self.released += 1

    def waiting(self, seconds: float) -> Callable[[], str]:
        def wait() -> str:
            self.now += seconds
            return "done"

        return wait


def test_threads_are_let_go_before_waits_that_use_to_be_long() -> None:
    world = World()
    rest = Rest(2, world.release, world.clock)
    assert rest.during(world.waiting(0.016)) == "done"
    assert world.released == 0, "nothing is known before the first"
    for _ in range(3):
        rest.during(world.waiting(0.016))
    assert world.released == 3
    for _ in range(9):
        rest.during(world.waiting(0.0005))
    assert world.released == 6, "short ones are not worth it"


def test_a_wait_that_fails_is_a_wait() -> None:
    world = World()
    rest = Rest(2, world.release, world.clock)

    def fail() -> None:
        world.now += 1.0
        raise TimeoutError

    for _ in range(2):
        with pytest.raises(TimeoutError):
            rest.during(fail)
    assert world.released == 1


@pytest.mark.parametrize(
    ("threads", "workers", "cores", "wanted"),
    [(2, 2, 2, True), (2, 1, 2, False), (1, 8, 2, False), (8, 4, 8, True), (4, 4, 8, False)],
)
def test_only_where_they_stand_in_the_workers_way(
    threads: int, workers: int, cores: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(runtime, "cores", lambda: cores)
    monkeypatch.setattr(resting, "releasing", lambda: World().release)
    assert (resting._release_for(workers) is not None) == wanted


SCRIPT = """
    import os, sys, threading
    import torch
    from hasten.feed import Loader, resting

    torch.set_num_threads(2)
    count = lambda: len(os.listdir("/proc/self/task"))
    values = torch.arange(1 << 20, dtype=torch.float32)
    expected = (values / 3).sum()  # a parallel region
    there = count()
    release = resting.releasing()
    assert (release is not None) == (sys.argv[1] == "here"), release
    if release is not None:
        for _ in range(3):
            release()
            assert count() == there - 1
            assert (values / 3).sum() == expected
            assert count() == there
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU OpenMP of Linux's wheels")
@pytest.mark.parametrize("policy", ["", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_its_threads_end_and_come_again_and_compute_the_same(policy: str) -> None:
    """In a process of its own: the tests' may have a policy, which is left alone."""
    environment = {k: v for k, v in os.environ.items() if k not in resting._POLICIES}
    environment.pop("OMP_NUM_THREADS", None)
    if policy:
        environment[policy] = "2000" if policy == "GOMP_SPINCOUNT" else "passive"
    source = str(Path(resting.__file__).parents[2])
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), "left" if policy else "here"]
    subprocess.run(script, env={**environment, "PYTHONPATH": source}, check=True, timeout=120)
