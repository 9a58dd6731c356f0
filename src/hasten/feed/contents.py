"""What arrays and tensors hold: all of it where they are small, here and there where they are not.

What is written by `x.data`, `x.numpy()`, NumPy itself or a fused optimizer leaves no other trace.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hasten.feed.buffers import read_only

_LOOKED_AT = 64  # values of a large one, at the same places each time


def size_of(item: Any) -> int:
    """Of an array or of bytes, in bytes."""
    size: int = item.nbytes if isinstance(item, np.ndarray) else memoryview(item).nbytes
    return size


def of_bytes(item: Any, most_bytes: int) -> bytes:
    """Of an array or of bytes; of one of more than `most_bytes`, some values."""
    if size_of(item) <= most_bytes:
        return item.tobytes() if hasattr(item, "tobytes") else bytes(item)
    if not isinstance(item, np.ndarray):
        values = memoryview(item)
        return values[:: max(1, len(values) // _LOOKED_AT)].tobytes()
    return b"" if item.dtype.hasobject else item[_spread(item.shape)].tobytes()


def of_tensor(item: torch.Tensor, most_bytes: int) -> tuple[bytes | None, int]:
    """Of a tensor on the host; of one of more than `most_bytes`, some values.

    Returns:
        The values, or None where they cannot be read, and how many bytes were.
    """
    with torch._C.DisableTorchFunctionSubclass():
        odd = item.is_quantized or item.is_conj() or item.is_neg()
        if item.device.type != "cpu" or odd or item.layout is not torch.strided:
            return None, 0
        flat = item.detach()
        if item.numel() * item.element_size() > most_bytes:
            flat = flat[_spread(tuple(item.shape))]
        values = read_only(flat.contiguous()).tobytes()
        return values, len(values)


def _spread(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices to some places that lie apart, as many along each dimension."""
    each = max(2, int(_LOOKED_AT ** (1 / max(1, sum(size > 1 for size in shape)))))
    return tuple(slice(None, None, max(1, math.ceil(size / each))) for size in shape)
