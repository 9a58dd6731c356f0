"""Which data sets several threads may ask at once, by what their code is seen to do."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from hasten.feed import Loader
from hasten.feed import sizing as sizing_module
from hasten.feed.compare import identical
from hasten.feed.measure import Measured
from hasten.feed.reading import harmless


class Base(kinds.Plain):
    def __init__(self) -> None:
        super().__init__(64)
        self.paths = ["a", "b"]
        self.values = np.arange(64.0)
        self.words = {"a": 1}
        self.file = Path(__file__).open("rb")  # noqa: SIM115
        self.file.close()


def double(value: Any) -> Any:
    return value * 2


class Sleeping(Base):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        total = 0
        for turn in range(3):
            total = total + turn
        return torch.full((2,), float(total)), double(self.values[index])


class Opening(Base):
    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index % 2], "rb") as file:  # noqa: PTH123 - as people write it
            data = file.read()
        return [self.words[part] for part in data.decode().split()]


class Helping(Base):
    def _read(self, index: int) -> Any:
        return np.sqrt(self.values[index])

    def __getitem__(self, index: int) -> Any:
        return self._read(index)


class SharedFile(Base):
    def __getitem__(self, index: int) -> Any:
        return self.file.read(1)


class Writing(Base):
    def __getitem__(self, index: int) -> Any:
        self.last = index
        return self.values[index]


class Storing(Base):
    def __getitem__(self, index: int) -> Any:
        self.words["b"] = index
        return index


class InPlace(Base):
    def __getitem__(self, index: int) -> Any:
        row = self.values[index:]
        row += 1
        return row


class Appending(Base):
    def __getitem__(self, index: int) -> Any:
        self.paths.append("c")
        return index


class Drawing(Base):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) if index == 7 else torch.ones(2)


class Global(Base):
    def __getitem__(self, index: int) -> Any:
        global _last
        _last = index
        return index


class Unknown(Base):
    def __getitem__(self, index: int) -> Any:
        return threading.Lock(), index


class HelpedBadly(Base):
    def _read(self, index: int) -> Any:
        self.asked.append(index)
        return index

    def __getitem__(self, index: int) -> Any:
        return self._read(index)


_last = 0


@pytest.mark.parametrize("kind", [Sleeping, Opening, Helping])
def test_harmless(kind: type) -> None:
    assert harmless(kind())
    assert harmless(Subset(kind(), [1, 2]))


@pytest.mark.parametrize(
    "kind",
    [SharedFile, Writing, Storing, InPlace, Appending, Drawing, Global, Unknown, HelpedBadly],
)
def test_not_known_to_be_harmless(kind: type) -> None:
    assert not harmless(kind())
    assert not harmless(Subset(kind(), [1, 2]))


COST = Measured(samples=9, seconds=0.001, cpu_seconds=0.0, bytes=16)


@pytest.mark.parametrize(("kind", "workers"), [(Sleeping, 8), (Writing, 1)])
def test_samples_that_wait_are_made_by_threads(
    kind: type, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: COST)
    with Loader(kind(), 4, shuffle=True) as loader:
        assert (loader.plan.name, loader.plan.workers) == ("threads", workers)
        expected = list(Loader(kind(), 4, plan="inline", shuffle=True))
        assert all(map(identical, loader, expected))
