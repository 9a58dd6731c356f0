"""Sample predictions for a report: images that a model got right, and those that it did not."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch

from hasten.devices import move
from hasten.observe.report import ReportData, SamplePrediction
from hasten.train import Trainer
from hasten.vision.data import ImageData
from hasten.vision.decode import ImageError

_LOOKED_AT = 512
_AT_ONCE = 32
_SHOWN = 12
_SIDE = 96  # pixels; small images are enlarged in whole steps, so that they stay sharp


@torch.no_grad()
def samples(trainer: Trainer, data: ImageData, transform: Any) -> list[SamplePrediction]:
    """Up to 12 validation images that the model classifies right and 12 that it does not.

    Args:
        trainer: with a run that has ended.
        data: what it was trained on.
        transform: from uint8 images to what the model takes.
    """
    run, model = trainer.run, trainer.model
    if run is None:
        return []
    name_of = getattr(data.val, "describe_sample", lambda index: f"image {index}")
    shelves: dict[bool, list[SamplePrediction]] = {True: [], False: []}
    wanted = _spread(len(data.val), _LOOKED_AT)  # type: ignore[arg-type]
    model.eval()
    for start in range(0, len(wanted), _AT_ONCE):
        if all(len(shelf) >= _SHOWN for shelf in shelves.values()):
            break
        read = _read(data.val, wanted[start : start + _AT_ONCE])
        if not read:
            continue
        batch = torch.stack([image for _, image, _ in read]), torch.tensor([o for *_, o in read])
        images, _ = transform(move(batch, run.device), None)
        with run.autocast():
            probabilities = model(images).float().softmax(dim=1).cpu()
        for (index, image, label), row in zip(read, probabilities, strict=True):
            best = int(row.argmax())
            shelf = shelves[best == label]
            if len(shelf) < _SHOWN:
                shelf.append(
                    SamplePrediction(
                        png=png(image),
                        label=data.classes[label],
                        predicted=data.classes[best],
                        probability=float(row[best]),
                        name=str(name_of(index)),
                    )
                )
    return shelves[True] + shelves[False]


def _read(dataset: Any, indices: list[int]) -> list[tuple[int, torch.Tensor, int]]:
    """(index, image, label) of those that can be read."""
    found = []
    for index in indices:
        try:
            image, label = dataset[index]
        except ImageError:
            continue  # counted and named where it was validated on
        found.append((index, image, int(label)))
    return found


def page(known: ReportData, trainer: Trainer, data: ImageData, transform: Any) -> ReportData:
    """The report's data with class names, image counts, samples and skipped files.

    Args:
        known: what the run knows.
        trainer: see :func:`samples`.
        data: see there.
        transform: see there.
    """
    notes = [line for line in data.problems.summary().splitlines() if line.strip()]
    return dataclasses.replace(
        known,
        classes=data.classes,
        train_images=sum(data.train_counts),
        val_images=sum(data.val_counts),
        samples=samples(trainer, data, transform),
        notes=[*known.notes, *notes],
    )


def png(image: torch.Tensor) -> bytes:
    """A uint8 [C, H, W] image, C being 1 or 3, as a PNG file's bytes."""
    from PIL import Image

    array = image.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array)
    factor = max(1, _SIDE // max(picture.size))
    if factor > 1:
        size = (picture.width * factor, picture.height * factor)
        picture = picture.resize(size, Image.Resampling.NEAREST)
    else:
        picture.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _spread(length: int, most: int) -> list[int]:
    """Indices spread over the whole, as a folder's images are sorted by class."""
    step = max(1, length // most)
    return sorted(range(0, length, step), key=lambda index: (index * 2654435761) % 2**32)[:most]
