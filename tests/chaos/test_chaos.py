"""A part of the faults of chaos.py, short enough for every day; `make chaos` does a hundred.

Each of one process that no other test strikes with: kills at random are those of
test_kill_and_resume.py, signals those of test_train_resume.py and the command line, a second
run that of test_train_lock.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_faults import FAULTS

import warm

ELSEWHERE = {
    *("kill -9", "kill -9 in validation", "SIGTERM", "SIGUSR1", "SIGTERM, twice"),
    "two runs in a folder",
}
SINGLE = [fault.name for fault in FAULTS if not fault.ranks and fault.name not in ELSEWHERE]
RANKS = [f"ranks: {name}" for name in ("kill -9 of one", "kill -9 while saving", "full disk")]
RANKS += ["ranks: SIGTERM or SIGUSR1 to one"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the faults are made by Linux's means"),
]


def chaos(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What was counted, and all that was said."""
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), *options]
    command += ["--seconds", "60", "--json", str(tmp_path / "found.json")]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = warm.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads((tmp_path / "found.json").read_text()), done.stdout


@pytest.mark.parametrize(
    ("faults", "least"),
    [pytest.param(SINGLE, 4, id="one process"), pytest.param(RANKS, 2, id="two ranks")],
)
def test_nothing_is_lost(faults: list[str], least: int, tmp_path: Path) -> None:
    only = [word for name in faults for word in ("--only", name)]
    found, said = chaos(tmp_path, *only, "--trials", str(len(faults)))
    assert found["lost"] == [], said
    assert found["survived"] >= least, said


@pytest.mark.parametrize(
    ("sabotage", "fault", "word"),
    [
        ("no flush", "power cut", "was saved"),
        ("begun anew", "kill -9 while saving", "it began anew"),
        ("no optimizer", "kill -9 while saving", "differs: model, optimizer"),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    sabotage: str, fault: str, word: str, tmp_path: Path
) -> None:
    found, said = chaos(tmp_path, "--sabotage", sabotage, "--only", fault, "--trials", "2")
    assert any(word in text for text in found["lost"]), said
