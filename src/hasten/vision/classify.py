"""A trained image classifier, loaded from its files alone and ready to be asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hasten import devices
from hasten.devices import runtime
from hasten.errors import HastenError, OutOfDeviceMemory, UsageError
from hasten.train import precision as precisions
from hasten.train import weights
from hasten.train.precision import Precision
from hasten.vision import models, trained
from hasten.vision.data import Preparation
from hasten.vision.facts import Facts, Given, allowed_file
from hasten.vision.resizing import resized

Image = str | Path | Tensor | NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """A class, and how probable the model holds it to be."""

    label: str
    probability: float
    """0 to 1; those of all classes add up to 1."""

    def to_json(self) -> dict[str, Any]:
        """As ``hasten predict --json`` has it."""
        return {"class": self.label, "probability": self.probability}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one image."""

    top: tuple[Guess, ...]
    """The most probable classes, most probable first; equal ones in the classes' order."""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.top[0].label

    @property
    def probability(self) -> float:
        """Of :attr:`label`."""
        return self.top[0].probability


@dataclass(frozen=True, kw_only=True, eq=False)
class Classifier:
    """A trained model on its device, with what it was trained to know; made by :func:`load`."""

    model: nn.Module
    """In eval mode, on ``device``, its weights in float32."""
    facts: Facts
    device: torch.device
    precision: Precision
    """What forward passes compute at."""
    path: Path
    """The checkpoint's folder or the file that the weights come from."""
    about: str
    """Which one it is, in a few words."""
    notes: tuple[str, ...] = ()
    """What is worth telling a person of the loading."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.facts.classes

    @property
    def preparation(self) -> Preparation:
        """How an image file is made into what the model is given: as in validation."""
        return self.facts.preparation

    def predict(
        self, images: Image | Iterable[Image], top: int = 5, *, batch_size: int = 64
    ) -> list[Prediction]:
        """Classify images.

        Args:
            images: one or several, each a path, or uint8 pixels: a tensor [C, H, W] or an array
                [H, W, C], C being the model's 1 or 3. A tensor [B, C, H, W] is several. All are
                resized and cropped as validation images were.
            top: classes to give for each, at least 1; of fewer classes all are given.
            batch_size: images at once.

        Returns:
            One for each image, in their order.

        Raises:
            DataError: a file cannot be used (a :class:`hasten.vision.decode.ImageError`).
            UsageError: pixels of another kind, or ``top`` or ``batch_size`` below 1.
            HastenError: the model fails, or its output is NaN or infinite.
        """
        check_count(top, "top")
        check_count(batch_size, "batch_size")
        several = [images] if isinstance(images, (str, Path)) or _is_one(images) else images
        waiting, found = iter(several), list[Prediction]()
        while batch := [self.prepare(image) for image in islice(waiting, batch_size)]:
            for row in self.probabilities(torch.stack(batch)):
                if not torch.isfinite(row).all():
                    raise HastenError(
                        f"the output of {self.path} for image {len(found) + 1} is NaN or infinite"
                    )
                found.append(self.prediction(row, top))
        return found

    def prepare(self, image: Image) -> Tensor:
        """One image as validation images were: uint8 [C, S, S] on the host.

        Raises:
            DataError: the file cannot be used.
            UsageError: it is neither a path nor pixels of the right kind.
        """
        if isinstance(image, (str, Path)):
            return self.preparation(image)
        pixels = _pixels(image)
        channels = self.preparation.channels
        if pixels.shape[0] != channels or not pixels.numel():
            raise UsageError(
                f"the model takes images of {channels} channel(s), this one is [C, H, W] ="
                f" {list(pixels.shape)}"
            )
        crop = self.preparation.crop(*pixels.shape[1:])
        rows, columns = (
            slice(crop.top, crop.top + crop.height),
            slice(crop.left, crop.left + crop.width),
        )
        part = pixels[:, rows, columns].permute(1, 2, 0).cpu().contiguous().numpy()
        return resized(part, self.preparation.size)

    @torch.inference_mode()
    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities of all classes: float32 [B, classes] on the host.

        Args:
            images: uint8 [B, C, S, S], as :meth:`prepare` gives them, on any device.

        Raises:
            OutOfDeviceMemory: the batch does not fit on the device.
            HastenError: the model fails on it or gives something else than scores.
        """
        with explained(self.device, len(images)):
            batch = devices.move((images, images.new_zeros(len(images))), self.device)
            data, _ = self.facts.transform(batch, None)
            with self.precision.autocast(self.device):
                scores = self._scores(data)
            return scores.float().softmax(dim=1).cpu()

    def prediction(self, probabilities: Tensor, top: int) -> Prediction:
        """The most probable classes of one image.

        Args:
            probabilities: float32 [classes], on the host.
            top: how many, at most.
        """
        values, labels = torch.sort(probabilities, descending=True, stable=True)
        pairs = zip(labels[:top].tolist(), values[:top].tolist(), strict=True)
        return Prediction(
            top=tuple(Guess(label=self.classes[k], probability=value) for k, value in pairs)
        )

    def _scores(self, data: Tensor) -> Tensor:
        try:
            scores = self.model(data)
        except Exception as error:  # the model may be code of the user's
            if runtime.is_out_of_memory(error):
                raise
            if "same device" in str(error):
                devices.same_device(model=self.model, images=data)
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise HastenError(
                f"the model {self.facts.architecture['name']} fails on images"
                f" {list(data.shape)}: {first}"
            ) from error
        expected = (len(data), len(self.classes))
        if not isinstance(scores, Tensor) or scores.shape != expected:
            what = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise HastenError(
                f"the model {self.facts.architecture['name']} gives {what} for images"
                f" {list(data.shape)}, not scores {list(expected)}"
            )
        return scores


def load(
    path: str | Path,
    device: str | torch.device | int | None = "auto",
    *,
    which: str | None = None,
    precision: str = "auto",
    given: Given | None = None,
) -> Classifier:
    """Load a trained classifier. No code from its files is run.

    Args:
        path: a run's folder, a checkpoint's, or a file of weights (``model.safetensors``, or
            what ``torch.save(model.state_dict(), …)`` wrote).
        device: where to; ``auto`` for the best there is.
        which: of a run's checkpoints the ``best`` (also None) or the ``last``.
        precision: ``auto`` as it was trained where the device does that well, else float32; or
            ``float32``, ``bfloat16``, ``float16``.
        given: what weights that come alone are for; and the permission to run the file that a
            model was made by.

    Raises:
        CheckpointError: nothing there, broken, altered, unsafe, or it does not fit the model.
        UsageError: facts are needed and not given, or contradict the checkpoint.
        DeviceUnavailable: there is no such device here.
        HastenError: the model fails on images of its size.
    """
    given = given or Given()
    target = devices.device(device)
    found = trained.find(path, which, given)
    facts = found.facts
    allowed = allowed_file(facts, given, str(found.path)) if found.complete else given.model
    chosen = settle(precision, facts, target)
    model = models.from_description(facts.architecture, allow_file=allowed)
    notes = weights.load_into(model, found.state, source=str(found.path))
    if not found.complete and given.mean is None:
        notes = [*notes, "no --mean and --std given: pixels are only scaled to 0..1"]
    devices.move(model, target)
    precisions.set_layout(model, chosen.channels_last)
    classifier = Classifier(
        model=model.eval(),
        facts=facts,
        device=target,
        precision=chosen,
        path=found.path,
        about=found.about,
        notes=tuple(notes),
    )
    size = facts.preparation.size
    # One empty image: what is wrong with the model is said here, before any work was done.
    classifier.probabilities(torch.zeros(1, facts.preparation.channels, size, size).byte())
    return classifier


def settle(asked: str, facts: Facts, device: torch.device) -> Precision:
    """The precision to compute at.

    Raises:
        UsageError: ``asked`` is unknown, or the device cannot compute in it.
    """
    name = precisions.check(asked, device)
    kept = facts.precision or Precision(name="float32")
    if name != "auto":
        return Precision(name=name, channels_last=kept.channels_last)
    if kept.name == "float32":
        return Precision(name="float32", channels_last=kept.channels_last)
    there = device.type == (facts.device or "").split(":")[0]
    able = runtime.autocast_dtypes(device) if there else runtime.fast_dtypes(device)
    if kept.dtype in able:
        return Precision(name=kept.name, channels_last=kept.channels_last, reason="as trained")
    reason = f"trained in {kept.name}, which {runtime.name(device)} does not compute in hardware"
    return Precision(name="float32", channels_last=kept.channels_last, reason=reason)


@contextmanager
def explained(device: torch.device, batch_size: int) -> Iterator[None]:
    """Inside, out-of-memory errors say what to do.

    Raises:
        OutOfDeviceMemory: instead of torch's own.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, HastenError) or not runtime.is_out_of_memory(error):
            raise
        advice = f"; give a --batch-size below {batch_size}" if batch_size > 1 else ""
        raise OutOfDeviceMemory(
            f"a batch of {batch_size} does not fit into the memory of {device}"
            f" ({runtime.name(device)}){advice}"
        ) from error


def check_count(value: object, name: str) -> None:
    """Refuse what is no whole number from 1 up.

    Raises:
        UsageError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}: a whole number from 1 up")


def _pixels(image: object) -> Tensor:
    """A uint8 array [H, W] or [H, W, C], or tensor [C, H, W], as uint8 [C, H, W]."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        # A copy: arrays may be read-only or run backwards, as BGR turned to RGB does.
        pixels = torch.from_numpy(np.array(image, order="C"))
        return pixels[None] if image.ndim == 2 else pixels.permute(2, 0, 1)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.dim() == 3:
        return image
    kind = type(image).__name__
    if isinstance(image, (Tensor, np.ndarray)):
        kind = f"{kind} of {image.dtype}, {list(image.shape)}"
    raise UsageError(
        f"an image is a path, a uint8 tensor [C, H, W] or a uint8 array [H, W, C], not a {kind}"
    )


def _is_one(images: object) -> bool:
    return isinstance(images, (Tensor, np.ndarray)) and images.ndim in (2, 3)
