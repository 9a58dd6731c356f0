"""Which data sets several threads may ask at once, by what their code is seen to do."""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import struct
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, default_collate

from hasten.feed import Loader
from hasten.feed import sizing as sizing_module
from hasten.feed.compare import identical
from hasten.feed.harmless import doubt, harmless, is_plain
from hasten.feed.measure import Measured


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


class AtOnce(Sleeping):
    def __getitems__(self, indices: list[int]) -> Any:
        return [(self[index], torch.rand(1)) for index in indices]


_last = 0
NUMBER = object()
G = {"value": 0}
Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass
class Record:
    image: Any
    label: int


class Counting(Record):
    """Still a dataclass to Python, but made by code of its own."""

    def __init__(self, image: Any, label: int) -> None:
        G["value"] += 1


class Scale:
    def __init__(self) -> None:
        self.mean = torch.zeros(3)

    def __call__(self, image: Any) -> Any:
        return (image - self.mean) / 255


class Pictures(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.samples = [("a.png", 0)] * 64

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with open(path, "rb") as file:  # noqa: PTH123 - as people write it
            image = Image.open(file).convert("RGB")
        small = image.resize((8, 8), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(small)).permute(2, 0, 1)
        return Record(self.scale(pixels.to(torch.float32)), label)


class Indexing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.images = torch.zeros(64, 3, 4, 4, dtype=torch.uint8)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(f"no sample {index}")
        row = np.clip(self.values[index], 0.0, 1.0).astype(np.float32)
        image = self.images[index].float() / 255
        image = torch.nn.functional.pad(image, (1, 1), mode="reflect").flip(-1)
        return Pair(torch.stack([image, image], dim=0), np.maximum(row, 0))


class Words(Base):
    def __getitem__(self, index: int) -> Any:
        words = self.paths[index % 2].lower().replace(",", " ").split()
        ids = [self.words.get(word, 0) for word in words]
        return torch.tensor(ids, dtype=torch.long), json.loads("[1]")


class Checking(Base):
    """What only computes, in the ways that are seldom written."""

    def _nested(self, *values: Any) -> Any:
        return [self._nested(*value) if isinstance(value, list) else value for value in values]

    def __getitem__(self, index: int) -> Any:
        for turn in range(2):
            if turn:
                index = NUMBER  # noqa: F823
            NUMBER = index  # noqa: F841 - its own from the beginning on, not the module's
        first, *rest = self._nested([index, [0]], self.values[index])
        counted = {word: len(word) for word in self.words}
        return {"first": first, "rest": {str(each) for each in rest}, **counted}


class Joining(Base):
    def __getitem__(self, index: int) -> Any:
        path = os.path.join("folder", self.paths[index % 2])  # noqa: PTH118 - as people write it
        return Path(path).read_bytes(), struct.unpack("<i", b"abcd")


@pytest.mark.parametrize(
    "kind", [Sleeping, Opening, Helping, Pictures, Indexing, Words, Checking, Joining]
)
def test_harmless(kind: type) -> None:
    assert harmless(kind())
    assert harmless(Subset(kind(), [1, 2]))


UNKNOWN = [SharedFile, Writing, Storing, InPlace, Appending, Drawing, Global, Unknown, HelpedBadly]


@pytest.mark.parametrize("kind", [*UNKNOWN, AtOnce])
def test_not_known_to_be_harmless(kind: type) -> None:
    assert not harmless(kind())
    assert not harmless(Subset(kind(), [1, 2]))


BUFFER = np.zeros(3)
SCALE = Scale()


def named(target: Any, **other: Any) -> Any:
    return np.add(1, 2, out=target)


# What a line does with x (an array that the data set keeps), t (a tensor), m (a matrix), i (the
# index): each writes to what another thread reads, or may.
WRITERS = """
np.add(0, i, out=x)
np.add(0, i, x)
np.multiply(x, i, x)
np.sqrt(x, x)
np.clip(x, 0, i, x)
np.clip(x, 0, i, out=x)
np.take(x, [0, 1, 2], out=x)
np.take(x, [0, 1, 2], 0, x)
np.sum(m, 0, None, x)
np.mean(m, 0, None, x)
np.concatenate([x[:1], x[1:]], out=x)
np.concatenate([x[:1], x[1:]], 0, x)
np.stack([x, x], 0, m)
np.round(x, 1, x)
np.dot(m, x, x)
np.cumsum(x, 0, None, x)
np.nan_to_num(x, copy=False)
np.nan_to_num(x, False)
np.copyto(x, i)
np.put(x, [0], i)
np.place(x, x > 0, i)
np.putmask(x, x > 0, i)
np.fill_diagonal(m, i)
np.add.at(x, 0, i)
np.add.reduce(m, 0, None, x)
np.frompyfunc(print, 1, 1)(i)
np.vectorize(print)(i)
np.random.default_rng(0).shuffle(x)
np.save("file", x)
x.fill(i)
x.sort()
x.resize(2)
x.put(0, i)
x.sum(0, None, x)
x.min(0, x)
x.mean(0, None, x)
x.clip(0, 1, x)
x.take([0], 0, x)
x.take([0], out=x)
x.round(1, x)
x.cumsum(0, None, x)
torch.add(t, i, out=t)
torch.full((3,), float(i), out=t)
torch.stack([t, t], out=t)
torch.relu_(t)
torch.clamp_(t, 0)
torch.nn.init.constant_(t, float(i))
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(i)
torch.rand(2)
torch.save(t, "file")
F.relu(t, inplace=True)
F.relu(t, True)
F.threshold(t, 1.0, 0.0, True)
F.threshold(t, 1.0, 0.0, inplace=True)
F.hardtanh(t, 0.0, 1.0, True)
F.dropout(t, 0.5, True, True)
F.normalize(t, 2.0, 0, 1e-12, t)
t.add_(i)
t.fill_(i)
t.copy_(t)
t.set_(t)
t.requires_grad_()
struct.pack_into("q", x, 0, i)
json.dumps([i], default=print)
sorted(self.paths, key=print)
setattr(self, "last", i)
self.paths.sort()
self.paths.append(i)
self.paths.pop()
self.words.update(b=i)
self.words.setdefault("b", i)
Path("file").replace("other")
Path("file").unlink()
Path("file").write_text("x")
open("file", "w")
open("file", self.paths[0])
open(i, closefd=False)
open("file", opener=print)
os.chdir("folder")
os.environ.update(a="b")
print(i)
named(x)
named(target=x)
Counting(i, i)
Record(i, i).__init__(i, i)
G.update(value=i)
(lambda kept=BUFFER: np.add(0, 1, out=kept))()
self.kept(i)
self.file.read(1)
len(self.odd)
str(self)
[SCALE for SCALE in [i]] + SCALE
[BUFFER for BUFFER in BUFFER.sort()]
{j: G.update(value=j) for j in [i]}
assert self.paths.append(i)
(self.paths.append(i) for j in [i])
map(print, [i])
exec("G = 1")
getattr(self, "append")(i)
time.tzset()
"""
LINES = [line for line in WRITERS.splitlines() if line]


def by_line(line: str, folder: Path) -> Any:
    """A data set whose samples run this line."""
    path = folder / "lines.py"
    head = "def __getitem__(self, i):\n    x, t, m = self.values, self.tensor, self.matrix\n"
    path.write_text(f"{head}    {line}\n    return x.copy()\n")
    linecache.clearcache()
    scope = {**globals(), "F": torch.nn.functional}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), scope)
    kind = type("ByLine", (Base,), {"__getitem__": scope["__getitem__"]})
    dataset = kind()
    dataset.tensor, dataset.matrix = torch.zeros(3), np.zeros((3, 3))
    dataset.kept = lambda i, kept=BUFFER: np.add(0, i, out=kept)
    dataset.odd = Scale()
    return dataset


@pytest.mark.parametrize("line", LINES)
def test_what_writes_to_what_is_kept_is_not_harmless(line: str, tmp_path: Path) -> None:
    assert not harmless(by_line(line, tmp_path))


@pytest.mark.parametrize(
    "line",
    ["np.add(0, i)", "np.clip(x, 0, i)", "torch.relu(t)", "x.min(0)", "assert len(x), f'no {i}'"],
)
def test_the_same_without_writing_is(line: str, tmp_path: Path) -> None:
    assert harmless(by_line(line, tmp_path))


def test_long_lists_are_not_looked_through() -> None:
    assert is_plain([0] * 1000) and is_plain([("a", 0)] * 1000)
    assert is_plain([[torch.zeros(1)], {"a": [1]}])
    assert not is_plain([0, object()]) and not is_plain([("a", 0), ("b", object())])
    assert not is_plain(range_like := [0] * 5_000_001), len(range_like)


class Kept(Base):
    """As people save an allocation: a buffer for each sample, of which a copy is given."""

    def __init__(self) -> None:
        super().__init__()
        self.images = np.arange(64 * 16, dtype=np.uint8).reshape(64, 16)
        self.buffer = np.empty(16, np.float32)

    def __getitem__(self, index: int) -> Any:
        np.multiply(self.images[index], 1 / 255, out=self.buffer)
        time.sleep(0.002)
        return torch.from_numpy(self.buffer.copy()), index


def test_a_buffer_that_is_kept_holds_what_one_thread_writes() -> None:
    with Loader(Kept(), 8, shuffle=True) as loader:
        expected = list(Loader(Kept(), 8, plan="inline", shuffle=True))
        assert all(map(identical, loader, expected)), loader.plan
        assert loader.plan.name != "threads" or loader.plan.workers == 1


COST = Measured(samples=9, seconds=0.001, cpu_seconds=0.0, bytes=16)


@pytest.mark.parametrize(("kind", "workers"), [(Sleeping, 16), (Writing, 1)])
def test_samples_that_wait_are_made_by_threads(
    kind: type, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: COST)
    with Loader(kind(), 4, shuffle=True) as loader:
        assert (loader.plan.name, loader.plan.workers) == ("threads", workers)
        expected = list(Loader(kind(), 4, plan="inline", shuffle=True))
        assert all(map(identical, loader, expected))


def _collating(samples: list[Any]) -> Any:
    return torch.rand(2), samples


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Sleeping(), ""),
        (Drawing(), "samples draw (torch.rand at test_feed_harmless.py:"),
        (Subset(Drawing(), [1]), "samples draw (torch.rand at test_feed_harmless.py:"),
        (ConcatDataset([Sleeping(), Drawing()]), "samples draw (torch.rand at "),
        (Writing(), "draw nothing and change nothing (self.last at test_feed_harmless.py:"),
        (
            HelpedBadly(),
            "change nothing (self.asked.append at test_feed_harmless.py:",
        ),
        (Unknown(), "(threading.Lock at test_feed_harmless.py:"),
        (AtOnce(), "(__getitems__ of AtOnce is not read)"),
    ],
)
def test_what_stood_in_the_way_is_named_with_its_place(dataset: Any, says: str) -> None:
    found = doubt(dataset, default_collate)
    assert says in found and bool(says) == bool(found)
    if says.endswith("harmless.py:"):
        line = int(found.split("harmless.py:")[1].split(")")[0])
        assert says.split("(")[1].split(" at ")[0] in linecache.getline(__file__, line)


def test_a_collate_function_may_stand_in_the_way_too() -> None:
    assert "samples draw (torch.rand at" in doubt(Sleeping(), _collating)
    assert "(the source of its collate_fn cannot be read)" in doubt(Sleeping(), threading.Lock)
