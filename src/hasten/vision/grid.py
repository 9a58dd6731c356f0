"""What a comparison compares: axes, their values, and the trials that they make; nothing is run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten import devices
from hasten.devices import runtime
from hasten.errors import DeviceUnavailable, HastenError, UsageError
from hasten.feed.plan import NAMES as PLANS
from hasten.train.settings import RunSettings
from hasten.vision.data.copies import bytes_of
from hasten.vision.data.image_data import check_augment
from hasten.vision.settings import TrainSettings

EPOCHS = 2
"""Of each run, where nothing else is asked for: one to start up in, one to measure."""

_FIELDS = tuple(field.name for field in dataclasses.fields(TrainSettings))
_FIRST = ("data", "device", "batch_size", "num_workers", "precision")
AXES = (*_FIRST, *(name for name in _FIELDS if name not in _FIRST))
"""The name of every axis: each field of TrainSettings, in the order of a table's columns."""

ALWAYS_SHOWN = ("device", "batch_size", "num_workers", "precision")
"""Axes that tell trials apart in every table, whether they vary or not."""

SAVED_ONLY = ("checkpoint_every", "keep")
"""Axes about checkpoints: they do something only in runs that save."""

PRESETS: Mapping[str, Mapping[str, str]] = {
    "device": {
        "device": "every",
        "lr": "0.01",
        "batch_size": "1000,10000,20000",
        "num_workers": "0,1",
    },
    "workers": {"batch_size": "100,1000,10000", "num_workers": "0,1,2,4,8,16"},
}
"""Ready grids, as options; ``every`` device is the CPU and each accelerator here."""

_EVERY = "every"
_SWITCH = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
_UNSET = ("none", "default")
_OF_RUN = ("precision", "clip_norm", "checkpoint_every", "keep", "patience", "log_every")
_WORDS = {"batch_size": "batch", "num_workers": "workers", "device": "", "data": ""}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One combination of settings."""

    number: int
    """Counted from 1, over the trials that can run here."""
    settings: TrainSettings
    """With the device that is here in place of ``auto``."""
    varying: tuple[str, ...]
    """Axes with several values in this grid."""

    @property
    def label(self) -> str:
        """``cpu, batch 1000, workers 1``, and what else varies."""
        shown = (n for n in AXES if n in self.varying or n in ALWAYS_SHOWN[:3])
        return ", ".join(
            f"{_word(name)} {text_of(getattr(self.settings, name))}".strip() for name in shown
        )


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A device that was asked for and is not here."""

    device: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """As JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination of the values of its axes, each trained ``repeat`` times.

    Raises:
        UsageError: an axis is missing, or two values contradict each other.
    """

    axes: Mapping[str, tuple[Any, ...]]
    """At least one value for each of ``AXES``."""
    repeat: int = 3

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UsageError(f"repeat is {self.repeat}: at least 1")
        missing = [name for name in AXES if not self.axes.get(name)]
        if missing:
            raise UsageError(f"the grid has no value for {', '.join(map(option, missing))}")
        for settings in self._combinations(self.axes["device"]):
            TrainSettings(**settings)

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes with several values."""
        return tuple(name for name in AXES if len(self.axes[name]) > 1)

    @property
    def extent(self) -> str:
        """``6 settings, 3 runs each``, with the devices that are not here."""
        count = math.prod(len(self.axes[name]) for name in self.varying)
        settings = "one setting" if count == 1 else f"{count} settings"
        return f"{settings}, {self.repeat} {'run' if self.repeat == 1 else 'runs'} each"

    @property
    def saves(self) -> bool:
        """Whether its runs are to save checkpoints: where their settings are not the usual."""
        usual = TrainSettings()
        return any(self.axes[name] != (getattr(usual, name),) for name in SAVED_ONLY)

    def trials(self) -> tuple[list[Trial], list[LeftOut]]:
        """The trials that this machine can run, and the devices that it lacks.

        Raises:
            DeviceUnavailable: none of the devices is here.
        """
        here, left_out = _present(self.axes["device"])
        if not here:
            reasons = "; ".join(item.reason for item in left_out)
            raise DeviceUnavailable(f"none of the devices to compare is here: {reasons}")
        found = [
            Trial(number=number, settings=TrainSettings(**settings), varying=self.varying)
            for number, settings in enumerate(self._combinations(here), 1)
        ]
        return found, left_out

    def to_json(self) -> dict[str, list[Any]]:
        """The values of each axis. ``repeat`` is no part of it: more repeats add to a grid."""
        return {name: list(self.axes[name]) for name in AXES}

    def _combinations(self, on: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        values = [on if name == "device" else self.axes[name] for name in AXES]
        for combination in itertools.product(*values):
            yield dict(zip(AXES, combination, strict=True))


def parse(options: Mapping[str, str], *, preset: str | None = None, repeat: int = 3) -> Grid:
    """A grid from options as they are written: values with commas between them.

    Args:
        options: text by the name of the axis (``batch_size``: ``"100,1000"``). Switches are
            ``on`` or ``off``; ``none`` leaves a setting to its default where it has no other word
            for that. An axis that is not there keeps the default of ``hasten train``, except
            that there are ``EPOCHS`` epochs.
        preset: a name of ``PRESETS``, whose axes ``options`` override.
        repeat: how often each trial is run.

    Raises:
        UsageError: an unknown axis or preset, or a value that cannot be; names axis and value.
    """
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    unknown = [name for name in options if name not in AXES]
    if unknown:
        raise UsageError(f"{option(unknown[0])} is no option of hasten train to compare by")
    texts: dict[str, str] = {**PRESETS.get(preset or "", {}), **options}
    axes: dict[str, tuple[Any, ...]] = {
        field.name: (EPOCHS if field.name == "epochs" else field.default,)
        for field in dataclasses.fields(TrainSettings)
    }
    for name, text in texts.items():
        axes[name] = _values(name, text)
    return Grid(axes=axes, repeat=repeat)


def option(name: str) -> str:
    """``--batch-size`` for ``batch_size``; data has no dashes."""
    return name.upper() if name == "data" else "--" + name.replace("_", "-")


def text_of(value: Any) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _word(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _values(name: str, text: str) -> tuple[Any, ...]:
    if name in ("data", "data_dir") and Path(text).expanduser().exists():
        words = [text]  # a folder's name may have a comma in it
    elif name == "device" and text == _EVERY:
        return ("cpu", *map(str, runtime.devices()))
    else:
        words = [word.strip() for word in text.split(",")]
    values: list[Any] = []
    for word in words:
        if not word:
            raise UsageError(f"{option(name)} {text}: a value is missing beside a comma")
        value = _value(name, word)
        if value in values:
            raise UsageError(f"{option(name)} {text}: {word} is there twice")
        values.append(value)
    return tuple(values)


def _value(name: str, word: str) -> Any:
    """One value of an axis, checked as far as it can be without data."""
    value: Any = word
    try:
        if name == "cache_bytes" and word.lower() not in _UNSET:
            value = bytes_of(word, "it")
        else:
            value = _convert(typing.get_type_hints(TrainSettings)[name], word)
        TrainSettings(**{name: value})
        if name in _OF_RUN:
            RunSettings(**{name: value})
        elif name == "augment":
            check_augment(word)
        elif name == "plan" and word not in ("auto", *PLANS):
            raise UsageError(f"no plan {word!r}; there are auto, {', '.join(PLANS)}")
        elif name == "device":
            _check_device(word)
    except HastenError as error:
        said = str(error)
        for named in (f"{name.replace('_', '-')} is ", f"{name}="):  # option and value: said once
            for given in (repr(value), str(value)):
                said = said.removeprefix(f"{named}{given}: ")
        raise UsageError(f"{option(name)} {word}: {said}") from error
    return value


def _convert(kind: Any, word: str) -> Any:
    """The text as the first of a field's types that it can be."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if types.NoneType in kinds and word.lower() in _UNSET:
        return None
    if bool in kinds:
        if word.lower() not in _SWITCH:
            raise UsageError("it is on or off")
        return _SWITCH[word.lower()]
    for number, what in ((int, "a whole number"), (float, "a number")):
        if number not in kinds:
            continue
        try:
            value = number(word)
        except ValueError:
            if str in kinds:
                continue
            raise UsageError(f"it is not {what}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError("it is not a finite number")
        return value
    return word


def _check_device(word: str) -> None:
    """Refuse what names no device anywhere; one that is only absent here is left out later."""
    if word.lower() == "auto" or word.isdecimal():
        return
    try:
        torch.device(word.lower())
    except RuntimeError:
        devices.device(word)  # says what there is, and what was likely meant
        raise UsageError("it names no device") from None


def _present(specs: tuple[str, ...]) -> tuple[tuple[str, ...], list[LeftOut]]:
    """The devices that are here, each once, and those that are not."""
    here: list[str] = []
    left_out: list[LeftOut] = []
    for spec in specs:
        try:
            found = str(devices.device(spec))
        except DeviceUnavailable as error:
            left_out.append(LeftOut(device=spec, reason=str(error)))
            continue
        if found not in here:
            here.append(found)
    return tuple(here), left_out
