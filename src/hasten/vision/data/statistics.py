"""Figures of a set of images: channel mean and deviation, and the size to train at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CHUNK_PIXELS = 1 << 22
_LEAST_STD = 1 / 255  # images of one colour would otherwise be divided by nothing


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels scaled to 0..1.

    Exact: they are sums of whole numbers, not rounded on the way.

    Args:
        images: uint8 [N, C, H, W], N at least 1.
    """
    channels = images.shape[1]
    total = np.zeros(channels, dtype=np.int64)
    squares = np.zeros(channels, dtype=np.int64)
    rows = max(1, _CHUNK_PIXELS // max(1, images[0].numel()))
    for chunk in torch.split(images, rows):
        for channel in range(channels):
            pixels = chunk[:, channel].reshape(-1)
            # 255**2 * 2**22 does not fit float32's or int32's whole numbers; count the values.
            histogram = torch.bincount(pixels, minlength=256).numpy()
            values = np.arange(256, dtype=np.int64)
            total[channel] += histogram @ values
            squares[channel] += histogram @ (values * values)
    count = images.numel() // channels
    mean = total / count
    variance = np.maximum(squares / count - mean * mean, 0)
    std = np.maximum(np.sqrt(variance) / 255, _LEAST_STD)
    return tuple((mean / 255).tolist()), tuple(std.tolist())
