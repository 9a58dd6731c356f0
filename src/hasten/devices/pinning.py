"""Nested data in page-locked host memory, which devices copy from beside their computation."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from hasten.devices import runtime
from hasten.devices.holding import held
from hasten.devices.walking import Walk

T = TypeVar("T")

_SPARSE = {
    *(torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def pin(obj: T) -> T:
    """The same nest with its host tensors in page-locked memory; what is pinned already stays.

    Looks into what ``hasten.move`` looks into, and uses an object's own ``pin_memory``. Tensors
    of devices are left alone, as are those that PyTorch cannot pin (of MKL-DNN's layout).

    Raises:
        UsageError: a container holds itself.
        RuntimeError: no more memory can be locked.
    """
    return _Pin().visit(obj, "")  # type: ignore[no-any-return]


class _Pin(Walk):
    name = "hasten's pinning"

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        can_be = tensor.layout is torch.strided or tensor.layout in _SPARSE
        return tensor.pin_memory() if can_be and runtime.is_host(tensor.device) else tensor

    def container(self, obj: Any, path: str) -> Any:
        if isinstance(obj, torch.nn.Module | torch.optim.Optimizer):
            return obj
        own = getattr(obj, "pin_memory", None)
        if not callable(own):
            return super().container(obj, path)
        on_devices = any(not runtime.is_host(tensor.device) for tensor in held(obj).tensors)
        return obj if on_devices else own()
