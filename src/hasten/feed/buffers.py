"""Tensors as numpy arrays, whatever their type, and host memory that is used again when free."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

# For types that numpy lacks, integers of the same size carry the bits.
_STAND_IN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_NUMPY = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def array(tensor: torch.Tensor) -> Array:
    """A host tensor's memory as an array of the same shape, its bits unchanged."""
    if tensor.dtype in _IN_NUMPY:
        return tensor.numpy()
    return tensor.view(_STAND_IN[tensor.element_size()]).numpy()


def read_only(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous host tensor that is somebody's, for reading alone.

    `Tensor.numpy` would note in it that NumPy may write there from now on (`Table.traceless`).
    """
    if not tensor.numel():
        return array(torch.empty_like(tensor))
    return np.asarray(_Lent(tensor))


class _Lent:
    """Keeps the tensor for as long as an array looks at it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "typestr": array(torch.empty(0, dtype=tensor.dtype, device="cpu")).dtype.str,
            "version": 3,
        }


def tensor_of(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """The tensor over an array that `array` (or a copy of what it gave) is."""
    found = torch.from_numpy(values)
    return found if found.dtype == dtype else found.view(dtype)


class Ring:
    """Batch memory on the host, given again once nobody holds it.

    The kernel hands out fresh memory page by page, zeroed, which costs more than writing a batch
    into memory that was used before. A tensor over an array holds a reference to it, and so does
    every view, autograd graph or exported buffer: the array's reference count tells whether a
    batch may still be looked at, so a batch that the loop keeps is never overwritten.
    """

    def __init__(self, most: int) -> None:
        """`most`: arrays kept for use again."""
        self._most = most
        self._arrays: list[Array] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for a tensor; may be asked for by any thread.

        A shorter batch (fewer rows, the rest of the shape the same) is the beginning of a longer
        one's memory.
        """
        if 0 in shape or not shape:
            return torch.empty(shape, dtype=dtype, device="cpu")
        kind = array(torch.empty(0, dtype=dtype, device="cpu")).dtype
        with self._lock:
            if _counts_are_exact():
                for place in range(len(self._arrays)):
                    if _holders(self._arrays, place) == _IDLE:
                        found = self._arrays[place]
                        if found.dtype == kind and _serves(found.shape, shape):
                            return tensor_of(found[: shape[0]], dtype)
            fresh: Array = np.empty(shape, kind)
            if len(self._arrays) >= self._most:
                self._drop_an_idle_one()
            if len(self._arrays) < self._most:
                self._arrays.append(fresh)
            return tensor_of(fresh, dtype)

    def _drop_an_idle_one(self) -> None:
        for place in range(len(self._arrays)):
            if _holders(self._arrays, place) == _IDLE:
                del self._arrays[place]
                return


def _serves(there: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Not for much fewer rows: a small batch that is kept would hold the memory of a large one."""
    return there[1:] == wanted[1:] and wanted[0] <= there[0] <= 2 * wanted[0]


def _holders(arrays: list[Array], place: int) -> int:
    return sys.getrefcount(arrays[place])


def _counts_are_exact() -> bool:
    """Not on a Python without the global lock, which counts references elsewhere too."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


_IDLE = _holders([np.empty(1)], 0)
