"""Sample predictions for a report: images that a model got right, and those that it did not."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch

from hasten.devices import move
from hasten.observe.report import SamplePrediction, write_report
from hasten.train import Result, Trainer
from hasten.vision.data import ImageData
from hasten.vision.decode import ImageError

_LOOKED_AT = 512
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
    right: list[SamplePrediction] = []
    wrong: list[SamplePrediction] = []
    model.eval()
    for index in _spread(len(data.val), _LOOKED_AT):  # type: ignore[arg-type]
        if len(right) >= _SHOWN and len(wrong) >= _SHOWN:
            break
        try:
            image, label = data.val[index]
        except ImageError:
            continue  # counted and named where it was validated on
        batch = (image.unsqueeze(0), torch.tensor([int(label)]))
        images, _ = transform(move(batch, run.device), None)
        with run.autocast():
            probabilities = model(images).float().softmax(dim=1)[0]
        best = int(probabilities.argmax())
        shelf = right if best == int(label) else wrong
        if len(shelf) < _SHOWN:
            shelf.append(
                SamplePrediction(
                    png=png(image),
                    label=data.classes[int(label)],
                    predicted=data.classes[best],
                    probability=float(probabilities[best]),
                    name=str(name_of(index)),
                )
            )
    return right + wrong


def finish_report(result: Result, data: ImageData, shown: list[SamplePrediction]) -> Result:
    """The result with a report that has class names, image counts, samples and skipped files."""
    notes = [line for line in data.problems.summary().splitlines() if line.strip()]
    page = dataclasses.replace(
        result.report_data,
        classes=data.classes,
        train_images=sum(data.train_counts),
        val_images=sum(data.val_counts),
        samples=shown,
        notes=[*result.report_data.notes, *notes],
    )
    if result.folder is not None:
        write_report(result.folder, page)
    return dataclasses.replace(result, report_data=page)


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
