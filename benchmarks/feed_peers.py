"""Further peers of benchmarks/feed.py, each as its documentation has it: a function a peer.

Each takes a case and gives its contenders: none where the peer is not for such data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from feed_cases import Case, Contender


def batch_sampler(case: Case) -> list[Contender]:
    """DataLoader whose sampler gives whole batches, which tensors index at once."""
    if not isinstance(case.dataset, TensorDataset):
        return []
    order = BatchSampler(RandomSampler(case.dataset), case.batch, drop_last=False)
    loader = DataLoader(case.dataset, batch_size=None, sampler=order)
    return [Contender("BatchSampler in a DataLoader", lambda: loader)]


def grain(case: Case) -> list[Contender]:
    """Shuffled, batched, read by threads: by two, as the others, and by 16, its default."""
    from grain import MapDataset, ReadOptions

    source = MapDataset.source(case.dataset).seed(0)

    def epoch(threads: int, ahead: int) -> Iterable[Any]:
        batches = source.shuffle().batch(case.batch, batch_fn=case.collate or default_collate)
        reading = ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        return iter(batches.to_iter_dataset(reading))

    return [
        Contender(
            f"grain, {threads} threads",
            lambda threads=threads, ahead=ahead: epoch(threads, ahead),
        )
        for threads, ahead in ((2, 4), (16, 500))
    ]


def tensordict(case: Case) -> list[Contender]:
    """A TensorDict, which DataLoader asks for a batch at once."""
    if not isinstance(case.dataset, TensorDataset):
        return []
    from tensordict import TensorDict

    images, labels = case.dataset.tensors
    pairs = TensorDict({"images": images, "labels": labels}, batch_size=[len(images)])
    loader = DataLoader(pairs, case.batch, shuffle=True, collate_fn=lambda batch: batch)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch["images"], batch["labels"]

    return [Contender("TensorDict in a DataLoader", epoch)]


def datasets(case: Case) -> list[Contender]:
    """Hugging Face's Arrow tables, asked for a batch at once: images as lists of 784 numbers,
    which take a seventh of the time that its `Array2D` takes."""
    if not isinstance(case.dataset, TensorDataset):
        return []
    from datasets import Dataset, Features, List, Value

    images, labels = case.dataset.tensors
    table = Dataset.from_dict(
        {"images": images.flatten(1).numpy(), "labels": labels.numpy()},
        features=Features({"images": List(Value("uint8"), 784), "labels": Value("int64")}),
    ).with_format("torch", dtype=torch.uint8)
    order = BatchSampler(RandomSampler(case.dataset), case.batch, drop_last=False)
    loader = DataLoader(table, batch_size=None, sampler=order)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch["images"].view(-1, *images.shape[1:]), batch["labels"].long()

    return [Contender("Hugging Face datasets, batched", epoch)]


def accelerate(case: Case) -> list[Contender]:
    """What Accelerate makes of a DataLoader, with no workers and with two."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return [
        Contender(f"Accelerate, {count} workers", lambda loader=loader: loader)
        for count in (0, 2)
        for loader in [accelerator.prepare(_plain(case, count))]
    ]


def lightning(case: Case) -> list[Contender]:
    """What Lightning Fabric makes of a DataLoader, with no workers and with two."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    return [
        Contender(f"Lightning Fabric, {count} workers", lambda loader=loader: loader)
        for count in (0, 2)
        for loader in [fabric.setup_dataloaders(_plain(case, count))]
    ]


def _plain(case: Case, workers: int) -> DataLoader[Any]:
    return DataLoader(
        case.dataset,
        case.batch,
        shuffle=True,
        num_workers=workers,
        collate_fn=case.collate,
        persistent_workers=workers > 0,
    )


PEERS: tuple[Callable[[Case], list[Contender]], ...] = (
    batch_sampler,
    grain,
    tensordict,
    datasets,
    accelerate,
    lightning,
)


def more(case: Case) -> tuple[list[Contender], list[str]]:
    """(contenders, why others are left out): of all peers, as far as they are installed."""
    found: list[Contender] = []
    left_out: list[str] = []
    for peer in PEERS:
        try:
            found += peer(case)
        except ImportError as error:
            left_out.append(f"{peer.__name__} is left out: {error}")
    return found, left_out
