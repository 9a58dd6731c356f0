"""The recipe: from settings to a trained image classifier; `train` and `compare` both use it."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, OneCycleLR

from hasten.errors import CheckpointError, HastenError, UsageError
from hasten.feed import Loader
from hasten.train import Result, Trainer, launch
from hasten.train import world as worlds
from hasten.train.checkpoint import FOLDER
from hasten.train.folder import CONFIG, read_config, refuse_run
from hasten.train.keeping import device_line
from hasten.train.lock import refuse_living
from hasten.train.seed import seed_everything
from hasten.train.settings import RunSettings, Sink
from hasten.vision import data as image_data
from hasten.vision import gallery, models
from hasten.vision.data import ImageData
from hasten.vision.data.copies import check_cache
from hasten.vision.file_names import show
from hasten.vision.transforms import Compose, Normalize, Transform

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


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What surrounds a run and is no part of its settings: where it writes and speaks."""

    folder: Path | None = None
    resume: bool = False
    progress: str = "auto"
    stream: TextIO | None = None
    sinks: tuple[Sink, ...] = ()
    say: Callable[[str], None] = print


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training came to."""

    result: Result
    data: ImageData
    batch_size: int
    """Samples at once."""
    skipped: list[str] = field(default_factory=list)
    """A line for each sample or file that was left out."""


def train(settings: TrainSettings, around: Surroundings, data: ImageData | None = None) -> Trained:
    """Train a classifier.

    Args:
        settings: what to train.
        around: where to write and speak.
        data: loaded already, when several runs share it.

    Raises:
        HastenError: of any kind; see :meth:`hasten.Trainer.fit`.
    """
    # Before anything that takes long: what device, and whether the folder can be used at all.
    device = worlds.device_for(settings.device)
    world = worlds.join(device)
    around.say(device_line(device))
    folder = around.folder
    if folder is not None:
        world.by_main(lambda: _refuse_folder(folder, around.resume))
    data = data or world.local_first(lambda: load_data(settings, around.say))
    around.say(f"Data: {data.describe()}")
    seed_everything(settings.seed, torch.device("cpu"))  # the weights' initial values too
    sizes = {"classes": len(data.classes), "channels": data.shape[0], "image_size": data.shape[1]}
    model = models.create(settings.model, **sizes)
    description = models.describe(settings.model, **sizes)
    config = {
        "settings": dataclasses.asdict(settings),
        "model": settings.model,
        "data": data.name,
        "architecture": description,
        "classes": list(data.classes),
        "shape": list(data.shape),
        "transform": _normalising(data, settings).to_config(),
        "preparation": data.preparation.to_config(),
        "command": command(settings),
    }
    with _explained(settings.model):
        return _fitted(model, settings, around, data, config)


def _refuse_folder(folder: Path, resume: bool) -> None:
    refuse_living(folder)
    if not resume:
        refuse_run(folder)


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Inside, errors of a model's own file say where in it.

    Raises:
        HastenError: instead of what the file raised.
    """
    try:
        yield
    except HastenError:
        raise
    except Exception as error:
        said = models.failure(model, error)
        if said is None:
            raise
        raise HastenError(said) from error


def _fitted(
    model: nn.Module,
    settings: TrainSettings,
    around: Surroundings,
    data: ImageData,
    config: dict[str, Any],
) -> Trained:
    trainer = _trainer(model, settings, around, config)
    micro, accumulate = _batch(trainer, settings, data, around)
    # What was found for this device holds for the run, also where it goes on with others.
    config["settings"] |= {"batch_size": micro, "accumulate": accumulate}
    if accumulate != settings.accumulate:
        trainer = _trainer(model, settings, around, config, accumulate=accumulate)
    with (
        loader(settings, data, training=True, batch_size=micro) as batches,
        loader(settings, data, training=False, batch_size=max(micro, 256)) as val,
    ):
        result = trainer.fit(batches, val, epochs=settings.epochs)
        skipped = [f"{index}: {why}" for index, why in batches.skipped + val.skipped]
        assert trainer.run is not None
        run = trainer.run
        if around.folder is not None and (run.world.is_main or run.strategy.in_step):
            shown = gallery.samples(trainer, data, _normalising(data, settings))
            if run.world.is_main:
                result = gallery.finish_report(result, data, shown)
    return Trained(result=result, data=data, batch_size=micro, skipped=skipped)


def load_data(settings: TrainSettings, say: Callable[[str], None]) -> ImageData:
    """The data set that settings name."""
    return image_data.load(
        settings.data,
        data_dir=settings.data_dir,
        val_fraction=settings.val_fraction,
        seed=settings.seed,
        image_size=settings.image_size,
        augment=settings.augment,
        cache=settings.cache,
        cache_bytes=settings.cache_bytes,
        say=say,
    )


def loader(settings: TrainSettings, data: ImageData, *, training: bool, batch_size: int) -> Loader:
    """The loader of one part of the data."""
    transform = data.train_transform if training else data.val_transform
    if not settings.normalize:
        transform = without_normalising(transform)
    return Loader(
        data.train if training else data.val,
        batch_size=batch_size,
        shuffle=training,
        num_workers=settings.num_workers,  # type: ignore[arg-type]
        plan=settings.plan,
        seed=settings.seed,
        device_transform=transform,
    )


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


def _trainer(
    model: nn.Module,
    settings: TrainSettings,
    around: Surroundings,
    config: dict[str, Any],
    accumulate: int | None = None,
) -> Trainer:
    return Trainer(
        model,
        loss=nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing),
        optimizer=_optimizer(settings),
        scheduler=lambda optimizer, steps: _schedule(settings, optimizer, steps),
        schedule_per="step",
        device=settings.device,
        precision=settings.precision,
        channels_last="auto"
        if settings.channels_last == "auto"
        else settings.channels_last == "on",
        compile=settings.compile,
        strategy=settings.strategy,
        sync_batchnorm=settings.sync_batchnorm,
        accumulate=accumulate or settings.accumulate,
        clip_norm=settings.clip_norm,
        seed=settings.seed,
        folder=around.folder,
        resume=around.resume,
        checkpoint_every=settings.checkpoint_every,
        keep=settings.keep,
        patience=settings.patience,
        log_every=settings.log_every,
        progress=around.progress,
        stream=around.stream,
        sinks=around.sinks,
        config=config,
        announce=False,
        resume_hint=shlex.join(["hasten", "train", "--resume", str(around.folder), *_devices()]),
    )


def _devices() -> list[str]:
    """The option that started the processes, where hasten itself has started them."""
    return ["--devices", str(worlds.place().size)] if launch.STORE in os.environ else []


def _optimizer(settings: TrainSettings) -> Callable[..., Optimizer]:
    def make(parameters: Any) -> Optimizer:
        options: dict[str, Any] = {
            "lr": settings.learning_rate,
            "weight_decay": settings.weight_decay,
        }
        if settings.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, fused=True, **options)
        made = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
        return made(parameters, fused=True, **options)

    return make


def _schedule(settings: TrainSettings, optimizer: Optimizer, steps: int) -> LRScheduler:
    if settings.schedule == "onecycle":
        return OneCycleLR(
            optimizer,
            max_lr=settings.learning_rate,
            total_steps=steps + 1,
            pct_start=0.3,  # of no whole number of steps is this exactly one: torch divides by it
            cycle_momentum=settings.optimizer == "sgd",
        )
    if settings.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=steps)
    return ConstantLR(optimizer, factor=1.0)


def _batch(
    trainer: Trainer, settings: TrainSettings, data: ImageData, around: Surroundings
) -> tuple[int, int]:
    """Samples at once on all devices, and batches to accumulate; both are said."""
    count = worlds.place().size
    size, accumulate = settings.batch_size, settings.accumulate
    how = ""
    if not isinstance(size, int):
        wanted = min(DEFAULT_BATCH * accumulate, len(data.train))  # type: ignore[arg-type]
        found = trainer.fitting_batch(
            lambda size: loader(settings, data, training=True, batch_size=size),
            -(-wanted // count),
        )
        size, accumulate, how = found.micro * count, found.accumulate, " fits"
    parts = [f"Batch size: {size}{how}"]
    if count > 1:
        each = size / count
        parts.append(f"{each:g} on each of {count} devices")
    if accumulate > 1:
        parts.append(f"accumulated {accumulate} times (effective batch {size * accumulate})")
    around.say(f"{', '.join(parts)}; learning rate {settings.learning_rate:g}")
    return size, accumulate


def without_normalising(transform: Transform) -> Transform:
    """The same transform, scaling pixels to 0..1 where it normalised them."""
    if isinstance(transform, Compose):
        return Compose([without_normalising(part) for part in transform.transforms])
    if isinstance(transform, Normalize):
        return Normalize((0.0,) * len(transform.mean), (1.0,) * len(transform.mean))
    return transform


def _normalising(data: ImageData, settings: TrainSettings) -> Transform:
    transform = data.val_transform
    return transform if settings.normalize else without_normalising(transform)
