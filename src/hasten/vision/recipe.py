"""The recipe: from settings to a trained image classifier; `train` and `compare` both use it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, OneCycleLR

from hasten.errors import HastenError
from hasten.feed import Loader
from hasten.train import Result, Trainer, launch, strategies
from hasten.train import precision as precisions
from hasten.train import world as worlds
from hasten.train.batch_size import batch_line
from hasten.train.folder import refuse_run
from hasten.train.keeping import device_line
from hasten.train.lock import refuse_living
from hasten.train.seed import seed_everything
from hasten.train.settings import Sink
from hasten.train.trainer import fused
from hasten.vision import data as image_data
from hasten.vision import gallery, models
from hasten.vision.data import ImageData
from hasten.vision.settings import DEFAULT_BATCH, TrainSettings, command
from hasten.vision.transforms import Compose, Normalize, Transform


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
    precisions.check(settings.precision, device)
    layout = settings.channels_last == "on"
    strategies.make(  # to be told now what it would refuse
        settings.strategy,
        world,
        device,
        precisions.by_rule(settings.precision, device, channels_last=layout),
        sync_batchnorm=settings.sync_batchnorm,
    )
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
        result = trainer.fit(
            batches,
            val,
            epochs=settings.epochs,
            page=lambda known: gallery.page(known, trainer, data, _normalising(data, settings)),
        )
        skipped = [f"{index}: {why}" for index, why in batches.skipped + val.skipped]
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
        hang_after_s=settings.hang_after_s,
        hang_exits=settings.hang_exits,
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


_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def _optimizer(settings: TrainSettings) -> Callable[..., Optimizer]:
    def make(parameters: Any) -> Optimizer:
        options: dict[str, Any] = {
            "lr": settings.learning_rate,
            "weight_decay": settings.weight_decay,
        }
        if settings.optimizer == "sgd":
            options |= {"momentum": 0.9, "nesterov": True}
        kind = _OPTIMIZERS[settings.optimizer]
        return fused(kind, parameters, options) or kind(parameters, **options)

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
    around.say(batch_line(f"{size}{how}", size, accumulate, count, settings.learning_rate))
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
