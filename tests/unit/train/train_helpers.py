"""Small models, data and loops that the tests of training share."""

from __future__ import annotations

import copy
import io
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hasten
from hasten.train import checkpoint, weights


def mlp(*, dropout: float = 0.0, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)
    )


def points(count: int = 40, seed: int = 2) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(count, 6, generator=generator)
    return TensorDataset(data, (data.sum(1) > 0).long() + (data[:, 0] > 1).long())


def batches(sizes: Iterable[int], seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = list(sizes)
    data, labels = points(sum(sizes), seed)[:]
    return list(zip(data.split(sizes), labels.split(sizes), strict=True))


def loader(data: TensorDataset | None = None, batch_size: int = 8, **options: Any) -> hasten.Loader:
    return hasten.Loader(
        data or points(), batch_size=batch_size, shuffle=True, num_workers=0, **options
    )


QUIET: dict[str, Any] = {
    "device": "cpu",
    "precision": "float32",
    "channels_last": False,
    "progress": "off",
}


def trainer(model: nn.Module | None = None, **options: Any) -> hasten.Trainer:
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd} | QUIET | options
    return hasten.Trainer(model or mlp(), **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def told(**options: Any) -> tuple[io.StringIO, dict[str, Any]]:
    """A stream and the options that make a run speak to it."""
    stream = io.StringIO()
    return stream, QUIET | {"progress": "plain", "stream": stream} | options


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(weights.state_of(model))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Equal to the bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"differ: {different}"


class Reading:
    """A loader's batches, with something that happens before one of them is given.

    Counts over all epochs, from 0.
    """

    def __init__(self, given: Iterable[Any], at: int, act: Callable[[], None]) -> None:
        self.given, self.at, self.act = given, at, act
        self.count = 0

    def __len__(self) -> int:
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.given:
            if self.count == self.at:
                self.act()
            self.count += 1
            yield batch


class Hook:
    """A loss that acts at its n-th call, counted from 0."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.calls = at, act, 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.calls == self.at:
            self.act()
        self.calls += 1
        return nn.functional.cross_entropy(outputs, labels)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


INTERRUPT, TERMINATE = send(signal.SIGINT), send(signal.SIGTERM)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The log without events, and without what time it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "images_per_s", "phases", "peak_memory_bytes", "crc32")
    return [
        {key: value for key, value in line.items() if key not in timed}
        for line in lines
        if line["kind"] != "event"
    ]


def losses(result: hasten.Result) -> list[tuple[float, float | None, float | None, float]]:
    return [(r.loss, r.val_loss, r.val_accuracy, r.learning_rate) for r in result.history]


def saved(folder: Path) -> checkpoint.Saved:
    return checkpoint.load(checkpoint.find(folder), map_location="cpu")


def plain_loop(
    model: nn.Module,
    given: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 2,
    per_step: Any = None,
    per_epoch: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    loss_of: Callable[[Any, Any], torch.Tensor] | None = None,
) -> list[float]:
    """The loop of every lesson; gives the mean loss of each epoch."""
    loss_of = loss_of or nn.CrossEntropyLoss()
    means = []
    for _ in range(epochs):
        model.train()
        total, samples, waiting = 0.0, 0, 0
        for data, labels in given:
            loss = loss_of(model(data), labels)
            (loss / accumulate).backward()
            total, samples, waiting = (
                total + loss.item() * len(data),
                samples + len(data),
                waiting + 1,
            )
            if waiting < accumulate:
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            waiting = 0
            if per_step is not None:
                per_step.step()
        if per_epoch is not None:
            per_epoch.step()
        means.append(total / samples)
    return means
