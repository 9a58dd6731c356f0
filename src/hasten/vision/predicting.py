"""Predicting for many files: which ones are meant, reading them ahead, answers in their order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hasten.devices.runtime import cores
from hasten.errors import UsageError
from hasten.vision import decode
from hasten.vision.classify import Classifier, Guess, check_count
from hasten.vision.data.layout import promises_image
from hasten.vision.data.preparation import Preparation
from hasten.vision.file_names import show

BATCH_SIZE = 64
STANDARD_INPUT = "-"
_READ_BYTES = 1 << 16
_PASSED_OVER = frozenset({"__MACOSX", "@eaDir"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one file."""

    file: str
    """Its path as it was given, or found."""
    top: tuple[Guess, ...] = ()
    """The most probable classes, most probable first; empty where there is a problem."""
    problem: str | None = None
    """Why there is no prediction."""


def expand(
    arguments: Iterable[str], *, listed: BinaryIO | None = None, null: bool = False
) -> Iterator[Answer]:
    """The files that a person means, in their order, as answers still to be given.

    Args:
        arguments: files; folders, of which the image files at any depth are meant, sorted; and
            ``-``, for paths from ``listed``.
        listed: paths, one a line, read as they come.
        null: paths in ``listed`` end with a NUL byte, not with a newline.

    Raises:
        UsageError: ``-`` without ``listed``, or ``listed`` is separated by NUL without ``null``.
    """
    for argument in arguments:
        if argument != STANDARD_INPUT:
            yield from _meant(argument)
        elif listed is None:
            raise UsageError("- is for paths on standard input, and there is none")
        else:
            for path in _paths(listed, null):
                yield from _meant(path)


def predict(
    classifier: Classifier,
    files: Iterable[Answer],
    *,
    top: int = 5,
    batch_size: int = BATCH_SIZE,
    num_workers: int | str = "auto",
) -> Iterator[Answer]:
    """Predict for each file, in order; a file that cannot be used gives its problem and no more.

    Files are read and decoded by threads while the model computes, a bounded number ahead.

    Args:
        classifier: what to ask.
        files: from :func:`expand`; those with a problem already are passed through.
        top: classes to give for each.
        batch_size: images at once.
        num_workers: threads that decode; ``auto`` for one a core; with 0 nothing is read ahead.

    Raises:
        UsageError: a number is out of range.
        HastenError: the model fails, or a batch does not fit on the device.
    """
    check_count(top, "top")
    check_count(batch_size, "batch_size")
    threads = cores() if num_workers == "auto" else num_workers
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 0:
        raise UsageError(f"num_workers is {num_workers!r}: a whole number from 0 up, or auto")
    ahead = batch_size + 2 * threads
    with closing(_decoded(files, classifier.preparation, threads, ahead)) as images:
        while batch := list(islice(images, batch_size)):
            yield from _answers(classifier, batch, top)


def _answers(
    classifier: Classifier, batch: list[tuple[Answer, Tensor | None]], top: int
) -> Iterator[Answer]:
    pixels = [image for _, image in batch if image is not None]
    rows = iter(classifier.probabilities(torch.stack(pixels)) if pixels else ())
    for answer, image in batch:
        if image is None:
            yield answer
            continue
        row = next(rows)
        if torch.isfinite(row).all():
            yield Answer(file=answer.file, top=classifier.prediction(row, top).top)
        else:
            yield Answer(file=answer.file, problem="the model's output is NaN or infinite")


def _decoded(
    files: Iterable[Answer], preparation: Preparation, threads: int, ahead: int
) -> Generator[tuple[Answer, Tensor | None], None, None]:
    """Each file with its pixels, uint8 [C, S, S]; without where it has a problem."""
    if threads == 0:
        for file in files:
            yield _read(file, preparation)
        return
    waiting: deque[Future[tuple[Answer, Tensor | None]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="hasten-decode") as pool:
        try:
            for file in files:
                waiting.append(pool.submit(_read, file, preparation))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


def _read(file: Answer, preparation: Preparation) -> tuple[Answer, Tensor | None]:
    if file.problem is not None:
        return file, None
    name = show(file.file)
    try:
        return file, preparation(file.file, name=name)
    except decode.ImageError as error:
        return Answer(file=file.file, problem=decode.reason(error, name)), None


def _meant(path: str) -> Iterator[Answer]:
    if not Path(path).is_dir():
        yield Answer(file=path)  # reading it says what is wrong with it
        return
    found = False
    for answer in _images_below(path):
        found = True
        yield answer
    if not found:
        yield Answer(file=path, problem="is a folder without image files")


def _images_below(top: str) -> Iterator[Answer]:
    """Files whose names promise images; each real folder once, whatever links lead to it."""
    seen: set[tuple[int, int]] = set()
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            status = Path(folder).stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(folder) as entries:
                kept = [e for e in entries if not e.name.startswith(".")]
            kept.sort(key=lambda entry: entry.name)
            below = [e.path for e in kept if e.name not in _PASSED_OVER and e.is_dir()]
        except OSError as error:
            yield Answer(file=folder, problem=f"cannot be read ({error.strerror or error})")
            continue
        pending += reversed(below)
        folders = set(below)
        for entry in kept:
            if entry.path not in folders and promises_image(entry.name):
                yield Answer(file=entry.path)


def _paths(listed: BinaryIO, null: bool) -> Iterator[str]:
    """Paths from a stream, each as soon as it is whole."""
    end = b"\0" if null else b"\n"
    read = getattr(listed, "read1", listed.read)
    rest = b""
    while chunk := read(_READ_BYTES):
        *whole, rest = (rest + chunk).split(end)
        yield from filter(None, (_path(each, null) for each in whole))
    yield from filter(None, (_path(each, null) for each in [rest]))


def _path(raw: bytes, null: bool) -> str:
    if null:
        return os.fsdecode(raw)
    if b"\0" in raw:
        raise UsageError("the paths on standard input are separated by NUL bytes: give -0 too")
    return os.fsdecode(raw.removesuffix(b"\r"))
