"""Sparse tensors of the device: COO, CSR, CSC, BSR and BSC, as dense parts on the device.

A sparse tensor is a few dense ones (indices, values) and a size. PyTorch makes one of the spare
backend of parts that lie there, so that it crosses the border part by part, without copying.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current
from hasten.simulate.backend import BACKEND, MOST_DEVICES, on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COO = torch.sparse_coo
LAYOUTS = frozenset(
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
"""The layouts that a tensor of the device may have beside the strided one."""
_DEVICES = [torch.device(BACKEND, index) for index in range(MOST_DEVICES)]
_CPU = torch.device("cpu")
_raw_device = torch._C.TensorBase.device.__get__
_parse: Any = torch._C._parse_dispatch_key
_KEYS = {
    "SparsePrivateUse1": torch._C.DispatchKeySet(_parse("SparseCPU")),
    "SparseCsrPrivateUse1": torch._C.DispatchKeySet(_parse("SparseCsrCPU")),
}
BACKENDS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
"""The keys of sparse tensors of the device, and those of the CPU's kernels for each."""

# What asks for parts, or puts a sparse tensor together of parts: PyTorch's own code does it for
# parts of any device.
_STRUCTURE = frozenset(
    [
        "_coalesced_",
        "_dimI",
        "_dimV",
        "_indices",
        "_nnz",
        "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_values",
        "ccol_indices",
        "clone",
        "col_indices",
        "copy_",
        "copy_sparse_to_sparse_",
        "crow_indices",
        "dense_dim",
        "empty.memory_format",
        "empty_like",
        "indices",
        "is_coalesced",
        "is_pinned",
        "resize_as_sparse_",
        "row_indices",
        "sparse_dim",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "values",
        "zero_",
    ]
)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Let a device be the current one: a sparse tensor is begun with empty parts on that."""
    thread = current.thread
    before = thread.device
    if device.type == BACKEND and device.index is not None:
        thread.device = device.index
    try:
        yield
    finally:
        thread.device = before


def structural(namespace: str, name: str, key: str) -> Callable[..., Any] | None:
    """PyTorch's own kernel for what only asks a sparse tensor for its parts, None for the rest."""
    if namespace != "aten" or name not in _STRUCTURE:
        return None
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = _KEYS[key]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if current.require().many:
            with _on(kwargs.get("device") or _raw_device(args[0])):
                return operator.redispatch(keys, *args, **kwargs)
        return operator.redispatch(keys, *args, **kwargs)

    return kernel


_coo_keys = _KEYS["SparsePrivateUse1"]
_csr_keys = _KEYS["SparseCsrPrivateUse1"]
_indices = torch.ops.aten._indices.default
_values = torch.ops.aten._values.default
_coalesced = torch.ops.aten.is_coalesced.default
_make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_compress = torch.ops.aten._sparse_compressed_tensor_unsafe.default
_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one of any device is made of: indices, then values."""
    if x.layout is _COO:
        return [_indices.redispatch(_coo_keys, x), _values.redispatch(_coo_keys, x)]
    aten = torch.ops.aten
    if x.layout in _ROWS:
        names: tuple[Any, ...] = (aten.crow_indices, aten.col_indices, aten.values)
    else:
        names = (aten.ccol_indices, aten.row_indices, aten.values)
    return [name.default.redispatch(_csr_keys, x) for name in names]


def _of_parts(x: torch.Tensor, found: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A sparse tensor like `x` of other parts."""
    made: torch.Tensor
    kind = {"dtype": x.dtype, "layout": x.layout, "device": device}
    if x.layout is not _COO:
        made = _compress(*found, x.shape, **kind)
        return made
    with _on(device):
        made = _make.redispatch(
            _coo_keys,
            x.sparse_dim(),
            x.dense_dim(),
            x.shape,
            *found,
            **kind,
            is_coalesced=_coalesced.redispatch(_coo_keys, x),
        )
    return made


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A sparse host tensor like a simulated one, in memory of its own.

    Operators that write a sparse tensor resize its parts, which lent memory does not allow.
    """
    return _of_parts(x, [on_host(part).clone() for part in parts(x)], _CPU)


def to_device(
    x: torch.Tensor, index: int, adopt: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A sparse tensor of a device over the memory of a host one, whose parts `adopt` takes."""
    return _of_parts(x, [adopt(part) for part in parts(x)], _DEVICES[index])
