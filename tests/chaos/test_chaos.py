"""A part of the faults of chaos.py, short enough for every day; `make chaos` does a hundred."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import FAULTS

SINGLE = sum(not fault.ranks for fault in FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="the faults are made by Linux's means")
@pytest.mark.parametrize(
    ("options", "least"),
    [
        pytest.param(["--trials", str(SINGLE)], 4, id="one process"),
        pytest.param(["--only", "ranks", "--trials", "4"], 2, id="two ranks"),
    ],
)
def test_nothing_is_lost(options: list[str], least: int, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), *options]
    command += ["--seconds", "60", "--json", str(tmp_path / "found.json")]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["lost"] == []
    assert found["survived"] >= least, done.stdout
