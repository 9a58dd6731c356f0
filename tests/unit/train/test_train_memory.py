"""What memory of the device a resume needs: on the simulated accelerator, which counts it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import QUIET, batches

import hasten
from hasten.devices import runtime
from hasten.train import checkpoint


class Peaks:
    """The most bytes of the device that were in use, in each stretch between two resets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: list[int] = []
        self._reset = runtime.reset_peak
        patch.setattr(runtime, "reset_peak", self.note)

    def note(self, device: torch.device) -> None:
        self.bytes.append(runtime.peak_bytes(device) or 0)
        self._reset(device)


def train(
    folder: Path, patch: pytest.MonkeyPatch, *, epochs: int, resume: bool = False
) -> tuple[list[int], int]:
    """Train a model of a megabyte; the peaks, and the bytes of its weights."""
    with hasten.simulate(), patch.context() as patched:
        peaks = Peaks(patched)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 500), nn.Linear(500, 3))
        made = hasten.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters),
            folder=folder,
            resume=resume,
            **QUIET | {"device": "cuda"},
        )
        made.fit(batches([8, 8, 8]), epochs=epochs)
        peaks.note(torch.device("cuda:0"))
        return peaks.bytes, sum(p.nbytes for p in model.parameters())


def test_a_resume_needs_no_more_than_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, weights = train(tmp_path / "run", monkeypatch, epochs=2)
    resumed, _ = train(tmp_path / "run", monkeypatch, epochs=3, resume=True)
    loading, training = resumed[0], resumed[1:]
    assert 3 * weights <= loading < 3.1 * weights  # with both moments; nothing is there twice
    assert max(training) == max(fresh) > loading


def test_what_would_need_more_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a checkpoint that is read onto the device at once."""
    _, weights = train(tmp_path / "run", monkeypatch, epochs=2)
    load = checkpoint.load

    def onto_device(*given: Any, **options: Any) -> checkpoint.Saved:
        saved = load(*given, **options)
        moved = hasten.move([saved.model, saved.training["optimizers"]], torch.device("cuda:0"))
        training = saved.training | {"optimizers": moved[1]}
        return dataclasses.replace(saved, model=moved[0], training=training)

    monkeypatch.setattr(checkpoint, "load", onto_device)
    resumed, _ = train(tmp_path / "run", monkeypatch, epochs=3, resume=True)
    assert resumed[0] > 3.9 * weights
