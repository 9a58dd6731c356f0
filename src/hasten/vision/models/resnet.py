"""Residual networks of 18, 34 and 50 layers, sized to the image."""

from __future__ import annotations

import torch
from torch import nn

LARGEST_SMALL_IMAGE = 64
"""Up to this side, the first convolution keeps the size; above it, it and a pool divide by four."""


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3(width, width, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, width, stride)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, inputs, H, W] to [B, width, H/stride, W/stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 (with the stride) and a 1×1 convolution beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, outputs, stride)
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [B, inputs, H, W] to [B, 4*width, H/stride, W/stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + self.shortcut(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """The residual network of He et al. (2015), with the stride on the 3×3 convolution.

    The last normalisation of each block starts at zero, so that each block starts as its shortcut.
    """

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        classes: int = 1000,
        channels: int = 3,
        image_size: int = 224,
    ) -> None:
        super().__init__()
        if image_size <= LARGEST_SMALL_IMAGE:
            self.conv1 = _conv3(channels, 64, 1)
            self.pool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
            self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        stages: list[nn.Module] = []
        inputs = 64
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            blocks: list[nn.Module] = []
            for number in range(depth):
                stride = 2 if index > 0 and number == 0 else 1
                blocks.append(block(inputs, width, stride))
                inputs = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores [B, classes] of images [B, channels, image_size, image_size] (float)."""
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet18(*, classes: int, channels: int, image_size: int) -> ResNet:
    """18 layers; 11,689,512 parameters for 1000 classes of 224×224 colour images."""
    return ResNet(Basic, (2, 2, 2, 2), classes=classes, channels=channels, image_size=image_size)


def resnet34(*, classes: int, channels: int, image_size: int) -> ResNet:
    """34 layers; 21,797,672 parameters for 1000 classes of 224×224 colour images."""
    return ResNet(Basic, (3, 4, 6, 3), classes=classes, channels=channels, image_size=image_size)


def resnet50(*, classes: int, channels: int, image_size: int) -> ResNet:
    """50 layers; 25,557,032 parameters for 1000 classes of 224×224 colour images."""
    return ResNet(
        Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels, image_size=image_size
    )


def _conv3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(outputs),
    )
