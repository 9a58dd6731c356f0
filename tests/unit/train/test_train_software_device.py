"""Training on an accelerator made of software: all meets on it, and no step reads it back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from train_helpers import QUIET, mlp, points, sgd

import hasten
import warm

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = warm.run(
        [sys.executable, str(HERE / "software_device.py")],
        env=os.environ | {"PYTHONPATH": str(HERE), "HASTEN_CACHE_DIR": "off"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("case", ["plain", "all"])
def test_losses_are_the_cpus_and_no_step_reads_the_device(found: dict[str, Any], case: str):
    assert found[case] == {"same": True, "read": [], "where": ["soft:0"]}


def test_a_log_point_reads_once(found: dict[str, Any]):
    assert found["logged"]["same"]
    assert len(found["logged"]["read"]) == 3  # one after each of the three steps watched


def test_a_loop_of_ones_own(found: dict[str, Any]):
    assert found["own"]["where"] == ["soft:0"] and found["own"]["read"] == []
    hasten.Run(**QUIET)
    run, model = hasten.Run(**QUIET), mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(1):
        for data, labels in run.batches(hasten.Loader(points(), 8, num_workers=0)):
            run.backward(nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
    assert run.history[0].loss == found["own"]["loss"]


def test_a_bad_loss_is_placed_right(found: dict[str, Any]):
    assert found["bad"]["step"] == 7
    assert "batch[0]: float32 [4, 6]" in found["bad"]["text"]
    assert "The data is at fault" in found["bad"]["text"]
