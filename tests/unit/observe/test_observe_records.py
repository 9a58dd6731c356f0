from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from hasten.observe.records import (
    AnyRecord,
    EpochRecord,
    EventRecord,
    StepRecord,
    finite,
    from_line,
    to_line,
)

STEP = StepRecord(
    epoch=1, step=7, batch=7, loss=0.5, learning_rate=0.1, images_per_s=9.0, seconds=1.5,
    phases={"wait": 0.25},
)  # fmt: skip
EPOCH = EpochRecord(
    epoch=2, step=20, loss=0.25, val_loss=0.3, val_accuracy=0.9, seconds=3.0, images_per_s=10.0,
    phases={"forward": 1.0}, learning_rate=0.01, peak_memory_bytes=1 << 40,
)  # fmt: skip
EVENT = EventRecord(name="resumed", message='von vorn: 日本 \u2028 "x"\n', details={"a": [1, None]})


@pytest.mark.parametrize("record", [STEP, EPOCH, EVENT])
def test_round_trip(record: AnyRecord):
    line = to_line(record)
    assert "\n" not in line
    assert json.loads(line)["kind"] == record.kind
    assert from_line(line) == record


def test_json_is_strict_and_nan_comes_back_as_nan():
    record = StepRecord(
        epoch=1, step=1, batch=1, loss=math.nan, learning_rate=math.inf, images_per_s=1.0,
        seconds=1.0, phases={"wait": -math.inf},
    )  # fmt: skip

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    data = json.loads(to_line(record), parse_constant=refuse)
    assert (data["loss"], data["learning_rate"], data["phases"]) == (None, None, {"wait": None})
    back = from_line(to_line(record))
    assert isinstance(back, StepRecord)
    assert math.isnan(back.loss)


def test_a_missing_validation_stays_missing():
    record = EpochRecord(epoch=1, step=1, loss=1.0, seconds=1.0, images_per_s=1.0, learning_rate=1)
    back = from_line(to_line(record))
    assert isinstance(back, EpochRecord)
    assert back.val_accuracy is None
    assert back.peak_memory_bytes is None


def test_unknown_fields_and_kinds_are_passed_over():
    assert from_line(json.dumps(STEP.to_json() | {"new": 1})) == STEP
    assert from_line('{"kind": "of the future"}') is None


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="'loss'"):
        from_line('{"kind": "step", "epoch": 1, "step": 1, "batch": 1}')
    with pytest.raises(ValueError, match="JSON object, not list"):
        from_line("[1]")


def test_numbers_of_numpy_and_torch_are_written_as_numbers():
    value = {
        1: np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0),
        "d": (np.float64("nan"), True), "e": {"x"}, "f": Fraction(1, 2),
    }  # fmt: skip
    assert finite(value) == {"1": 0.5, "b": 3, "c": 2.0, "d": [None, True], "e": ["x"], "f": "1/2"}
    json.dumps(finite(value), allow_nan=False)
