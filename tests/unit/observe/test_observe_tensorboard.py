from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from hasten.errors import UsageError
from hasten.observe.records import EpochRecord, EventRecord, StepRecord
from hasten.observe.tensorboard import TensorBoardSink


def test_without_the_package_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install hasten\[tensorboard\]"):
        TensorBoardSink(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_the_numbers_of_records_are_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(
        StepRecord(
            epoch=1, step=7, batch=7, loss=0.5, learning_rate=0.1, images_per_s=9.0, seconds=1.5,
            phases={"wait": 0.25},
        )
    )  # fmt: skip
    sink.write(
        EpochRecord(epoch=1, step=9, loss=0.25, seconds=3.0, images_per_s=10.0, learning_rate=0.01)
    )
    sink.write(EventRecord(name="checkpoint"))
    sink.close()

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(7, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("phase_s/wait")] == [(7, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("epoch/loss")] == [(9, 0.25)]
    assert "epoch/val_loss" not in events.Tags()["scalars"]
