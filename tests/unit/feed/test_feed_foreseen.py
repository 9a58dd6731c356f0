"""Samplers of a DataLoader without workers: which may be asked by a copy, before their time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time
from typing import Any

import feed_datasets
import numpy as np
import pytest
import torch
from feed_datasets import same
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.feed import Loader
from hasten.feed.draws import Drawn, Draws, Foreseen
from hasten.feed.foreseeable import foreseeable

COUNT = 24
RNG = np.random.default_rng(0)
WRITTEN: list[str] = []


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return index


class Talking(Numbers):
    """Says that its length was asked for."""

    def __len__(self) -> int:
        WRITTEN.append("len")
        return COUNT


class Own(Sampler[int]):
    """Of somebody's own; `n` indices."""

    def __init__(self, n: int = COUNT) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


class ByModule(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(RNG.permutation(self.n).tolist())


class ByClosure(Own):
    def __init__(self) -> None:
        super().__init__()
        drawing = random.Random(5)
        self.draw = lambda n: drawing.sample(range(n), n)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.n))


class ByClass(Own):
    times = 0

    def __iter__(self) -> Iterator[int]:
        type(self).times += 1
        return iter([(each + self.times) % self.n for each in range(self.n)])


class ByClassList(Own):
    times = [0]  # noqa: RUF012 - shared by its copies, as that is the point

    def __iter__(self) -> Iterator[int]:
        self.times[0] += 1
        return iter([(each + self.times[0]) % self.n for each in range(self.n)])


class ByHelper(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def order(self) -> list[int]:
        return shuffled(self.n)


def shuffled(n: int) -> list[int]:
    return [int(each) for each in RNG.permutation(n)]


class ByComprehension(Own):
    """In which a name is one of a comprehension's own, and elsewhere the module's."""

    def __iter__(self) -> Iterator[int]:
        every = [RNG for RNG in range(self.n)]  # noqa: C416
        return iter(RNG.permutation(every).tolist())


class ByModel(Own):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))

    def __iter__(self) -> Iterator[int]:
        with torch.no_grad():
            scores = self.model(torch.rand(self.n, 4)).flatten()
        return iter(scores.argsort().tolist())


class Writing(Own):
    def __iter__(self) -> Iterator[int]:
        WRITTEN.append("iter")
        return iter(range(self.n))


class OfTalking(Own):
    """Asks its data set for its length, which does more than tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.data_source = TALKING

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))


TALKING = Talking()


class Buckets(Sampler[list[int]]):
    """Batches of like lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], RNG.random()))
        batches = [order[at : at + 4] for at in range(0, len(order), 4)]
        RNG.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return len(self.lengths) // 4


class Large(Own):
    """What takes long to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = [[each, each + 1] for each in range(60_000)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets[3] * (self.n // 2))


class Copying(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __deepcopy__(self, memo: Any) -> Any:
        WRITTEN.append("copied")
        return self


class ByClock(Own):
    """What it gives would follow from when it is asked."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n if time() > 0 else 0))


class ByOtherModule(Own):
    """Counts in a variable of another module."""

    def __iter__(self) -> Iterator[int]:
        feed_datasets.TIMES += 1
        return iter([(each + feed_datasets.TIMES) % self.n for each in range(self.n)])


class ByFile(Own):
    """Keeps what it gave in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.file = Path("given")

    def __iter__(self) -> Iterator[int]:
        self.file.write_text(str(self.n))
        return iter(range(self.n))


class ByNewFile(Own):
    def __iter__(self) -> Iterator[int]:
        Path("named").write_text(str(self.n))
        return iter(range(self.n))


class Replacing(Own):
    """Of a module's own function, in the place of one that is known."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(sum([self.n])))


def sum(values: list[int]) -> int:  # noqa: A001
    WRITTEN.append("sum")
    return values[0]


UNFORESEEN: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        ByModule, ByClosure, ByClass, ByClassList, ByHelper, ByComprehension, ByModel, Writing,
        OfTalking, Large, Copying, ByClock, ByOtherModule, ByFile, ByNewFile, Replacing,
    )
}  # fmt: skip


def _play(make: Callable[[], Any], *, taken: bool, plan: str = "auto") -> Any:
    """What a training script sees of three epochs."""
    global RNG
    RNG = np.random.default_rng(0)
    ByClass.times, ByClassList.times[0], feed_datasets.TIMES = 0, 0, 0
    WRITTEN.clear()
    _seed()
    sampler = make()
    dataset = TALKING if isinstance(sampler, OfTalking) else Numbers()
    batched = {"batch_sampler": sampler} if isinstance(sampler, Buckets) else {"sampler": sampler}
    size = {} if isinstance(sampler, Buckets) else {"batch_size": 4}
    original = DataLoader(dataset, **batched, **size)
    loader = Loader.from_dataloader(original, plan=plan) if taken else original
    seen: list[Any] = []
    for _ in range(3):
        for batch in loader:
            seen.append((batch, torch.rand(1), random.random(), np.random.rand()))
        seen.append([each for each in WRITTEN if each != "len"])
    return seen


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("plan", ["auto", "processes"])
@pytest.mark.parametrize("kind", UNFORESEEN)
def test_what_a_copy_would_share_is_not_touched_before_its_time(kind: str, plan: str) -> None:
    make = UNFORESEEN[kind]
    found, expected = _play(make, taken=True, plan=plan), _play(make, taken=False)
    assert same(found, expected)
    assert not foreseeable(make(), TALKING)


def test_batches_by_a_module_s_generator_come_in_the_dataloader_s_order() -> None:
    def make() -> Any:
        return Buckets([each % 5 for each in range(COUNT)])

    assert same(_play(make, taken=True), _play(make, taken=False))
    assert same(_play(make, taken=True, plan="processes"), _play(make, taken=False))


# Those that may be asked ------------------------------------------------------------------------


class Global(Own):
    """Draws from all three, at each step."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.shuffle(order)
        for each in order:
            low = int(torch.randint(self.n, (1,)).item())
            yield low if np.random.rand() < 0.5 else each


class Epochs(Own):
    """Draws from generators of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.lengths = 0, torch.arange(COUNT)
        self.numpy, self.python = np.random.default_rng(3), random.Random(4)
        self.torch = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.last = self._order(self.epoch)
        return iter(self.last)

    def _order(self, epoch: int) -> list[int]:
        drawn = torch.randperm(self.n, generator=self.torch).tolist()
        self.python.shuffle(drawn)
        noise = self.numpy.random(self.n)
        drawn.sort(key=lambda each: (self.lengths[each] // 7, noise[each]))
        return [(each + epoch) % self.n for each in drawn]


class Checked(Own):
    """Says what is wrong, notes the types of its variables, and names what is another module's."""

    def __iter__(self) -> Iterator[int]:
        if self.n < 1:
            raise ValueError(f"no samples: {self.n}")
        order: list[int] | torch.Tensor = torch.randperm(min(self.n, sys.maxsize))
        yield from order.tolist()


class OfDataset(Own):
    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.data_source = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(len(self.data_source)).tolist())


class Around(Own):
    """Goes through another sampler."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        for each in self.inner:
            yield int(each)
        yield from list(self.inner)[: self.n - len(self.inner)]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


NUMBERS = Numbers()
FORESEEN: dict[str, Callable[[], Any]] = {
    "global": Global,
    "epochs": Epochs,
    "checked": Checked,
    "of data set": lambda: OfDataset(NUMBERS),
    "around": lambda: Around(RandomSampler(NUMBERS, num_samples=20, generator=_generator())),
    "around around": lambda: Around(Around(SubsetRandomSampler(range(20), _generator()))),
    "sequential": lambda: SequentialSampler(NUMBERS),
    "random": lambda: RandomSampler(NUMBERS),
    "weighted": lambda: WeightedRandomSampler([1.0] * COUNT, 20, generator=_generator()),
    "distributed": lambda: DistributedSampler(NUMBERS, 2, 1),
    "batches": lambda: BatchSampler(Epochs(), 4, drop_last=False),
    "lists": lambda: [[1, 2], [3]],
}


@pytest.mark.parametrize("kind", FORESEEN)
def test_what_is_foreseen_comes(kind: str) -> None:
    sampler = FORESEEN[kind]()
    drawn = Drawn(sampler=sampler, generator=None, dataset=NUMBERS, ahead=0, twice=False)
    for _ in range(2):
        _seed()
        copied = drawn.copied()
        assert copied is not None
        foreseen = list(Foreseen(copied))
        _seed()
        given = list(Indices(drawn))
        assert foreseen
        assert same(foreseen, given)


class Indices(Draws):
    """What a DataLoader draws, all of it."""

    def __iter__(self) -> Iterator[Any]:
        return self


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
