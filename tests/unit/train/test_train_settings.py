"""Settings are checked when they are made."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from hasten.errors import UsageError
from hasten.train.schedule import Every
from hasten.train.settings import RunOptions, RunSettings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: it is a whole number of at least 1"),
        ({"accumulate": 1.5}, "accumulate=1.5"),
        ({"accumulate": True}, "accumulate=True"),
        ({"keep": 0}, "keep=0"),
        ({"patience": 0}, "patience=0: epochs without a better one, at least 1, or None"),
        ({"patience": True}, "patience=True"),
        ({"log_every": -1}, "log_every=-1"),
        ({"log_every": "5"}, "log_every='5'"),
        ({"precision": "fp16"}, "unknown precision 'fp16'; there are auto, float32"),
        ({"channels_last": "yes"}, "channels_last='yes': True, False or 'auto'"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: it is a positive number or None"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"progress": "loud"}, "progress='loud': auto, bar, plain or off"),
        ({"seed": "7"}, "seed='7': a whole number or None"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"resume": True}, "resume=True needs folder="),
        ({"config": {"a": object()}}, "config is kept as JSON, and cannot be: Object of type"),
        ({"config": {"a": float("nan")}}, "config is kept as JSON"),
        ({"checkpoint_every": "often"}, "cannot read the period 'often'"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        RunSettings(**options)


def test_defaults_and_edges_are_fine():
    RunSettings()
    RunSettings(seed=None, clip_norm=1e-9, checkpoint_every=None, resume=True, folder="x")
    RunSettings(seed=-3, checkpoint_every=Every(steps=5), channels_last=True)


def test_they_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunSettings().keep = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        RunSettings("cpu")  # type: ignore[misc]


def test_the_keyword_arguments_that_editors_show_are_the_settings():
    hints = typing.get_type_hints(RunOptions)
    settings = {field.name: field.type for field in dataclasses.fields(RunSettings)}
    assert list(hints) == list(settings)
    for name, hint in RunOptions.__annotations__.items():
        assert getattr(hint, "__forward_arg__", hint) == settings[name], name
