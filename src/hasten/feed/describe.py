"""What can be told of a sample that failed: its file, the transform, the device it is on."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

_LISTS = ("samples", "imgs", "images", "files", "paths", "filenames", "file_names", "image_paths")
"""Attributes in which data sets keep their files, by the habit of torchvision and others."""

_COLLATED = (torch.Tensor, int, float, str, bytes, np.ndarray, np.number, np.bool_)

ON_HOST = (
    "Worker processes share no accelerator: leave samples on the host, and let "
    "Loader(...).to(device) move the batches"
)


NOTHING_IN_BATCH = (
    "the sampler gave a batch without indices, of which PyTorch's default collate function makes "
    "none: leave it out, or give a collate_fn that makes a batch of an empty list"
)


def describe(dataset: Any, index: Any) -> str:
    """Where the sample comes from (``cats/3.jpg``), as far as the data set can tell; else ''."""
    if type(dataset) is Subset:
        return describe(dataset.dataset, dataset.indices[index])
    if type(dataset) is ConcatDataset:
        part = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return describe(dataset.datasets[part], index - before)
    tell = getattr(dataset, "describe_sample", None)
    return str(tell(index)) if callable(tell) else _listed(dataset, index)


def _listed(dataset: Any, index: Any) -> str:
    """A path from a list of the data set that has as many as it has samples."""
    if not isinstance(index, int) or not hasattr(dataset, "__len__"):
        return ""
    for name in _LISTS:
        entries = getattr(dataset, name, None)
        if not isinstance(entries, (list, tuple)) or not -len(entries) <= index < len(entries):
            continue
        entry = entries[index]
        if isinstance(entry, (list, tuple)) and entry:
            entry = entry[0]
        if len(entries) == len(dataset) and isinstance(entry, (str, os.PathLike)):
            return os.fspath(entry)
    return ""


def transform_of(dataset: Any, error: BaseException) -> str:
    """The name of the innermost of the data set's transforms that the error came through."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    objects: dict[int, str] = {}
    codes: dict[CodeType, str] = {}
    for transform in _transforms(dataset, set()):
        if isinstance(transform, FunctionType):
            codes[transform.__code__] = transform.__name__
        else:
            objects[id(transform)] = type(transform).__name__
    found, trace = "", error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code in codes:
            found = codes[frame.f_code]
        elif frame.f_code.co_name in ("__call__", "forward"):
            own = frame.f_code.co_varnames[:1]  # usually ("self",)
            found = objects.get(id(frame.f_locals.get(own[0])) if own else 0, found)
    return found


def text_of(error: BaseException) -> str:
    """What an error says; one whose __str__ raises is told by that."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - the first error is the one to tell
        return f"(its __str__ raised {type(second).__name__})"


def unknown_part(sample: Any, path: str = "") -> str:
    """What PyTorch's default collate function cannot take, and where in a sample; '' if all can."""
    if isinstance(sample, Mapping):
        parts = [(f"{path}[{key!r}]", value) for key, value in sample.items()]
    elif isinstance(sample, (list, tuple)):
        parts = [(f"{path}[{place}]", value) for place, value in enumerate(sample)]
    elif isinstance(sample, _COLLATED):
        return ""
    else:
        kind = "None" if sample is None else f"a {type(sample).__name__}"
        return f"{kind}{' at ' + path if path else ''}"
    return next(filter(None, (unknown_part(value, where) for where, value in parts)), "")


def shape_of(sample: Any) -> str:
    """A sample's structure in words: ``(float32 [3, 32, 32], int)``."""
    if isinstance(sample, torch.Tensor) and sample.is_nested:
        return f"nested {sample.dtype}"
    if isinstance(sample, torch.Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k!r}: {shape_of(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        return "(" + ", ".join(shape_of(v) for v in sample) + ")"
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        return f"{sample.dtype} {list(sample.shape)}"
    return type(sample).__name__


def on_device(device: str) -> str:
    """What to say of a batch that has a tensor on a device."""
    return f"a worker process made a tensor on {device}. {ON_HOST}"


def late(workers: str, timeout_s: float) -> str:
    """What to say where a batch was waited for as long as that."""
    return (
        f"no batch came from the {workers} within timeout={timeout_s:g} s. Where samples may take "
        "so long, give them more; where one hangs (in a file system, at a lock), look for it there"
    )


def device_tensor(batch: Any) -> str:
    """The device of the first tensor that is not on the host; '' if all are."""
    if isinstance(batch, torch.Tensor):
        return "" if batch.device.type == "cpu" else str(batch.device)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next(filter(None, map(device_tensor, batch)), "")
    return ""


def _transforms(owner: Any, seen: set[int]) -> Iterator[Any]:
    """What it keeps that can be called: as an attribute, or in a list or module of such."""
    if id(owner) in seen or len(seen) > 1000:
        return
    seen.add(id(owner))
    kept = getattr(owner, "__dict__", {})
    values = list(kept.values()) if isinstance(kept, dict) else []
    for value in list(values):
        if isinstance(value, (list, tuple)) and len(value) <= 100:
            values.extend(value)
        elif isinstance(value, dict) and len(value) <= 100:  # the modules in a module
            values.extend(value.values())
    for value in values:
        if callable(value) and not isinstance(value, type):
            yield value
            yield from _transforms(value, seen)
