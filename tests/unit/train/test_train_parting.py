"""A process ends when gloo's threads have put away what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.train import parting


class Threads:
    """Those of a process, which go on while it sleeps."""

    def __init__(self, folder: Path, *states: str) -> None:
        self.folder, self.states, self.slept = folder, list(states), 0.0
        self._show("S")

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if self.states:
            self._show(self.states.pop(0))

    def clock(self) -> float:
        return self.slept

    def _show(self, state: str) -> None:
        for number, (name, its) in enumerate(
            [("pt_gloo_runloop", "S"), ("pt_gloo_runloop", state), ("python (main)", "R")]
        ):
            (self.folder / str(number)).mkdir(exist_ok=True)
            (self.folder / str(number) / "stat").write_text(f"{number} ({name}) {its} 1 2 3")


@pytest.mark.parametrize(
    ("states", "pauses"),
    [([], 2), (["R", "R", "S"], 4), (["S", "R", "S", "S"], 4), (["D", "S"], 3)],
)
def test_busy_threads_of_gloo_are_waited_for(
    states: list[str], pauses: int, tmp_path: Path
) -> None:
    threads = Threads(tmp_path, *states)
    parting.settle(tmp_path, threads.sleep, threads.clock)
    assert threads.slept == pytest.approx(pauses * 0.005)


def test_one_that_stays_busy_is_not_waited_for_without_end(tmp_path: Path) -> None:
    threads = Threads(tmp_path, *["R"] * 10_000)
    parting.settle(tmp_path, threads.sleep, threads.clock)
    assert threads.slept == pytest.approx(2.0, rel=0.01)


def test_where_no_threads_are_shown_it_is_a_pause(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    parting.settle(tmp_path / "none", threads.sleep, threads.clock)
    assert threads.slept > 0
