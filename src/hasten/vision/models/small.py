"""A small CNN that learns much for its cost on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from hasten.errors import UsageError

SMALLEST = 8


class Small(nn.Module):
    """Three stages of 3×3 convolutions with batch normalisation, then an average and one layer.

    Takes images of 8×8 and up of any number of channels.

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
        first, second, third = widths
        self.features = nn.Sequential(
            _block(channels, first),
            nn.MaxPool2d(2),
            _block(first, second),
            nn.MaxPool2d(2),
            _block(second, third),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(third, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores [B, classes] of images [B, channels, image_size, image_size] (float)."""
        return self.head(self.features(images).flatten(1))  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
