"""What a data set holds, what is around it and what it keeps: seen by who makes batches ahead."""

from __future__ import annotations

import contextvars
import ctypes
import decimal
import functools
import importlib
import io
import itertools
import logging
import random
import sys
import time
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from feed_datasets import same
from torch.utils.data import DataLoader, Dataset, default_collate

from hasten.feed import Loader, asgiven, foresight
from hasten.feed.asgiven import Tried
from hasten.feed.inside import Mark, alive

COUNT = 100
CACHE: dict[int, Any] = {}


class Numbers(Dataset[Any]):
    """Of what it holds in `x`, and of its class's attribute."""

    scale = 1.0
    bank = [0.0]  # noqa: RUF012 - shared by all, as that is the point

    def __init__(self, x: Any = None) -> None:
        self.x = x

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        value = index if self.x is None else self.x[index]
        return torch.tensor([float(value) * type(self).scale + self.bank[0]])


class Inherited(Numbers):
    pass


def replace(x: Any) -> None:
    x[70] = 5


def rotate(x: Any) -> None:
    x.rotate(1)


def scale(_: Any) -> None:
    Numbers.scale = 2.0


def bank(_: Any) -> None:
    Numbers.bank[0] = 3.0


def method(_: Any) -> None:
    Numbers.__len__ = lambda self: COUNT  # type: ignore[method-assign]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "list": (lambda: [float(each) for each in range(COUNT)], replace),
    "dict": (lambda: dict.fromkeys(range(COUNT), 1), replace),
    "of lists": (lambda: {each: [each] for each in range(COUNT)}, replace),
    "deque": (lambda: deque(range(COUNT)), rotate),
    "bytes": (lambda: bytearray(COUNT), replace),
    "array": (lambda: array("i", range(COUNT)), replace),
    "numpy": (lambda: np.zeros(COUNT), replace),
    "set": (lambda: set(range(COUNT)), lambda x: x.symmetric_difference_update({1, 1000})),
    "class": (lambda: None, scale),
    "class list": (lambda: None, bank),
    "class function": (lambda: None, method),
}


@pytest.fixture(autouse=True)
def as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "scale", 1.0)
    monkeypatch.setattr(Numbers, "bank", [0.0])
    monkeypatch.setattr(Numbers, "__len__", Numbers.__len__)
    CACHE.clear()
    cached.cache_clear()
    once.cache_clear()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_mark_tells_of_every_item_and_of_classes(kind: str) -> None:
    make, change = CHANGES[kind]
    dataset = Inherited(make())
    mark = Mark({"held": [dataset]})
    assert mark.told
    assert not mark.changed()
    change(dataset.x)
    assert mark.changed()


@pytest.mark.parametrize("kind", [name for name in CHANGES if name not in ("set", "of lists")])
def test_what_the_loop_writes_comes_at_once(kind: str) -> None:
    """A list of more than 64 numbers, or an attribute of a class, came with the next epoch."""
    make, change = CHANGES[kind]

    def play(batches: Any, dataset: Any) -> list[Any]:
        seen = []
        for number, batch in enumerate(batches):
            seen.append(batch)
            if number == 3:
                change(dataset.x)
        Numbers.scale, Numbers.bank[0] = 1.0, 0.0
        return seen

    here, there = Inherited(make()), Inherited(make())
    expected = play(DataLoader(here, 4), here)
    with Loader.from_dataloader(DataLoader(there, 4), plan="processes") as loader:
        assert same(play(loader, there), expected)
        assert loader.plan.name == "inline"


def test_what_is_put_back_equal_is_no_change() -> None:
    dataset = Numbers([str(each) for each in range(COUNT)])
    mark = Mark(dataset)
    dataset.x[3] = "".join("3")
    assert not mark.changed()


def test_more_than_can_be_compared_before_each_batch_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hasten.feed.inside._MOST_ITEMS", 250)
    dataset = Numbers([[0] * 100, [1] * 100, [2] * 100])
    assert not Mark(dataset).told
    assert Mark(dataset).changed()
    loader = Loader.from_dataloader(DataLoader(dataset, 4))
    assert "cannot be watched for changes, or is too much" in loader.plan.reason


def test_items_that_do_not_compare_count_as_changed() -> None:
    dataset = Numbers([torch.zeros(2) for _ in range(COUNT)])
    mark = Mark(dataset)
    assert not mark.changed()
    dataset.x[70] = torch.zeros(2)
    assert mark.changed()


def test_loggers_are_passed_over() -> None:
    dataset = Numbers(logging.getLogger("hasten.feed"))
    mark = Mark(dataset)
    logging.getLogger("hasten.feed.somebody").setLevel("INFO")
    assert mark.told
    assert not mark.changed()


class Settings:
    scale = 1.0


class Share(float):
    pass


def scaled(index: int) -> float:
    return index * SCALES["all"]


def random_once(index: int) -> float:
    return GENERATOR.random() if index == 7 else index


SCALES = {"all": 1.0}
GENERATOR = random.Random(4)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def tagged(scale: float = 1.0) -> torch.Tensor:
    x = torch.arange(COUNT).float()
    x.scale = scale  # type: ignore[attr-defined]
    return x


def objects() -> Any:
    items = np.empty(3, object)
    items[:] = [[1.0], [2.0], [3.0]]
    return items


# What it is made of, what the data set holds of that, and what the loop does.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "method of a dict": (lambda: {1: 1}, lambda x: x.get, lambda x: x.update({1: 2})),
    "method of a list": (lambda: [1], lambda x: x.__getitem__, lambda x: x.append(2)),
    "values": (lambda: {1: 1}, lambda x: x.values(), lambda x: x.update({1: 2})),
    "proxy": (lambda: {1: 1}, types.MappingProxyType, lambda x: x.update({1: 2})),
    "memoryview": (lambda: bytearray(600), memoryview, lambda x: x.__setitem__(3, 1)),
    "weak": (lambda: torch.nn.Linear(1, 1), weakref.ref, lambda x: x.weight.data.fill_(3)),
    "in memory": (lambda: io.BytesIO(b"12"), lambda x: x, lambda x: x.write(b"3")),
    "read on": (lambda: io.StringIO("12"), lambda x: x, lambda x: x.read(1)),
    "ctypes": (lambda: (ctypes.c_int * 600)(), lambda x: x, lambda x: x.__setitem__(500, 1)),
    "class": (lambda: Settings, lambda x: x, lambda x: setattr(x, "scale", 2.0)),
    "function": (lambda: lambda: 1, lambda x: x, lambda x: setattr(x, "scale", 2.0)),
    "number": (lambda: Share(1), lambda x: x, lambda x: setattr(x, "scale", 2.0)),
    "tensor's": (tagged, lambda x: x, lambda x: setattr(x, "scale", 2.0)),
    "data": (tagged, lambda x: x, lambda x: x.data.fill_(3)),
    "NumPy's": (tagged, lambda x: x, lambda x: x.numpy().fill(3)),
    "bfloat16": (lambda: tagged().bfloat16(), lambda x: x, lambda x: x.data.fill_(3)),
    "of a model": (
        lambda: torch.nn.Linear(90, 90),
        lambda x: x,
        lambda x: x.weight.data.mul_(0.5),
    ),
    "array of objects": (objects, lambda x: x, lambda x: x[1].append(3.0)),
    "variable": (lambda: SCALES, lambda x: scaled, lambda x: x.update(all=2.0)),
    "generator": (lambda: GENERATOR, lambda x: random_once, lambda x: x.random()),
    "context": (lambda: VARIABLE, lambda x: x, lambda x: x.set(2.0)),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_objects_of_python_s_own_refer_to_is_seen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "scale", 1.0)
    monkeypatch.setitem(SCALES, "all", 1.0)
    make, hold, change = HELD[kind]
    made = make()
    mark = Mark({"held": [Numbers(hold(made))]})
    assert mark.told
    assert not mark.changed()
    token = change(made)
    assert mark.changed()
    if isinstance(token, contextvars.Token):
        VARIABLE.reset(token)


def test_variables_of_another_module_of_a_person_s_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scales_of_mine.py").write_text("SCALE = 1.0\nOTHER = 1.0\n")
    (tmp_path / "of_mine.py").write_text(
        "import os\nimport PIL.Image\nimport scales_of_mine\n"
        "def scaled(index):\n    return os.sep, PIL.Image.open, index * scales_of_mine.SCALE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    function = importlib.import_module("of_mine").scaled
    scales = importlib.import_module("scales_of_mine")
    mark = Mark(Numbers(function))
    PIL.Image.init()  # fills tables of its own
    scales.OTHER = 2.0
    assert not mark.changed()
    scales.SCALE = 2.0
    assert mark.changed()


INSIDE = """
def imported(index):
    import mine.scales
    return index * mine.scales.SCALE

def from_it(index):
    from mine.scales import SCALE
    return index * SCALE

def relative(index):
    from .scales import SCALE
    return index * SCALE

def nested(index):
    return [(lambda: __import__ and _scaled(each))() for each in [index]]

def _scaled(index):
    from . import scales
    return index * scales.SCALE

import mine.scales

def dotted(index):
    return index * mine.scales.SCALE

def called(index):
    return mine.scales.scaled(index)
"""


@pytest.mark.parametrize("name", ["imported", "from_it", "relative", "nested", "dotted", "called"])
def test_variables_are_seen_however_their_module_is_reached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "scales.py").write_text(
        "SCALE = 1.0\nOTHER = 1.0\ndef scaled(index):\n    return index * SCALE\n"
    )
    (tmp_path / "mine" / "used.py").write_text(INSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    scales, used = (importlib.import_module(f"mine.{of}") for of in ("scales", "used"))
    try:
        mark = Mark(Numbers(getattr(used, name)))
        scales.OTHER = 2.0
        assert not mark.changed()
        scales.SCALE = 2.0
        assert mark.changed()
    finally:
        for module in ("mine", "mine.scales", "mine.used"):
            del sys.modules[module]


LARGE: dict[str, Callable[[], Any]] = {
    "rows": lambda: torch.zeros(1000, 600),
    "one dimension": lambda: torch.zeros(600_000),
    "images": lambda: torch.zeros(100, 3, 64, 64),
    "transposed": lambda: torch.zeros(600, 1000).T,
    "channels last": lambda: torch.zeros(64, 8, 32, 32).to(memory_format=torch.channels_last),
    "weights": lambda: torch.nn.Parameter(torch.zeros(1000, 600)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_what_is_written_all_over_a_large_tensor_without_a_trace_is_seen(kind: str) -> None:
    made = LARGE[kind]()
    for held in (made, made.detach().numpy()):
        mark = Mark(Numbers(held))
        assert mark.told
        assert not mark.changed()
        made.data.add_(1)
        assert mark.changed()


def test_a_step_of_a_fused_optimizer_is_seen() -> None:
    """It counts no write."""
    layer = torch.nn.Linear(1000, 600)
    mark = Mark(Numbers(layer))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    layer(torch.ones(2, 1000)).sum().backward()
    mark = Mark(Numbers(layer))
    version = layer.weight._version
    assert not mark.changed()
    optimizer.step()
    assert mark.changed()
    assert layer.weight._version == version, "else this tests nothing"


def test_a_long_bytearray_that_is_written_all_over_is_seen() -> None:
    held = bytearray(1 << 21)
    mark = Mark(Numbers(held))
    assert not mark.changed()
    held[:] = b"1" * len(held)
    assert mark.changed()


def _dtype() -> None:
    torch.set_default_dtype(torch.float64)


def _errors() -> None:
    np.seterr(all="raise")


def _digits() -> None:
    decimal.getcontext().prec = 5


def _gradients() -> None:
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("change", [_dtype, _errors, _digits, _gradients])
def test_modes_that_the_loop_leaves_set_are_seen(change: Callable[[], None]) -> None:
    dtype, errors, digits = torch.get_default_dtype(), np.geterr(), decimal.getcontext().prec
    mark = Mark(Numbers())
    assert not mark.changed()
    try:
        change()
        assert mark.changed()
    finally:
        torch.set_default_dtype(dtype)
        np.seterr(**errors)
        decimal.getcontext().prec = digits
        torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    "live",
    [itertools.cycle([1]), iter([1, 2]), zip([1], [2], strict=True), map(abs, [1]), reversed([1])],
)
def test_iterators_that_do_not_tell_how_far_they_are_are_alive(live: Any) -> None:
    assert alive(Numbers(live))
    assert not alive(Numbers(itertools.count()), io.BytesIO())


class Reading(Numbers):
    """Each sample is the next of an iterator, whatever the index."""

    def __getitem__(self, index: int) -> Any:
        return next(self.x)


@pytest.mark.parametrize("make", [itertools.cycle, iter])
@pytest.mark.parametrize("size", [4, None])
def test_a_data_set_that_reads_an_iterator_is_not_made_ahead(make: Any, size: Any) -> None:
    """Worker processes had read on in copies of it when that was noticed."""
    here, there = (Reading(make(range(2 * COUNT))) for _ in range(2))
    expected = [list(DataLoader(here, size)) for _ in range(2)]
    with Loader.from_dataloader(DataLoader(there, size), plan="processes") as loader:
        assert same([list(loader) for _ in range(2)], expected)
        assert loader.plan.name == "inline"


# What is kept for when it is asked for again -----------------------------------------------------


@functools.cache
def cached(index: int) -> torch.Tensor:
    return torch.full((2,), float(index))


def looked_up(index: int) -> torch.Tensor:
    if index not in CACHE:
        CACHE[index] = torch.full((2,), float(index))
    return CACHE[index]  # type: ignore[no-any-return]


def remembering(function: Any) -> Any:
    """As somebody writes such a decorator."""
    known: dict[int, Any] = {}

    def call(self: Any, index: int) -> Any:
        if index not in known:
            known[index] = function(self, index)
        return known[index]

    return call


class ByFunction(Numbers):
    def __getitem__(self, index: int) -> Any:
        return cached(index) + 1


class ByVariable(Numbers):
    def __getitem__(self, index: int) -> Any:
        return looked_up(index) + 1


class ByMethod(Numbers):
    __hash__ = Dataset.__hash__

    @functools.cache  # noqa: B019
    def made(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))

    def __getitem__(self, index: int) -> Any:
        return self.made(index)


class ByDecorator(Numbers):
    @remembering
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index))


class ByClass(Numbers):
    known: dict[int, Any] = {}  # noqa: RUF012

    def __getitem__(self, index: int) -> Any:
        return self.known.setdefault(index, torch.full((2,), float(index)))


class ByList(Numbers):
    def __init__(self) -> None:
        super().__init__([None] * COUNT)

    def __getitem__(self, index: int) -> Any:
        self.x[index] = torch.full((2,), float(index)) if self.x[index] is None else self.x[index]
        return self.x[index]


class ByArray(Numbers):
    def __init__(self) -> None:
        super().__init__(np.full(COUNT, np.nan))

    def __getitem__(self, index: int) -> Any:
        self.x[index] = float(index)
        return torch.tensor(self.x[index])


@pytest.mark.parametrize(
    "kind", [ByFunction, ByVariable, ByMethod, ByDecorator, ByClass, ByList, ByArray]
)
def test_a_data_set_that_caches_is_iterated_as_it_is(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that begin anew in each epoch made every sample of every epoch."""
    monkeypatch.setattr(foresight, "_CHEAP_BATCH_S", 0.0)
    monkeypatch.setattr(foresight, "_START_WORKERS_S", 0.0)
    monkeypatch.setattr(foresight.runtime, "cores", lambda: 2)
    plan = Loader.from_dataloader(DataLoader(kind(), 4)).plan
    assert plan.name == "inline"
    assert "(a cache)" in plan.reason or "changes when it is asked" in plan.reason
    assert Loader.from_dataloader(DataLoader(Numbers(), 4)).plan.name == "processes"


class Timed(Numbers):
    """By clocks of its own; keeps samples where nobody can see it, or the system does."""

    def __init__(self, again_s: float, again_cpu_s: float) -> None:
        self.again = SimpleNamespace(wall=again_s, cpu=again_cpu_s)
        self.wall, self.cpu = 0.0, 0.0
        self.done = torch.zeros(COUNT)

    def __getitem__(self, index: int) -> Any:
        again = bool(self.done[index])
        self.wall += self.again.wall if again else 0.01
        self.cpu += self.again.cpu if again else 0.01
        self.done[index] = 1
        return index


@pytest.mark.parametrize(
    ("again_s", "again_cpu_s", "caches"),
    [(0.01, 0.01, False), (0.0005, 0.0005, True), (0.0005, 0.01, False), (0.01, 0.0005, False)],
)
@pytest.mark.parametrize("batched", [True, False])
def test_samples_that_come_many_times_quicker_when_asked_again_are_kept(
    again_s: float, again_cpu_s: float, caches: bool, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that take as much processor time as before: their files are in memory by then."""
    dataset = Timed(again_s, again_cpu_s)
    clock = SimpleNamespace(perf_counter=lambda: dataset.wall, thread_time=lambda: dataset.cpu)
    monkeypatch.setattr(asgiven, "time", clock)
    collate = default_collate if batched else torch.tensor
    maker = asgiven.AsGiven(dataset, collate, skip_errors=False, batched=batched)
    batches: list[Any] = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] if batched else [0, 1, 2]
    found = asgiven.AsGivenWork(maker, None).run(asgiven.Trial(batches))
    assert isinstance(found, Tried)
    assert found.caches is caches


@functools.cache
def once() -> float:
    return time.time()


def test_what_only_imports_or_counts_once_is_no_cache() -> None:
    class Once(Numbers):
        def __getitem__(self, index: int) -> Any:
            once()
            return index

    plan = Loader.from_dataloader(DataLoader(Once(), 4)).plan
    assert "too cheap to hand over" in plan.reason


def test_an_array_of_structures_with_objects_is_the_same_until_written_to() -> None:
    held = np.zeros(3, dtype=[("a", "i4"), ("b", "O")])
    mark = Mark(Numbers(held))
    assert not mark.changed()
    held["b"][1] = "other"
    assert mark.changed()
