"""Choices that were measured, remembered for the same job on the same machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten
from hasten.devices import runtime
from hasten.train import atomic
from hasten.train.diagnose import tensors
from hasten.train.precision import Precision
from hasten.train.settings import RunSettings


def folder() -> Path | None:
    """``HASTEN_CACHE_DIR``, by default in the user's cache; None where that is ``off``."""
    given = os.environ.get("HASTEN_CACHE_DIR")
    if given == "off":
        return None
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hasten"


def key(
    device: torch.device,
    modules: Sequence[nn.Module],
    batch: Any,
    settings: RunSettings,
    choices: Sequence[Precision],
) -> str:
    """What a choice depends on, as one short word."""
    facts = [
        hasten.__version__,
        "by the median of paired steps",  # what was measured in another way is not believed
        torch.__version__,
        device.type,
        runtime.name(device),
        runtime.cores(),
        torch.get_num_threads(),
        settings.compile,
        [str(choice) for choice in choices],
        [
            [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
            for module in modules
        ],
        [f"{type(module).__qualname__} {module}" for module in modules],
        [(path, list(tensor.shape), str(tensor.dtype)) for path, tensor in tensors(batch)],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def recall(name: str, choices: Sequence[Precision]) -> Precision | None:
    """The choice kept under a key; None where there is none, or it cannot be read.

    Args:
        name: the key.
        choices: what there was to choose from; another one in the file is not believed.
    """
    file = _file(name)
    if file is None:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        chosen = Precision.from_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it is measured again, and written anew
    if (chosen.name, chosen.channels_last) not in [(c.name, c.channels_last) for c in choices]:
        return None
    return Precision(
        name=chosen.name,
        channels_last=chosen.channels_last,
        reason=f"{chosen.reason} (remembered; to measure anew, delete {file})",
    )


def keep(name: str, chosen: Precision) -> None:
    """Remember a choice. Where that cannot be written, the next run measures again."""
    file = _file(name)
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic.new_file(file) as temporary:
            temporary.write_text(json.dumps(chosen.to_json()), encoding="utf-8")


def _file(name: str) -> Path | None:
    place = folder()
    return None if place is None else place / "precision" / f"{name}.json"
