"""How a data set gives its samples beside `__getitem__`: by a key of their own, or many at once."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset

Fetch = Callable[..., Any]
"""(index, key) -> sample, or (index, key, out) where :func:`takes_out`."""


def fetch_of(dataset: Any) -> Fetch | None:
    """How to get a sample by (index, key), where the data set (or the one below) can do it."""
    if callable(getattr(dataset, "fetch", None)):
        fetch: Fetch = dataset.fetch
        return fetch
    if type(dataset) is Subset:
        below = fetch_of(dataset.dataset)
        return _SubsetFetch(below, dataset.indices) if below else None
    if type(dataset) is ConcatDataset:
        parts = [fetch_of(part) for part in dataset.datasets]
        return _ConcatFetch(parts, dataset.cumulative_sizes) if all(parts) else None
    return None


def many_of(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """How to get a batch's samples at once, where the data set (or the one below) can do it."""
    many: Callable[[list[Any]], Any] | None = getattr(dataset, "__getitems__", None)
    if not callable(many) or (type(dataset) is Subset and many_of(dataset.dataset) is None):
        return None
    return many


class _SubsetFetch:
    def __init__(self, below: Fetch, indices: Sequence[int]) -> None:
        self._below = below
        self._indices = indices

    def __call__(self, index: int, *rest: Any) -> Any:
        return self._below(self._indices[index], *rest)

    @property
    def takes_out(self) -> bool:
        return takes_out(self._below)


class _ConcatFetch:
    def __init__(self, parts: Sequence[Fetch | None], ends: Sequence[int]) -> None:
        self._parts = parts
        self._ends = ends

    def __call__(self, index: int, *rest: Any) -> Any:
        part = bisect_right(self._ends, index)
        fetch = self._parts[part]
        assert fetch is not None
        return fetch(index - (self._ends[part - 1] if part else 0), *rest)

    @property
    def takes_out(self) -> bool:
        return all(part is not None and takes_out(part) for part in self._parts)


def takes_out(fetch: Fetch) -> bool:
    """Whether a `fetch` can write a sample's tensors to memory that it is given.

    That is seen by its parameter, not by another method, which would go on as before in a class
    that only changes what `fetch` gives.
    """
    if isinstance(fetch, _SubsetFetch | _ConcatFetch):
        return fetch.takes_out
    try:
        return "out" in inspect.signature(fetch).parameters
    except (TypeError, ValueError):  # of a callable that has none to be read
        return False
