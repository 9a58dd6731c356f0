"""What benchmarks/feed.py feeds: data sets, the training step beside each, and all who feed it."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten.feed import Loader

Batches = Iterable[Any]


class Slow(Dataset[Any]):
    """About a millisecond of Python a sample: it holds the interpreter's lock."""

    turns = 14_000

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Any:
        total = index
        for turn in range(self.turns):
            total = (total * 31 + turn) & 0xFFFF
        return torch.full((3, 32, 32), total / 65536), total % 10


class Sleepy(Dataset[Any]):
    """A millisecond of waiting a sample, as for a disk or a network."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return torch.full((3, 32, 32), index / 1024), index % 10


class Text(Dataset[Any]):
    """Lines of 5 to 100 words, as numbers of a vocabulary."""

    def __init__(self) -> None:
        draw = random.Random(0)
        words = [f"word{number}" for number in range(5000)]
        self.lines = [" ".join(draw.choices(words, k=draw.randint(5, 100))) for _ in range(8192)]
        self.vocabulary = {word: number + 1 for number, word in enumerate(words)}

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        found = [self.vocabulary[word] for word in self.lines[index].split()]
        return torch.tensor(found), len(found) % 10


def pad(samples: list[Any]) -> Any:
    """The custom collate function of `Text`: int64 [B, longest], padded with 0."""
    lines = nn.utils.rnn.pad_sequence([line for line, _ in samples], batch_first=True)
    return lines, torch.tensor([label for _, label in samples])


def images_in_memory() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60_000, 28, 28), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (60_000,), generator=generator))


class Training:
    """A step of a small network that takes about `seconds` (None: once forward and backward)."""

    def __init__(self, kind: str, example: Any, seconds: float | None) -> None:
        torch.manual_seed(0)
        self.kind = kind
        if kind == "text":
            self.model: nn.Module = nn.Sequential(nn.EmbeddingBag(5001, 64), nn.Linear(64, 10))
        elif kind == "pictures":
            self.model = nn.Sequential(
                nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(12544, 10)
            )
        elif kind == "memory":
            self.model = nn.Sequential(
                nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)
            )
        else:
            self.model = nn.Sequential(
                nn.Conv2d(3, 16, 3),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3),
                nn.Flatten(),
                nn.Linear(12544, 10),
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.turns = 1
        if seconds is not None:
            for _ in range(3):
                self(example)
            took = []
            for _ in range(9):
                begin = time.perf_counter()
                self(example)
                took.append(time.perf_counter() - begin)
            self.turns = max(1, round(seconds / sorted(took)[4]))

    def __call__(self, batch: Any) -> None:
        inputs, labels = batch
        if self.kind in ("memory", "pictures"):
            inputs = inputs.float() / 255
        for _ in range(self.turns):
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@dataclass
class Contender:
    """One who feeds a case: `epoch()` gives its batches, `close()` ends what it keeps."""

    name: str
    epoch: Callable[[], Batches]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One data set and batch size.

    Attributes:
        training: the kind of `Training` beside it.
        step_of_load: how long a step takes, in times of loading a batch; None for one pass.
        by_hand: a loop written for this very data.
        quick: an epoch takes milliseconds, and is repeated.
        own: what hasten is given, where peers are given `dataset` for the same.
        alone: it is fed without training, too.
    """

    key: str
    title: str
    dataset: Any
    batch: int
    training: str
    step_of_load: float | None = None
    collate: Callable[[list[Any]], Any] | None = None
    by_hand: Callable[[], Batches] | None = None
    quick: bool = False
    workers: tuple[int, ...] = (0, 1, 2)
    own: Any = None
    alone: bool = True

    def inline(self) -> Batches:
        """Sample by sample, by this thread."""
        dataset = self.dataset if self.own is None else self.own
        return DataLoader(dataset, self.batch, shuffle=True, collate_fn=self.collate)

    def contenders(self) -> list[Contender]:
        """hasten first, then DataLoader, then other peers as far as they are installed."""
        dataset = self.dataset if self.own is None else self.own
        loader = Loader(dataset, self.batch, shuffle=True, collate_fn=self.collate)
        found = [Contender("hasten.Loader", lambda: loader, loader.close)]
        if self.by_hand is not None:
            found.insert(0, Contender("by hand", self.by_hand))
        for workers in self.workers:
            found.append(_dataloader(self, workers, keep=False))
            if workers:
                found.append(_dataloader(self, workers, keep=True))
        return found + _torchdata(self) + _spdl(self)


def cases() -> list[Case]:
    """(a), (c), (d) and (e); (b), the pictures, have a module of their own, but for training."""
    memory = images_in_memory()
    found = [
        Case(
            key=f"a{batch}",
            title=f"(a) 60,000 x 28 x 28 in memory, batch {batch}",
            dataset=memory,
            batch=batch,
            training="memory",
            by_hand=lambda batch=batch: _by_hand(memory, batch),
            quick=True,
        )
        for batch in (64, 1000)
    ]
    found += [
        Case(
            key=key,
            title=title,
            dataset=dataset,
            batch=32,
            training="images",
            step_of_load=1.0,
        )
        for key, title, dataset in (
            ("c", "(c) a slow transform that holds the lock, batch 32", Slow()),
            ("d", "(d) a source that sleeps 1 ms a sample, batch 32", Sleepy()),
        )
    ]
    found.append(
        Case(
            key="e",
            title="(e) text of ragged lengths, custom collate, batch 64",
            dataset=Text(),
            batch=64,
            training="text",
            collate=pad,
        )
    )
    return found


def training_on_pictures() -> Case:
    """(b) with training: peers decode with Pillow."""
    import feed_images

    found = feed_images.pictures_of("500x375", None)
    few = replace(found, files=found.files[:640])
    return Case(
        key="b",
        title="(b) pictures of 500x375 to 224x224, Pillow in peers, batch 64",
        dataset=feed_images.PillowImages(few),
        own=few.hasten(),
        batch=64,
        training="pictures",
        step_of_load=1.0,
        alone=False,
    )


def missing() -> list[str]:
    """Peers that are not installed here."""
    return [name for name in ("torchdata", "spdl") if not _installed(name)]


def _installed(name: str) -> bool:
    module = {"torchdata": "torchdata.nodes", "spdl": "spdl.pipeline"}[name]
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _by_hand(data: TensorDataset, batch: int) -> Iterator[Any]:
    images, labels = data.tensors
    order = torch.randperm(len(images))
    for start in range(0, len(images), batch):
        index = order[start : start + batch]
        yield images.index_select(0, index), labels.index_select(0, index)


def _dataloader(case: Case, workers: int, *, keep: bool) -> Contender:
    options: dict[str, Any] = {"persistent_workers": True} if keep else {}
    held = [
        DataLoader(
            case.dataset,
            case.batch,
            shuffle=True,
            num_workers=workers,
            collate_fn=case.collate,
            **options,
        )
    ]
    kept = ", persistent" if keep else ""
    return Contender(f"DataLoader, {workers} workers{kept}", lambda: held[0], held.clear)


def _torchdata(case: Case) -> list[Contender]:
    """Nodes as their documentation puts them together: sampler, batcher, parallel map."""
    if not _installed("torchdata"):
        return []
    from torch.utils.data import RandomSampler, default_collate
    from torchdata import nodes

    collate = case.collate or default_collate

    def fetch(indices: list[int]) -> Any:
        return collate([case.dataset[index] for index in indices])

    def start() -> Any:
        node: Any = nodes.SamplerWrapper(RandomSampler(case.dataset))
        node = nodes.Batcher(node, case.batch, drop_last=False)
        node = nodes.ParallelMapper(node, fetch, num_workers=2, method="thread")
        return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2))

    held: list[Any] = []

    def epoch() -> Batches:
        if not held:
            held.append(start())
        return held[0]

    return [Contender("torchdata nodes, 2 threads", epoch, held.clear)]


def _spdl(case: Case) -> list[Contender]:
    if not _installed("spdl"):
        return []
    from spdl.pipeline import PipelineBuilder
    from torch.utils.data import default_collate

    collate = case.collate or default_collate

    def fetch(indices: list[int]) -> Any:
        return collate([case.dataset[index] for index in indices])

    def epoch() -> Iterator[Any]:
        order = torch.randperm(len(case.dataset)).tolist()
        batches = [order[at : at + case.batch] for at in range(0, len(order), case.batch)]
        builder = PipelineBuilder().add_source(batches)
        builder = builder.pipe(fetch, concurrency=2, output_order="input").add_sink(3)
        pipeline = builder.build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline

    return [Contender("SPDL pipeline, 2 threads", epoch)]
