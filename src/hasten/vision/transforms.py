"""What is done to images, in batches on the device or one by one: normalising and augmentation.

A transform is a callable ``(batch, rng) -> batch``. The batch is the ``(images, labels)`` that
the loader yields: images uint8 [B, C, H, W], which is what travels to the device, and labels
int64 [B]; or images alone, or a single one [C, H, W], which gives the same bits. ``rng`` is a
:class:`hasten.feed.SampleRandom`; everything random comes from ``rng.uniform(columns)``, so that
the same sample gets the same change in every batch, plan and process.
Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from hasten.devices import runtime
from hasten.errors import CheckpointError, UsageError
from hasten.feed.buffers import Ring

from .colour import ColourJitter, RandomErasing
from .geometry import RandomResizedCrop
from .operations import RandomOperations
from .transform_base import Batch, PixelTransform, Random, Transform, finite, need, whole

__all__ = [
    "Batch",
    "ColourJitter",
    "Compose",
    "Cutout",
    "Normalize",
    "Random",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomOperations",
    "RandomResizedCrop",
    "Transform",
    "from_config",
]

_NORMALISED_KEPT = 4  # batches whose memory waits to be used again
_CONFIG_DEPTH = 8  # of Compose inside Compose; a checkpoint's JSON is not trusted


class Normalize(PixelTransform):
    """uint8 [B, C, H, W] -> float32 [B, C, H, W] of ``(pixel / 255 - mean) / std`` a channel.

    Floating-point images are taken to be scaled to 0..1 already.

    Args:
        mean: one value a channel, of pixels scaled to 0..1.
        std: one value a channel, greater than 0.
        channels_last: write the result in the channels_last memory format.

    Raises:
        UsageError: the two differ in length, or a value cannot be used.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], *, channels_last: bool = False
    ) -> None:
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        self.channels_last = bool(channels_last)
        if not self.mean or len(self.mean) != len(self.std):
            raise UsageError(
                f"Normalize needs one mean and one std a channel, not {len(self.mean)} and "
                f"{len(self.std)}"
            )
        if not all(map(math.isfinite, self.mean)):
            raise UsageError(f"Normalize needs finite means, not {self.mean}")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise UsageError(f"Normalize needs each std to be finite and above 0, not {self.std}")
        self._constants: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}
        self._ring = Ring(most=_NORMALISED_KEPT)

    def _scale_and_shift(self, device: torch.device, from_bytes: bool) -> tuple[Tensor, Tensor]:
        # Kept for each device: building them anew would copy to the device, and wait, each batch.
        key = (device, from_bytes)
        if key not in self._constants:
            top = 255.0 if from_bytes else 1.0
            scale = [1 / (top * std) for std in self.std]
            shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
            self._constants[key] = (
                torch.tensor(scale, dtype=torch.float32, device=device).view(-1, 1, 1),
                torch.tensor(shift, dtype=torch.float32, device=device).view(-1, 1, 1),
            )
        return self._constants[key]

    def change(self, images: Tensor, rng: Random | None = None) -> Tensor:
        """Normalise the images; draws nothing.

        Raises:
            UsageError: the images do not have this transform's number of channels.
        """
        if images.shape[1] != len(self.mean):
            raise UsageError(
                f"Normalize has statistics for {len(self.mean)} channel(s) but the images are "
                f"{list(images.shape)} [B, C, H, W]"
            )
        scale, shift = self._scale_and_shift(images.device, not images.is_floating_point())
        pixels = self._memory_for(images)
        # One image after another stays in the processor's cache. Not where PyTorch's threads share
        # the work, which would meet for each image.
        alone = runtime.is_host(images.device) and torch.get_num_threads() == 1
        for part, given in zip(*((pixels, images) if alone else ([pixels], [images])), strict=True):
            part.copy_(given).mul_(scale).add_(shift)
        return pixels

    def _memory_for(self, images: Tensor) -> Tensor:
        """float32 of the images' shape, on their device."""
        count, channels, height, width = images.shape
        order = (count, height, width, channels) if self.channels_last else tuple(images.shape)
        # On the host fresh memory costs four times what normalising does: it is used again once
        # nobody holds the batch. Devices' own allocators do that.
        if runtime.is_host(images.device) and type(images) is Tensor:
            pixels = self._ring.empty(order, torch.float32)
        else:
            pixels = images.new_empty(order, dtype=torch.float32)
        return pixels.permute(0, 3, 1, 2) if self.channels_last else pixels

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`from_config`."""
        return {
            "name": "normalize",
            "mean": list(self.mean),
            "std": list(self.std),
            "channels_last": self.channels_last,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "channels_last": self.channels_last}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["mean"], state["std"], channels_last=state["channels_last"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Normalize(mean={self.mean}, std={self.std}, channels_last={self.channels_last})"


class RandomHorizontalFlip(PixelTransform):
    """Mirror each image left to right with the given probability.

    Raises:
        UsageError: the probability is not within 0..1.
    """

    def __init__(self, probability: float = 0.5) -> None:
        self.probability = float(probability)
        if not 0 <= self.probability <= 1:
            raise UsageError(f"a flip's probability is within 0..1, not {probability}")

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Flip; one column is drawn."""
        flip = need(rng, self).uniform(1)[:, 0] < self.probability
        return torch.where(flip[:, None, None, None], images.flip(3), images)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`from_config`."""
        return {"name": "random_horizontal_flip", "probability": self.probability}

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip({self.probability})"


class RandomCrop(PixelTransform):
    """Shift each image by up to ``padding`` pixels each way; what comes in at the edge is ``fill``.

    Raises:
        UsageError: ``padding`` is below 1, or ``fill`` is not a finite number.
    """

    def __init__(self, padding: int, *, fill: float = 0) -> None:
        self.padding = whole(padding, "RandomCrop's padding", least=1)
        self.fill = finite(fill, "RandomCrop's fill")

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Crop; two columns are drawn."""
        count, _, height, width = images.shape
        places = 2 * self.padding + 1
        padded = torch.nn.functional.pad(images, [self.padding] * 4, value=self.fill)
        # A view with every crop of every image; the index then copies one crop of each, whole
        # rows at a time. No loop, and no offset has to come back from the device.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        offset = (need(rng, self).uniform(2) * places).long().clamp_(max=places - 1)
        which = torch.arange(count, device=images.device)
        return crops[which, :, offset[:, 0], offset[:, 1]]

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`from_config`."""
        return {"name": "random_crop", "padding": self.padding, "fill": self.fill}

    def __repr__(self) -> str:
        return f"RandomCrop({self.padding}, fill={self.fill})"


class Cutout(PixelTransform):
    """Blank a square of ``size`` pixels in each image, centred anywhere, clipped at the edges.

    Raises:
        UsageError: ``size`` is below 1, or ``fill`` is not a finite number.
    """

    def __init__(self, size: int, *, fill: float = 0) -> None:
        self.size = whole(size, "Cutout's size", least=1)
        self.fill = finite(fill, "Cutout's fill")

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """Blank; two columns are drawn."""
        drawn = need(rng, self).uniform(2)
        masks = []
        for column, length in enumerate(images.shape[2:]):
            start = (drawn[:, column] * length).long().clamp_(max=length - 1) - self.size // 2
            place = torch.arange(length, device=images.device)[None] - start[:, None]
            masks.append((place >= 0) & (place < self.size))
        square = masks[0][:, None, :, None] & masks[1][:, None, None, :]
        return images.masked_fill(square, self.fill)

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`from_config`."""
        return {"name": "cutout", "size": self.size, "fill": self.fill}

    def __repr__(self) -> str:
        return f"Cutout({self.size}, fill={self.fill})"


class Compose:
    """Several transforms, one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = tuple(transforms)

    @overload
    def __call__(self, batch: Tensor, rng: Random | None = None) -> Tensor: ...
    @overload
    def __call__(self, batch: Batch, rng: Random | None = None) -> Batch: ...
    def __call__(self, batch: Any, rng: Random | None = None) -> Any:
        """Apply each in turn."""
        for transform in self.transforms:
            batch = transform(batch, rng)
        return batch

    def to_config(self) -> dict[str, Any]:
        """Return plain JSON values; see :func:`from_config`."""
        return {"name": "compose", "transforms": [each.to_config() for each in self.transforms]}

    def __repr__(self) -> str:
        return f"Compose({list(self.transforms)!r})"


def from_config(config: Mapping[str, Any]) -> Transform:
    """Rebuild a transform from what its ``to_config`` gave, as read from a checkpoint's JSON.

    Only hasten's own transforms are built; nothing named in the JSON is imported or run.

    Raises:
        CheckpointError: the name is unknown, or an argument is missing, unknown or unusable.
    """
    return _from_config(config, _CONFIG_DEPTH)


def _compose(depth: int, transforms: object) -> Transform:
    if not isinstance(transforms, list):
        raise TypeError(f"transforms is a list, not {transforms!r}")
    return Compose([_from_config(each, depth - 1) for each in transforms])


_KNOWN: dict[str, Callable[..., Transform]] = {
    "colour_jitter": ColourJitter,
    "cutout": Cutout,
    "normalize": Normalize,
    "random_crop": RandomCrop,
    "random_erasing": RandomErasing,
    "random_horizontal_flip": RandomHorizontalFlip,
    "random_operations": RandomOperations,
    "random_resized_crop": RandomResizedCrop,
}


def _from_config(config: object, depth: int) -> Transform:
    if not isinstance(config, Mapping):
        raise CheckpointError(f"a transform is stored as a JSON object, not {config!r:.200}")
    if depth < 0:
        raise CheckpointError("the stored transforms are nested too deeply to be ours")
    arguments = dict(config)
    name = arguments.pop("name", None)
    try:
        if name == "compose":
            return _compose(depth, **arguments)
        if isinstance(name, str) and name in _KNOWN:
            return _KNOWN[name](**arguments)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the stored transform {config!r:.200} cannot be used: {error}"
        ) from (error)
    known = ", ".join(sorted([*_KNOWN, "compose"]))
    raise CheckpointError(
        f"the stored transform {name!r:.100} is unknown to this version of hasten; known: {known}. "
        "Use the version that wrote the checkpoint, or train anew"
    )
