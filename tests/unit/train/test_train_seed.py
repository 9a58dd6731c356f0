"""Random states, taken and put back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.devices import runtime
from hasten.train import checkpoint
from hasten.train.seed import rng_kept, rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        torch.rand(1).item(),
        torch.randn(3).tolist(),
    )


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**63 - 1, -5])
def test_a_seed_repeats_everything(seed: int):
    seed_everything(seed, CPU)
    first = draw()
    draw()
    seed_everything(seed, CPU)
    assert draw() == first


def test_a_state_goes_on_where_it_was_taken():
    seed_everything(1, CPU)
    draw()
    np.random.randn()  # leaves a second normal number waiting
    random.gauss()
    state = rng_state(CPU)
    first = draw()
    draw()
    set_rng_state(state, CPU)
    assert draw() == first


def test_a_state_survives_a_checkpoint(tmp_path: Path):
    seed_everything(1, CPU)
    np.random.randn()
    state = rng_state(CPU)
    first = draw()
    checkpoint.save(tmp_path / "c", model={}, training={"rng": state}, meta={"step": 1})
    kept = checkpoint.load(tmp_path / "c", map_location="cpu")
    set_rng_state(kept.training["rng"], CPU)
    assert draw() == first


def test_kept_also_after_an_error():
    before = rng_state(CPU)
    with pytest.raises(KeyError), rng_kept(CPU):
        draw()
        raise KeyError
    first = draw()
    set_rng_state(before, CPU)
    assert draw() == first


def test_the_state_of_another_kind_of_device_is_left(monkeypatch: pytest.MonkeyPatch):
    put: list[Any] = []
    monkeypatch.setattr(runtime, "set_rng_state", lambda device, state: put.append(device.type))
    state = rng_state(CPU) | {"device": torch.zeros(3, dtype=torch.uint8), "device_type": "cuda"}
    set_rng_state(state, CPU)
    assert put == []
    set_rng_state(state, torch.device("cuda", 1))
    assert put == ["cuda"]
