from __future__ import annotations

import contextlib
import io
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from hasten.observe.log import RunLog
from hasten.observe.records import EpochRecord, EventRecord, StepRecord
from hasten.observe.timeline import PHASES
from hasten.observe.verdict import BoundBy

PAGE = (Path(__file__).parents[3] / "docs" / "reports.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    with RunLog(folder) as log:
        log.append(
            EpochRecord(
                epoch=1, step=9, loss=0.25, seconds=3.0, images_per_s=10.0, learning_rate=0.01
            )
        )
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for example in examples:
            exec(compile(example, "reports.md", "exec"), {})
    assert output.getvalue().startswith("1 0.25 None\n")


def test_the_page_names_every_field_phase_and_bound():
    names = {f.name for kind in (StepRecord, EpochRecord, EventRecord) for f in fields(kind)}
    for name in names | set(PHASES):
        assert f"`{name}`" in PAGE, name
    for bound in get_args(BoundBy):
        assert f"| {bound} |" in PAGE, bound
