"""Copies among devices for ``nn.DataParallel``: what `torch.nn.parallel.comm` does on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from hasten.simulate import current
from hasten.simulate.backend import BACKEND
from hasten.simulate.naming import checked, index_of_name, is_simulated
from hasten.simulate.streams import default_stream


def _indices(devices: Any) -> list[int]:
    found = []
    for device in devices:
        index = device if isinstance(device, int) else index_of_name(device)
        found.append(-1 if index is None or index == -1 else checked(index))
    return found


def _on(x: torch.Tensor, index: int) -> torch.Tensor:
    if index < 0:
        return x.to("cpu")
    return x.to(torch.device(BACKEND, index))


def _broadcast(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> Any:
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} "
            f"and out={out}"
        )
    if devices is not None:
        return tuple(_on(tensor, index) for index in _indices(devices))
    for x in out:
        x.copy_(tensor)
    return tuple(out)


def _broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> Any:
    return [[_on(x, index) for x in tensors] for index in _indices(devices)]


def _reduce_add(inputs: Any, destination: Any = None) -> torch.Tensor:
    index = current.thread.device if destination is None else _indices([destination])[0]
    shape = inputs[0].size()
    for x in inputs:
        if not is_simulated(x):
            raise AssertionError("reduce_add expects all inputs to be on GPUs")
        if x.size() != shape:
            raise ValueError(
                f"input has invalid size: got {tuple(x.size())}, expected {tuple(shape)}"
            )
    total = _on(inputs[0], index).clone()
    for x in inputs[1:]:
        total.add_(_on(x, index))
    return total


def _reduce_add_coalesced(inputs: Any, destination: Any = None, buffer_size: int = 0) -> Any:
    return tuple(_reduce_add(list(same), destination) for same in zip(*inputs, strict=True))


def _scatter(
    tensor: Any,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> Any:
    if out is not None:
        parts = tensor.split([x.size(dim) for x in out], dim)
        return tuple(x.copy_(part) for x, part in zip(out, parts, strict=True))
    indices = _indices(devices)
    parts = (
        tensor.split(list(chunk_sizes), dim)
        if chunk_sizes is not None
        else tensor.chunk(len(indices), dim)
    )
    return tuple(_on(part, index) for part, index in zip(parts, indices, strict=False))


def _gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
    if out is not None:
        torch.cat([_on(x, current.require().index_of(out)) for x in tensors], dim, out=out)
        return out
    index = 0 if destination is None else _indices([destination])[0]
    return torch.cat([_on(x, index) for x in tensors], dim)


def _get_stream(device: torch.device) -> Any:
    index = index_of_name(device)
    return None if index is None else default_stream(torch.device("cuda", index))


FUNCTIONS: dict[str, Any] = {"_get_stream": _get_stream}
"""Set on `torch.nn.parallel._functions` while a simulation runs."""

COMM: dict[str, Any] = {
    "broadcast": _broadcast,
    "broadcast_coalesced": _broadcast_coalesced,
    "reduce_add": _reduce_add,
    "reduce_add_coalesced": _reduce_add_coalesced,
    "scatter": _scatter,
    "gather": _gather,
}
"""Set on `torch.nn.parallel.comm` while a simulation runs."""
