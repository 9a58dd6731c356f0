"""A small CNN that learns much for its cost on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from hasten.errors import UsageError

SMALLEST = 8
_STEMS = {64: (3, 1), 128: (5, 2)}  # up to this side: the first convolution's kernel and stride
_LARGE_STEM = (7, 4)


class Small(nn.Module):
    """Four 3×3 convolutions with batch normalisation, the maximum of each feature, one layer.

    Takes images of 8×8 and up of any number of channels; above 64×64 the first convolution makes
    them smaller, so that the cost grows slowly. A pool stands before its normalisation and ReLU,
    which then have a quarter of the work; what is learnt is as good.

    Raises:
        UsageError: images below 8×8.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        channels: int = 1,
        image_size: int = 28,
        widths: tuple[int, int, int] = (32, 64, 128),
    ) -> None:
        super().__init__()
        if image_size < SMALLEST:
            raise UsageError(
                f"the model 'small' needs images of {SMALLEST}×{SMALLEST} or more, these are "
                f"{image_size}×{image_size}; choose --image-size {SMALLEST}"
            )
        stem = next((value for side, value in _STEMS.items() if image_size <= side), _LARGE_STEM)
        first, second, third = widths
        self.features = nn.Sequential(
            _block(channels, first, *stem, pool=True),
            _block(first, second, pool=True),
            _block(second, third),
            _block(third, third),
            nn.AdaptiveMaxPool2d(1),
        )
        self.head = nn.Linear(third, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores [B, classes] of images [B, channels, image_size, image_size] (float)."""
        return self.head(self.features(images).flatten(1))  # type: ignore[no-any-return]


def _block(
    inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1, *, pool: bool = False
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    ]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))
