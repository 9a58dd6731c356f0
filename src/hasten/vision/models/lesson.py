"""The two-convolution network of CUDA lessons."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hasten.errors import UsageError

SMALLEST = 16
LARGEST = 512  # 22 million weights in the first linear layer alone


class Lesson(nn.Module):
    """Convolution 1→6, pool, convolution 6→12, pool, then 192→120→60→10 linear.

    On 28×28 images of one channel and ten classes it has 32,998 parameters in 10 tensors, as in
    the lessons; for others the first convolution, the first linear layer and the last adapt.

    Raises:
        UsageError: images below 16×16, of which nothing is left after the second convolution, or
            above 512×512, for which the first linear layer is absurdly large.
    """

    def __init__(self, *, classes: int = 10, channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        if image_size < SMALLEST:
            raise UsageError(
                f"the model 'lesson' needs images of {SMALLEST}×{SMALLEST} or more, these are "
                f"{image_size}×{image_size}; choose --model small"
            )
        if image_size > LARGEST:
            raise UsageError(
                f"the model 'lesson' takes images of at most {LARGEST}×{LARGEST}, these are "
                f"{image_size}×{image_size}; choose --model small or resnet18"
            )
        side = ((image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, kernel_size=5)
        self.conv2 = nn.Conv2d(6, 12, kernel_size=5)
        self.fc1 = nn.Linear(12 * side * side, 120)
        self.fc2 = nn.Linear(120, 60)
        self.out = nn.Linear(60, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores [B, classes] of images [B, channels, image_size, image_size] (float)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.out(x)  # type: ignore[no-any-return]
