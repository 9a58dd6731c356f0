"""Epochs of hasten's Trainer with a plain DataLoader: taken over by the feed, and as it is.

    python benchmarks/takeover.py [--rounds 5] [--case NAME ...] [--json FILE]

The contenders train the same model on the same samples in the same order, and take turns: with the
DataLoader iterated as it is, hidden from hasten in an iterable; with the DataLoader given to
`Trainer.fit`, which takes it over unasked; with `Loader.from_dataloader` given; and with a
`hasten.Loader` of the data set. Timed are the epochs after the first, without what surrounds them.
"""

from __future__ import annotations

import argparse
import io
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten
import turns

EPOCHS = 3


class Hidden:
    """A DataLoader that is not known for one."""

    def __init__(self, given: DataLoader[Any]) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


class Noisy(Dataset[Any]):
    """A transform in Python that draws."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 28 * 28)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index] + 0.1 * torch.randn(28 * 28), index % 10


def tensors(workers: int = 0) -> DataLoader[Any]:
    """20,000 images of 28x28 in a TensorDataset, batch 64, a linear model"""
    data = TensorDataset(torch.randn(20_000, 28 * 28), torch.arange(20_000) % 10)
    return DataLoader(data, 64, shuffle=True, num_workers=workers)


def samples(workers: int = 0) -> DataLoader[Any]:
    """5,000 images of 28x28 with noise that each sample draws, batch 64, a linear model"""
    return DataLoader(Noisy(5_000), 64, shuffle=True, num_workers=workers)


CASES: dict[str, Callable[[], DataLoader[Any]]] = {
    "tensors": tensors,
    "tensors, 2 workers": partial(tensors, 2),
    "samples": samples,
    "samples, 2 workers": partial(samples, 2),
}


def loader_of(given: DataLoader[Any]) -> hasten.Loader:
    return hasten.Loader(given.dataset, given.batch_size, shuffle=True)


CONTENDERS: dict[str, Callable[[DataLoader[Any]], Any]] = {
    "DataLoader as it is": Hidden,
    "DataLoader": lambda given: given,
    "from_dataloader": hasten.Loader.from_dataloader,
    "hasten.Loader": loader_of,
}


def epoch_s(make: Callable[[DataLoader[Any]], Any], given: DataLoader[Any]) -> float:
    """Median seconds of an epoch but the first."""
    torch.manual_seed(0)
    model = nn.Linear(28 * 28, 10)
    trainer = hasten.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        lr=0.01,
        device="cpu",
        precision="float32",
        channels_last=False,
        stream=io.StringIO(),
        progress="plain",
    )
    train: Iterable[Any] = make(given)
    with closing(train) if isinstance(train, hasten.Loader) else nullcontext():
        history = trainer.fit(train, epochs=EPOCHS).history
    return statistics.median(record.seconds for record in history[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "facts": turns.facts(threads=torch.get_num_threads(), rounds=options.rounds)
    }
    for name in options.case:
        given = CASES[name]()
        contenders = {who: partial(epoch_s, make, given) for who, make in CONTENDERS.items()}
        rows = results[name] = turns.take(contenders, options.rounds, len(given))
        case = CASES[name]
        turns.show(getattr(case, "func", case), name, rows, "as it is")
    turns.keep(options.json, results)


if __name__ == "__main__":
    main()
