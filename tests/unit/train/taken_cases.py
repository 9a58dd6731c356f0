"""Scripts that train with a plain DataLoader; run by name, one is stopped in an epoch's middle."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from train_helpers import INTERRUPT, QUIET, losses, mlp, points, sgd, state

import hasten
from hasten.errors import Interrupted

EPOCHS = 3
COUNT = 40


class AsGiven:
    """A DataLoader that is not known for one: iterated as it is."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.original)

    def __getattr__(self, name: str) -> Any:
        if name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)


class Arrays(Dataset[Any]):
    """Only indexes NumPy arrays."""

    def __init__(self) -> None:
        x, y = points()[:]
        self.x, self.y = x.numpy().copy(), y.tolist()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Transformed(Dataset[Any]):
    """Random transforms, from all three generators."""

    def __init__(self) -> None:
        self.data = points()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(6) + float(np.random.rand()) * random.random(), y


class Seen(Transformed):
    """Changes when it is asked: a counter, and a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rng = 0, np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        self.count += 1
        return x + self.count / 100 + float(self.rng.normal()), y


class Rows(Transformed):
    """Asked for whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.data[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, COUNT, step):
            x, y = points()[index]
            yield x + 0.1 * torch.randn(6), y


class Curriculum(Sampler[list[int]]):
    """Batches of another size in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        size = 3 + self.epoch
        return iter([order[n * size : (n + 1) * size] for n in range(4)])


def numbers(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]) * torch.rand(1), torch.stack(
        [y for _, y in samples]
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(77)


MAKERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffled": lambda **o: DataLoader(points(), 8, shuffle=True, **o),
    "own generator": lambda **o: DataLoader(points(), 8, shuffle=True, generator=generator(), **o),
    "arrays": lambda **o: DataLoader(Arrays(), 8, shuffle=True, **o),
    "parts": lambda **o: DataLoader(
        ConcatDataset([Subset(points(), range(0, 40, 2)), points(20, 9)]), 8, shuffle=True, **o
    ),
    "weighted": lambda **o: DataLoader(
        points(), 8, sampler=WeightedRandomSampler([1.0, 2.0] * 20, 36), **o
    ),
    "batches": lambda **o: DataLoader(
        points(),
        batch_sampler=BatchSampler(SubsetRandomSampler(range(30)), 8, drop_last=True),
        **o,
    ),
    "curriculum": lambda **o: DataLoader(Transformed(), batch_sampler=Curriculum(), **o),
    "transformed": lambda **o: DataLoader(Transformed(), 8, shuffle=True, **o),
    "replacement": lambda **o: DataLoader(
        Transformed(),
        8,
        sampler=RandomSampler(range(COUNT), replacement=True, generator=generator()),
        **o,
    ),
    "rows": lambda **o: DataLoader(Rows(), 8, shuffle=True, **o),
    "collated": lambda **o: DataLoader(Transformed(), 8, shuffle=True, collate_fn=numbers, **o),
}
WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"num_workers": 1},
    "2": {"num_workers": 2},
    "2, persistent": {"num_workers": 2, "persistent_workers": True},
}


def random_states() -> Any:
    numpy: Any = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["gauss"]],
    )


class Watching(nn.Module):
    """A loss that keeps what it was given and the random states, and acts before a call."""

    def __init__(self, act: Callable[[int], None]) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.seen: list[Any] = []

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen.append((outputs.detach().clone(), labels.clone(), random_states()))
        self.act(self.calls)
        self.calls += 1
        return nn.functional.cross_entropy(outputs, labels)


def train(
    given: Iterable[Any],
    act: Callable[[int], None] = lambda call: None,
    val: Iterable[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """All that a training saw and came to, dropout and validation included."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    model, watching = mlp(dropout=0.5), Watching(act)
    options = {"optimizer": sgd, "loss": watching, "epochs": EPOCHS} | QUIET | options
    epochs = options.pop("epochs")
    trainer = hasten.Trainer(model, **options)
    val = val or DataLoader(points(20, 5), 8, shuffle=True)
    result = trainer.fit(given, val, epochs=epochs)
    return {
        "feed": result.feed,
        "state": state(model),
        "losses": losses(result),
        "seen": watching.seen,
        "end": random_states(),
    }


def main(name: str, workers: str, folder: str, at: int, *, as_given: bool) -> None:
    """Train and be stopped at a call of the loss."""

    def stop(call: int) -> None:
        if call == at:
            INTERRUPT()

    given: Any = MAKERS[name](**WORKERS[workers])
    with contextlib.suppress(Interrupted):
        train(AsGiven(given) if as_given else given, stop, folder=Path(folder))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[5]))  # sums are rounded as in the process that goes on
    with contextlib.redirect_stdout(io.StringIO()):
        main(*sys.argv[1:4], int(sys.argv[4]), as_given="as given" in sys.argv)
