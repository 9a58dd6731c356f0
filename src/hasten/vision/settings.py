"""What a classifier is trained on and how: settings checked, kept, a run's folder named."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import CheckpointError, UsageError
from hasten.train.checkpoint import FOLDER
from hasten.train.folder import CONFIG, read_config
from hasten.train.settings import RunSettings
from hasten.vision.data.copies import check_cache
from hasten.vision.file_names import show

OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("onecycle", "cosine", "constant")
DEFAULT_BATCH = 128
_LONGEST_NAME = 255  # bytes, on every common file system
_SGD_LR_FACTOR = 30.0  # SGD with momentum wants rates so much higher than Adam's


_KINDS: dict[type, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
    type(None): "nothing",
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What to train, on what and how. All are plain values: they stand in ``config.json``.

    Raises:
        UsageError: a value is out of range.
    """

    data: str = "digits"
    """``digits``, ``fashion-mnist``, or a folder with one sub-folder a class."""
    data_dir: str | None = None
    image_size: int | None = None
    val_fraction: float | None = None
    augment: str = "auto"
    cache: str = "none"
    """Of decoded copies of a folder's images: ``none``, ``ram`` or ``disk``."""
    cache_bytes: int | None = None
    """That the copies take at most; None is half of what is free."""
    normalize: bool = True
    """Subtract the training images' mean and divide by their deviation; else only scale to 0..1."""
    model: str = "small"
    epochs: int = 10
    batch_size: int | str = DEFAULT_BATCH
    """Samples, over all devices, whose gradients make one optimizer step, or ``auto``: as many of
    them at once as their memory holds, the rest accumulated."""
    lr: float | None = None
    """Highest learning rate; None for the optimizer's own."""
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    schedule: str = "onecycle"
    label_smoothing: float = 0.0
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "auto"
    channels_last: str = "auto"
    compile: bool = False
    device: str = "auto"
    num_workers: int | str = "auto"
    plan: str = "auto"
    seed: int = 0
    checkpoint_every: str = "10 min"
    keep: int = 2
    patience: int | None = None
    """Epochs without a better one after which the run ends; None trains all."""
    log_every: int = 50
    hang_after_s: float = 600.0
    """Seconds without a finished batch after which a hang is told; 0 for never."""
    hang_exits: bool = False
    """Whether a hang ends the process, for a launcher to start it anew."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("epochs", "accumulate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')} is {getattr(self, name)}: at least 1")
        if self.batch_size != "auto" and not (
            isinstance(self.batch_size, int) and self.batch_size >= 1
        ):
            raise UsageError(f"batch-size is {self.batch_size!r}: a number of at least 1, or auto")
        if self.num_workers != "auto" and not (
            isinstance(self.num_workers, int) and self.num_workers >= 0
        ):
            raise UsageError(f"num-workers is {self.num_workers!r}: a number from 0 up, or auto")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"no optimizer {self.optimizer!r}; there are {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"no schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.lr is not None and not self.lr > 0:
            raise UsageError(f"lr is {self.lr}: a number above 0")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"label-smoothing is {self.label_smoothing}: from 0 to below 1")
        if self.weight_decay < 0:
            raise UsageError(f"weight-decay is {self.weight_decay}: a number from 0 up")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}: a whole number from 0 to 2^64 - 1")
        if not self.data:
            raise UsageError("the data is an empty name; give digits, fashion-mnist or a folder")
        check_cache(self.cache, self.cache_bytes)
        processes = self.plan == "processes" or self.num_workers not in ("auto", 0)
        if self.cache == "ram" and processes and self.plan != "threads":
            raise UsageError(
                "worker processes would each fill a memory of their own: give --cache disk, or"
                " leave --num-workers and --plan out, and threads load the images"
            )
        # What the run would refuse later is refused before the data is loaded.
        RunSettings(
            strategy=self.strategy,
            precision=self.precision,
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
            checkpoint_every=self.checkpoint_every,
            keep=self.keep,
            patience=self.patience,
            log_every=self.log_every,
            hang_after_s=self.hang_after_s,
            hang_exits=self.hang_exits,
        )
        if self.channels_last not in ("auto", "on", "off"):
            raise UsageError(f"channels-last is {self.channels_last!r}: auto, on or off")

    def _check_kinds(self) -> None:
        """Refuse values of another kind, which an edited ``config.json`` may hold."""
        hints = typing.get_type_hints(TrainSettings)
        for item in dataclasses.fields(self):
            name, value = item.name.replace("_", "-"), getattr(self, item.name)
            kinds = set(typing.get_args(hints[item.name])) or {hints[item.name]}
            if type(value) not in kinds and not (float in kinds and type(value) is int):
                names = " or ".join(sorted(_KINDS[kind] for kind in kinds))
                raise UsageError(f"{name} is {value!r}: it is {names}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} is {value}: a finite number")
            if isinstance(value, str):
                _check_text(name, value)

    @property
    def learning_rate(self) -> float:
        """The highest learning rate: what was given, or what suits the optimizer."""
        if self.lr is not None:
            return self.lr
        return 3e-3 * (_SGD_LR_FACTOR if self.optimizer == "sgd" else 1.0)


def resumed(
    folder: Path, changes: dict[str, Any], say: Callable[[str], None] = print
) -> TrainSettings:
    """The settings of the run in a folder, with changes that do not break its training.

    Args:
        folder: the run's.
        changes: by name.
        say: is told where ``config.json`` is damaged, and a checkpoint's settings are taken.

    Raises:
        UsageError: the folder holds no run, or a change would.
        CheckpointError: its settings cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file() and not (folder / FOLDER).is_dir():
        raise UsageError(
            f"{folder} holds no run (no config.json); give a folder that hasten train made,"
            " runs/NAME"
        )
    try:
        kept = read_config(folder, say)["config"]["settings"]
        settings = TrainSettings(**kept)
    except (ValueError, KeyError, TypeError) as error:
        # KeyError and TypeError: it is JSON, but not of the form that hasten writes.
        why = str(error) if isinstance(error, ValueError) else f"not as hasten writes it ({error})"
        raise CheckpointError(
            f"cannot read the settings in {path}: {why}; mend the file, or start a new run"
        ) from error
    fixed = sorted(
        name for name, value in changes.items() if name not in FREE and value != kept.get(name)
    )
    if fixed:
        names = ", ".join("--" + name.replace("_", "-") for name in fixed)
        raise UsageError(
            f"a resumed run keeps its own {names}; what may change is"
            f" {', '.join('--' + name.replace('_', '-') for name in FREE)}"
        )
    if changes.get("epochs", 0) > settings.epochs and settings.schedule != "constant":
        raise UsageError(
            f"the learning rate of {folder} follows {settings.schedule} over {settings.epochs}"
            f" epochs, so it cannot go on to {changes['epochs']}; start a new run"
        )
    # What the schedule was laid out over stays; fewer epochs just end sooner.
    return dataclasses.replace(settings, **changes)


def _check_text(name: str, text: str) -> None:
    """Refuse what no UTF-8 file can hold: names of files may be bytes of any kind.

    Raises:
        UsageError: it is that.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{name} is {show(text)}: not valid UTF-8, so the run's files cannot name it;"
            " rename it, or make a symbolic link to it"
        ) from None


FREE = (
    "cache_bytes",
    "data_dir",
    "device",
    "strategy",
    "epochs",
    "num_workers",
    "plan",
    "checkpoint_every",
    "keep",
    "patience",
    "log_every",
    "hang_after_s",
    "hang_exits",
)


def command(settings: TrainSettings) -> str:
    """The command line that makes a run with these settings."""
    words = ["hasten", "train", settings.data]
    for item in dataclasses.fields(TrainSettings):
        value = getattr(settings, item.name)
        if item.name == "data" or value == item.default:
            continue
        name = item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def new_folder(runs: Path, name: str | None, settings: TrainSettings) -> Path:
    """A folder for a new run: the name given, or one of data, model and time that is free.

    Raises:
        UsageError: no folder can have the name.
    """
    _check_text("runs", str(runs))
    _check_text("name", name or "")
    if name is not None:
        if not name or name in (".", "..") or Path(name).name != name:
            raise UsageError(f"--name is one folder name, not {name!r}; use --runs for the path")
        if len(os.fsencode(name)) > _LONGEST_NAME:
            raise UsageError(
                f"--name is {len(os.fsencode(name))} bytes long; folder names have at most"
                f" {_LONGEST_NAME}"
            )
        return runs / name
    stem = f"{Path(settings.data).name or 'data'}-{settings.model.split(':')[-1].split('/')[-1]}"
    stem += time.strftime("-%Y%m%d-%H%M%S")
    path, number = runs / stem, 1
    while path.exists():
        number += 1
        path = runs / f"{stem}-{number}"
    return path
