"""What is said of a sample that raised, or of samples that do not go together in a batch."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from hasten.errors import DataError
from hasten.feed.describe import (
    NOTHING_IN_BATCH,
    device_tensor,
    on_device,
    shape_of,
    text_of,
    transform_of,
    unknown_part,
)

_FETCH = _IterableDatasetFetcher.fetch.__code__
_PATHS = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = (*map(Path, _PATHS), Path(__file__).parents[1])
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # also those of a person or a system


def raised(name: str, dataset: Any, whose: str, error: Exception, more: str = "") -> str:
    """Of a sample that raised: who it is, in which transform, and where in the code.

    Args:
        name: of the sample, with its file.
        dataset: whose transforms are looked for.
        whose: what it is a sample of.
        error: that it raised.
        more: to be said before the place.
    """
    transform = transform_of(dataset, error)
    within = f" in its transform {transform}" if transform else ""
    text = f"{name} of {whose} raised {type(error).__name__}{within}: {text_of(error)}{more}"
    return text + _place(error)


def _place(error: BaseException) -> str:
    """Where in the code, in brackets: where the user's own called what raised, if any did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    feed = Path(__file__).parent
    others = [frame for frame in frames if not Path(frame.filename).is_relative_to(feed)]
    innermost = (own or others)[-1:]
    return "".join(f" (at {frame.filename}:{frame.lineno})" for frame in innermost)


def _is_own(file: str) -> bool:
    path = Path(file)
    library = any(path.is_relative_to(folder) for folder in _LIBRARIES)
    return not (library or file.startswith("<frozen") or _INSTALLED.intersection(path.parts))


def of_device_transform(transform: Any, indices: Any, number: int, error: Exception) -> str:
    """Of a device_transform that raised: which one, on which batch, and where in the code."""
    what = f"device_transform {named(transform)} raised {type(error).__name__}: {text_of(error)}"
    return f"{what} on batch {number}{_samples(indices)}{_place(error)}"


def nothing_of_device_transform(transform: Any, indices: Any, number: int) -> str:
    """Of a device_transform that gave None."""
    return (
        f"device_transform {named(transform)} gave None for batch {number}{_samples(indices)}: it "
        "must return the batch, also where it changes it in place"
    )


def _samples(indices: Any) -> str:
    if indices is None:
        return ""
    listed = indices.tolist() if hasattr(indices, "tolist") else indices
    return f" (samples {short(listed)})" if isinstance(listed, list | tuple) else f" ({listed!r})"


def named(function: Any) -> str:
    """A function's name, or its class's."""
    return str(getattr(function, "__name__", type(function).__name__))


def of_stream(place: int, dataset: Any, whose: str, error: Exception) -> str:
    """Of a stream that raised where its sample of this place, from 0, was to come."""
    if isinstance(error, DataError):
        return f"sample {place} of {whose}: {text_of(error)}"
    file = str(getattr(error, "filename", None) or "")
    return raised(f"sample {place}" + (f" ({file})" if file else ""), dataset, whose, error)


def misfit(
    samples: Any,
    indices: Sequence[Any],
    collate_fn: Callable[[Any], Any],
    error: Exception,
    stream: str = "",
) -> str:
    """Of samples that the collate function made no batch of.

    Args:
        samples: of the batch, or the only one.
        indices: of the samples; of a stream their places in it, from 0.
        collate_fn: that raised.
        error: that it raised.
        stream: what the samples are of, where they are of a stream.
    """
    device = device_tensor(samples)
    if device and get_worker_info() is not None:
        return on_device(device)
    of = f" of {stream}" if stream else ""
    if collate_fn not in (default_collate, default_convert):
        return (
            f"collate_fn {named(collate_fn)} raised {type(error).__name__}: {text_of(error)} "
            f"on the samples {short(indices)}{of}"
        )
    if not len(samples):
        return NOTHING_IN_BATCH
    for index, sample in zip(indices, samples, strict=False):
        if sample is None:
            return (
                f"{stream or 'the data set'} gave None for sample {index!r}; "
                + ("leave out what is none" if stream else "return a sample, or raise to ")
                + ("" if stream else 'have it skipped with on_error="skip"')
            )
    first = shape_of(samples[0])
    for index, sample in zip(indices, samples, strict=False):
        if shape_of(sample) != first:
            return (
                f"the samples of a batch{of} differ: sample {indices[0]!r} is {first}, sample "
                f"{index!r} is {shape_of(sample)}; bring them to one shape, or give a "
                "collate_fn that pads them"
            )
    unknown = unknown_part(samples[0])
    if unknown:
        return (
            f"sample {indices[0]!r}{of} has {unknown}, of which PyTorch's default collate function "
            "makes no batch: return tensors, arrays, numbers, text, or dicts and lists of "
            "those, or give a collate_fn"
        )
    return f"the samples {short(indices)}{of} could not be collated: {text_of(error)}"


def of_beginning(error: Exception) -> str:
    """Of a DataLoader that raised before its first batch."""
    kind = type(error).__name__
    return f"iterating the DataLoader raised {kind}: {text_of(error)}{_place(error)}"


def of_dataloader(loader: Any, number: int, error: Exception) -> str:
    """Of a DataLoader that was iterated as it is, and raised for its batch of this number.

    Of a stream that it read in this thread, the error has come through PyTorch's fetcher, which
    knows the samples of the batch.
    """
    whole = f"the DataLoader raised {type(error).__name__} at batch {number}: {text_of(error)}"
    if not isinstance(loader.dataset, IterableDataset):
        return whole
    stream = f"the stream {type(loader.dataset).__name__}"
    trace = error.__traceback__
    while trace is not None:
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if code is _FETCH:
            batched = known["self"].auto_collation
            samples = known.get("data", []) if batched else [known.get("data")]
            first = number * (loader.batch_size or 1)
            if "collate_fn" in linecache.getline(code.co_filename, trace.tb_lineno):
                places = range(first, first + len(samples))
                return misfit(samples, places, loader.collate_fn, error, stream)
            return of_stream(
                first + (len(samples) if batched else 0), loader.dataset, stream, error
            )
        trace = trace.tb_next
    return whole


def short(indices: Sequence[Any]) -> str:
    """The first few indices of a batch, for a message."""
    text = ", ".join(repr(index) for index in indices[:4])
    return f"{text}, … ({len(indices)})" if len(indices) > 4 else text
