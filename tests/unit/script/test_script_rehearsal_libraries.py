"""Trainers of other libraries on tiny random models: no error and no warning of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.script.findings import merge
from hasten.script.rehearsal import Request, rehearse
from hasten.script.rules import check_file

LIBRARIES = Path(__file__).parents[2] / "fixtures" / "libraries"


@pytest.mark.parametrize("path", sorted(LIBRARIES.glob("*.py")), ids=lambda path: path.stem)
def test_a_trainer_of_a_library_has_no_error_and_no_warning(path: Path) -> None:
    pytest.importorskip(path.stem.partition("_")[0])
    outcome = rehearse(Request(script=str(path)))
    assert (outcome.ending, outcome.error) == ("finished", "")
    assert outcome.steps >= 6
    joined = merge(check_file(path), outcome.findings)
    assert [f for f in joined if f.severity != "suggestion"] == []


@pytest.mark.fresh
def test_weights_that_safetensors_writes_stay_in_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    script = tmp_path / "saves.py"
    script.write_text(
        "import os, torch\n"
        "from safetensors import safe_open\n"
        "from safetensors.torch import load_file, save_file\n"
        'os.mkdir("weights")\n'
        'save_file({"w": torch.ones(2)}, "weights/w.safetensors")\n'
        'assert load_file("weights/w.safetensors")["w"].sum() == 2\n'
        'with safe_open("weights/w.safetensors", framework="pt") as file:\n'
        '    assert list(file.keys()) == ["w"]\n'
    )
    monkeypatch.chdir(tmp_path)
    outcome = rehearse(Request(script=str(script)))
    assert (outcome.ending, outcome.error) == ("finished", "")
    assert not (tmp_path / "weights").exists()
