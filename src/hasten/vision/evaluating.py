"""Measuring a trained classifier: which labelled images are meant, and the figures by class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from hasten.errors import DataError, UsageError
from hasten.feed import Loader
from hasten.feed.telling import silence
from hasten.observe.confusion import ClassFigures, per_class
from hasten.observe.progress import Progress
from hasten.train.evaluation import Evaluation, evaluate
from hasten.train.run import Run
from hasten.train.source import count
from hasten.vision import data as image_data
from hasten.vision.classify import Classifier, check_count, explained
from hasten.vision.file_names import show

BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a classifier does on labelled images."""

    evaluation: Evaluation
    data: str
    """What it was measured on, in a few words."""
    classes: tuple[ClassFigures, ...]
    """The figures of each class that the model knows, by label."""
    skipped: dict[str, str]
    """Files (or samples) that could not be used, and why."""

    @property
    def confusion(self) -> list[list[int]]:
        """Images by true class (row) and predicted class (column)."""
        return self.evaluation.confusion or []


def measure(
    classifier: Classifier,
    data: str | None = None,
    *,
    data_dir: str | None = None,
    batch_size: int = BATCH_SIZE,
    num_workers: Any = "auto",
    progress: str = "off",
    stream: TextIO | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure a classifier.

    Args:
        classifier: from :func:`hasten.vision.classify.load`.
        data: ``digits``, ``fashion-mnist``, or a folder with one sub-folder a class (of one with
            ``train/`` and ``val/``, the ``val/`` images). None, and the data it was trained on,
            mean the images that it was validated with.
        data_dir: where Fashion-MNIST's files are or are downloaded to.
        batch_size: images at once.
        num_workers: processes that load, or ``auto``.
        progress: ``auto``, ``bar``, ``plain`` or ``off``.
        stream: where progress goes.
        say: told what was passed over, a line of text each.

    Raises:
        UsageError: there is no such data, or it is not known what the model was trained on.
        DataError: its classes are not the model's, or its images cannot be used.
        OutOfDeviceMemory: a batch does not fit on the device.
    """
    check_count(batch_size, "batch_size")
    images = _images(classifier, data, data_dir, say)
    smoothing = classifier.facts.settings.get("label_smoothing", 0.0)
    run = Run(
        device=classifier.device,
        precision=classifier.precision.name,
        channels_last=classifier.precision.channels_last,
        seed=None,
        progress="off",
    )
    bar = Progress(stream, progress)  # type: ignore[arg-type]
    with (
        Loader(
            images.samples,
            batch_size=batch_size,
            shuffle=False,
            num_workers=num_workers,
            device_transform=classifier.facts.transform,
            on_error="skip",
        ) as loader,
        bar,
        explained(classifier.device, batch_size),
    ):
        silence(loader)  # what is left out is in the result
        watched = _Watched(loader.to(classifier.device), bar)
        # The loss of the training, so that the figures are those that it printed.
        loss = nn.CrossEntropyLoss(label_smoothing=float(smoothing))
        evaluation = evaluate(run, classifier.model, loss, watched, {})
        skipped = _skipped(loader, images.samples)
    figures = per_class(evaluation.confusion or [], classifier.classes)
    return Measured(
        evaluation=evaluation, data=images.name, classes=tuple(figures), skipped=skipped
    )


class _Watched:
    """A loader's batches on their device, counted as they are given."""

    def __init__(self, batches: Any, progress: Progress) -> None:
        self._batches, self._progress = batches, progress

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._progress.epoch(1, 1, len(self), label="Evaluate")
        with closing(iter(self._batches)) as batches:
            for batch in batches:
                yield batch
                self._progress.advance(1, count(batch))
        self._progress.epoch_done()


@dataclass(frozen=True, kw_only=True)
class _Images:
    name: str
    samples: Any


def _images(
    classifier: Classifier, data: str | None, data_dir: str | None, say: Callable[[str], None]
) -> _Images:
    settings = classifier.facts.settings
    trained_on = settings.get("data")
    known = isinstance(trained_on, str)
    if data is None and not known:
        raise UsageError(
            f"{classifier.path} does not say what it was trained on: give DATA (digits,"
            " fashion-mnist, or a folder with one sub-folder a class)"
        )
    if data_dir is None and known and trained_on == (data or trained_on):
        data_dir = settings.get("data_dir")
    own = data is None or (known and _same(data, str(trained_on)))
    if own and trained_on not in image_data.BUILT_IN:
        return _own_folder(classifier, str(trained_on if data is None else data), say)
    name = str(trained_on) if data is None else data
    parting = {"val_fraction": settings.get("val_fraction"), "seed": settings.get("seed", 0)}
    samples = image_data.load_labelled(
        name,
        classes=classifier.classes,
        preparation=classifier.preparation,
        data_dir=data_dir,
        say=say,
        **(parting if name == "digits" else {}),
    )
    parted = ", those the training left out" if own and name == "digits" else ""
    return _Images(name=f"{show(name)}{parted}", samples=samples)


def _own_folder(classifier: Classifier, folder: str, say: Callable[[str], None]) -> _Images:
    """The validation images of the folder that a model was trained on, parted as it was then."""
    settings, preparation = classifier.facts.settings, classifier.preparation
    try:
        found = image_data.load(
            folder,
            val_fraction=settings.get("val_fraction"),
            seed=settings.get("seed", 0),
            image_size=preparation.size,
            channels=preparation.channels,
            augment="none",
            say=say,
        )
    except UsageError as error:
        raise UsageError(
            f"the model was trained on {show(folder)}, and that cannot be used now: {error}; give"
            " DATA to measure on other images"
        ) from error
    if found.classes != classifier.classes:
        raise DataError(
            f"{show(folder)} has changed since the training: its classes are"
            f" {', '.join(map(show, found.classes[:5]))} … and the model's"
            f" {', '.join(map(show, classifier.classes[:5]))} …; give DATA to measure on"
        )
    name = f"{show(folder)}, the images it was validated with"
    return _Images(name=name, samples=found.val)


def _same(data: str, trained_on: str) -> bool:
    if data == trained_on:
        return True
    if {data, trained_on} & set(image_data.BUILT_IN):
        return False
    here, there = Path(data).expanduser(), Path(trained_on).expanduser()
    try:
        return here.samefile(there)
    except OSError:
        return False


def _skipped(loader: Loader, samples: Any) -> dict[str, str]:
    problems = getattr(samples, "problems", None)
    found: dict[str, str] = {} if problems is None else dict(problems.files())
    name_of = getattr(samples, "describe_sample", lambda index: f"sample {index}")
    for index, why in loader.skipped:
        name = name_of(index)
        found.setdefault(name, why.removeprefix(f"{name}: "))
    return found
