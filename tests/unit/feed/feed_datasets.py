"""Data sets of every kind for the tests of the feed, and how their batches are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

TIMES = 0  # that a sampler counts in a module of others


class Plain(Dataset):
    """(float tensor, int) by index; counts what was asked of it."""

    def __init__(self, count: int = 23) -> None:
        self.count = count
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return torch.full((2, 3), float(index)), index * 10


class Stuck(Plain):
    """Its first 8 samples come, the others never do."""

    def __getitem__(self, index: int) -> Any:
        if index >= 8:
            time.sleep(1000)
        return super().__getitem__(index)


class Drawing(Plain):
    """Draws from all three global generators, from some of them only for some samples."""

    def __getitem__(self, index: int) -> Any:
        values = [torch.rand(2).sum().item(), random.random() if index % 3 else 0.0]
        values.append(float(np.random.rand()) if index % 5 == 2 else 0.0)
        return torch.tensor(values), index


class Fetching(Plain):
    """Draws from its key; image-like arrays, labels and names."""

    def fetch(self, index: int, key: int) -> Any:
        draws = np.random.Generator(np.random.Philox(key))
        image = draws.integers(0, 256, (3, 5, 4), dtype=np.uint8)
        return torch.from_numpy(image), index, f"file{index}"

    def describe_sample(self, index: int) -> str:
        return f"folder/file{index}.jpg"


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, Any]


class Nested(Plain):
    def __getitem__(self, index: int) -> Any:
        return Pair(torch.rand(2, dtype=torch.float64), {"i": index, "t": [torch.tensor(index)]})


class Together(Plain):
    """Has __getitems__, as Hugging Face's data sets have."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.count, step):
            yield index + random.random(), torch.rand(1)


class Counting(Stream):
    """A stream that draws nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


def drawing_collate(samples: list[Any]) -> Any:
    """Draws too, as mixup in a collate function does."""
    stacked = torch.stack([torch.as_tensor(sample[0], dtype=torch.float64) for sample in samples])
    return stacked * torch.rand(1, dtype=torch.float64), np.random.rand()


def tables() -> dict[str, Dataset]:
    images = torch.arange(23 * 12, dtype=torch.uint8).reshape(23, 3, 4)
    whole = TensorDataset(images, torch.arange(23))
    halves = torch.arange(23 * 2).reshape(23, 2).to(torch.bfloat16)
    strided = torch.arange(23 * 6.0).reshape(2, 3, 23).permute(2, 1, 0)
    other = TensorDataset(images[:7].flip(0), torch.arange(100, 107))
    return {
        "whole": whole,
        "bfloat16": TensorDataset(halves),
        "strided": TensorDataset(strided, torch.arange(23)[:, None].expand(23, 2)),
        "subset": Subset(whole, [5, -1, 5, *range(20)]),
        "split": random_split(whole, [12, 11], torch.Generator().manual_seed(1))[0],
        "subset of subset": Subset(Subset(whole, list(range(0, 22, 2))), [10, 0, 3]),
        "concat": ConcatDataset([whole, other, Subset(whole, [3, 1])]),
        "subset of concat": Subset(ConcatDataset([other, whole]), list(range(29, 2, -2))),
    }


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, in nesting and type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and bool(torch.equal(a, b))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
