"""A real accelerator of a type that hasten has never heard of, made of software."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("private_use_device.py")


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_device_without_operators_is_passed_over_and_said(found):
    assert found["without operators"] == "cpu"
    [warning] = found["warnings"]
    assert "toy:0" in warning and "is passed over" in warning and "NotImplementedError" in warning
    assert "NotImplementedError" in found["problem"]


def test_a_device_with_operators_is_chosen(found):
    assert found["auto"] == "toy:0"
    assert found["named"] == ["toy:0", "toy:0", "toy:0", "cpu"]
    assert "there is no toy:3" in found["absent"] and "toy:0" in found["absent"]


def test_nests_are_moved_there_and_back(found):
    assert found["moved"] == ["toy:0", "toy:0"]
    assert found["stays"] is True
    assert found["back"] == [[1.0, 1.0], [1.0, 1.0]]


def test_mixed_devices_are_found_and_mended(found):
    assert found["same"] == "toy:0"
    assert "batch['x'] is on cpu" in found["mismatch"]
    assert "batch = hasten.move(batch, 'toy:0')" in found["mismatch"]


def test_it_is_described_and_measured(found):
    assert found["described"] == ["toy:0", "cpu"]
    assert found["measured"] == [True, True, "toy:0"]


def test_what_the_backend_lacks_is_none_and_no_error(found):
    assert found["runtime"] == {
        "accelerator": "toy:0",
        "memory": None,
        "peak": None,
        "pins": False,
        "autocast": [],
        "stream": True,
        "name": "toy:0",
    }
