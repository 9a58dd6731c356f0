"""Whether two batches are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch


def identical(a: Any, b: Any) -> bool:
    """Same nesting, types and values; tensors and arrays in every bit, NaNs included.

    Other objects by their ``==``; what has none of its own, or cannot be compared, is never the
    same.
    """
    try:
        return _identical(a, b)
    except Exception:  # noqa: BLE001 - of an `==` that raises or is no truth, as of data frames
        return False


def _identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype == object:
            return a.shape == b.shape and identical(a.tolist(), b.tolist())
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and a.hex() == b.hex()
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.layout, a.device) != (b.dtype, b.layout, b.device) or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return identical(a.unbind(), b.unbind())
    if a.shape != b.shape:
        return False
    if a.layout is not torch.strided:
        return bool(torch.equal(a.to_dense(), b.to_dense()))
    if a.device.type == "meta":
        return False
    if a.stride() != b.stride() or a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return False
    if a.is_quantized or not a.numel():
        return bool(torch.equal(a, b))
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return bool(torch.equal(bits[0], bits[1]))
