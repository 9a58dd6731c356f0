"""Random states: seed them, take them, put them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hasten.devices import runtime
from hasten.feed.keys import mix


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed Python's, numpy's and torch's generators, that of ``device`` included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    runtime.manual_seed(device, seed)


def fork_generators(rank: int, device: torch.device) -> None:
    """Seed the generators anew, from what they were seeded with and a process's rank.

    Processes that draw the same numbers would drop the same units of different samples.
    """
    seed_everything(mix(torch.initial_seed(), rank), device)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of all global generators, as values that a safe unpickler takes."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
        "device": runtime.rng_state(device),
        "device_type": device.type,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what :func:`rng_state` took; a device of another kind keeps its own generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["device"] is not None and state["device_type"] == device.type:
        runtime.set_rng_state(device, state["device"].cpu())


@contextmanager
def rng_kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside leaves the generators as they were."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)
