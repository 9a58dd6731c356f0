"""What transforms of images have in common: batches or single images in, checks, exact figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from hasten.devices import runtime
from hasten.errors import UsageError

Batch = tuple[Tensor, Tensor]

_CHUNK_ELEMENTS = 1 << 20  # on the host: what is worked on at once stays in the processor's cache


class Random(Protocol):
    """Where transforms get their randomness; :class:`hasten.feed.SampleRandom` is one."""

    def uniform(self, columns: int) -> Tensor:
        """Float32 [B, columns] in [0, 1) on the batch's device; each call draws anew."""
        ...


class Transform(Protocol):
    """Any transform of images."""

    @overload
    def __call__(self, batch: Tensor, rng: Random | None) -> Tensor: ...
    @overload
    def __call__(self, batch: Batch, rng: Random | None) -> Batch: ...
    def to_config(self) -> dict[str, Any]:
        """Return what :func:`hasten.vision.transforms.from_config` rebuilds it from."""
        ...


class PixelTransform:
    """A transform that changes images and leaves what comes with them as it is.

    Called with a batch ``(images [B, C, H, W], labels, …)`` it gives such a batch; with images
    [B, C, H, W] alone, images; with one image [C, H, W], one image, the same bits as in a batch.
    ``rng`` has as many samples as there are images. The given images are left as they were.
    """

    @overload
    def __call__(self, batch: Tensor, rng: Random | None = None) -> Tensor: ...
    @overload
    def __call__(self, batch: Batch, rng: Random | None = None) -> Batch: ...
    def __call__(self, batch: Any, rng: Random | None = None) -> Any:
        """Change the images.

        Raises:
            UsageError: they are of the wrong shape, or the transform draws and ``rng`` is None.
        """
        if isinstance(batch, Tensor):
            return (
                self._images(batch[None], rng)[0] if batch.dim() == 3 else self._images(batch, rng)
            )
        images, *rest = batch
        return (self._images(images, rng), *rest)

    def _images(self, images: Tensor, rng: Random | None) -> Tensor:
        if images.dim() != 4:
            raise UsageError(
                f"{type(self).__name__} takes images [B, C, H, W], not {list(images.shape)}"
            )
        return self.change(images, rng)

    def change(self, images: Tensor, rng: Random | None) -> Tensor:
        """The changed images, [B, C, H, W]."""
        raise NotImplementedError


def need(rng: Random | None, who: object) -> Random:
    """The rng.

    Raises:
        UsageError: there is none.
    """
    if rng is None:
        raise UsageError(f"{who} is random and needs an rng; give one, or leave it out")
    return rng


def whole(value: object, what: str, *, least: int) -> int:
    """The value, a whole number.

    Raises:
        UsageError: it is none, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is a whole number from {least} up, not {value!r}")
    return value


def finite(value: float, what: str) -> float:
    """The value, a finite number.

    Raises:
        UsageError: it is not finite.
    """
    if not math.isfinite(value):
        raise UsageError(f"{what} is a finite number, not {value!r}")
    return value


def within(value: float, what: str, least: float, most: float) -> float:
    """The value as a float.

    Raises:
        UsageError: it is not within ``least``..``most``.
    """
    number = float(value)
    if not least <= number <= most:
        raise UsageError(f"{what} is within {least:g}..{most:g}, not {value!r}")
    return number


def in_parts(work: Callable[..., Tensor], images: Tensor, *others: Tensor) -> Tensor:
    """``work`` on images and tensors that go with them, on the host a few images at a time.

    Fresh memory for a whole batch, and another one for each step, costs more than the work.
    """
    rows = max(1, _CHUNK_ELEMENTS // max(1, images[0].numel())) if len(images) else 1
    if not runtime.is_host(images.device) or len(images) <= rows:
        return work(images, *others)
    parts = zip(*(torch.split(each, rows) for each in (images, *others)), strict=True)
    first = work(*next(parts))
    done = first.new_empty((len(images), *first.shape[1:]))
    done[:rows] = first
    for number, part in enumerate(parts, 1):
        done[number * rows : (number + 1) * rows] = work(*part)
    return done


def like(values: Tensor, images: Tensor) -> Tensor:
    """float32 values of pixels (0..255, or 0..1) as what the images are, rounded and clipped."""
    if images.is_floating_point():
        return values.clamp_(0, 1).to(images.dtype)
    return values.round_().clamp_(0, 255).to(images.dtype)


def top(images: Tensor) -> float:
    """The brightest value that a pixel may have: 255, or 1 of floating-point images."""
    return 1.0 if images.is_floating_point() else 255.0


def spread(drawn: Tensor) -> Tensor:
    """Draws in [0, 1) as ones in [-1, 1)."""
    return drawn * 2 - 1


def ratio(drawn: Tensor, most: float) -> Tensor:
    """Draws in [0, 1) as ratios from 1/most to most, as many above 1 as below.

    Of divisions alone, which every device does alike; logarithms differ in their last bits.
    """
    pole = (most + 1) / (most - 1)
    return (pole + spread(drawn)) / (pole - spread(drawn))
