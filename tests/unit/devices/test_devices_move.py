"""Moving nests. The device ``meta`` is the other device: any machine has it."""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import types
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers load it, and it sets a variable that the leak police would see
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hasten
from hasten.devices import moving
from hasten.devices.moving import NotMovedWarning, move
from hasten.errors import UsageError

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(moving, "_said", set())


class Pair(NamedTuple):
    data: torch.Tensor
    label: int


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Plain


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlots:
    x: torch.Tensor
    unset: int = dataclasses.field(init=False)


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding: a mapping with a ``to`` of its own, which works in place."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class ListWithName(list):
    name = "mine"


class DictWithName(dict):
    name = ""


def ones():
    return torch.ones(2, 3)


NESTS = {
    "tensor": lambda: ones(),
    "tuple": lambda: (ones(), 1, "a"),
    "list": lambda: [ones(), [ones()]],
    "namedtuple": lambda: Pair(ones(), 3),
    "return type": lambda: ones().max(dim=1),
    "dict": lambda: {"a": ones(), 1: [ones()]},
    "OrderedDict": lambda: collections.OrderedDict(b=ones(), a=ones()),
    "defaultdict": lambda: collections.defaultdict(list, a=[ones()]),
    "UserDict": lambda: collections.UserDict(a=ones()),
    "mapping proxy": lambda: types.MappingProxyType({"a": ones()}),
    "deque": lambda: collections.deque([ones()], maxlen=4),
    "UserList": lambda: collections.UserList([ones()]),
    "dataclass": lambda: Plain(ones()),
    "frozen dataclass": lambda: Frozen(ones(), Plain(ones())),
    "dataclass with slots": lambda: Slots(ones()),
    "frozen dataclass with slots": lambda: FrozenSlots(x=ones()),
    "namespace": lambda: types.SimpleNamespace(a=ones(), b=2),
    "argparse": lambda: argparse.Namespace(a=ones(), b=2),
    "list subclass": lambda: ListWithName([ones()]),
}


def tensors(obj):
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, collections.abc.Mapping):
        return [found for value in obj.values() for found in tensors(value)]
    if isinstance(obj, (list, tuple, collections.deque, collections.UserList)):
        return [found for value in obj for found in tensors(value)]
    names = (
        [field.name for field in dataclasses.fields(obj)] if dataclasses.is_dataclass(obj) else []
    )
    values = [getattr(obj, name, None) for name in names] or getattr(obj, "__dict__", {}).values()
    return [found for value in values for found in tensors(value)] if values else []


@pytest.mark.parametrize("name", NESTS)
def test_every_tensor_is_moved_and_every_type_is_kept(name):
    nest = NESTS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = move(nest, META)
    assert type(moved) is type(nest)
    assert len(tensors(moved)) == len(tensors(nest)) > 0
    assert {t.device for t in tensors(moved)} == {META}
    assert {t.device for t in tensors(nest)} == {CPU}, "the given nest must not change"


@pytest.mark.parametrize("name", NESTS)
def test_nothing_is_copied_that_is_there_already(name):
    nest = NESTS[name]()
    assert move(nest, CPU) is nest
    assert move(nest, "cpu") is nest


def test_what_is_not_a_tensor_comes_back_as_it_is():
    moved = move(
        {"path": "a.png", "id": 7, "rate": 0.5, "none": None, "raw": b"x", "t": ones()}, META
    )
    assert {key: moved[key] for key in ("path", "id", "rate", "none", "raw")} == {
        "path": "a.png",
        "id": 7,
        "rate": 0.5,
        "none": None,
        "raw": b"x",
    }


def test_extras_of_a_container_are_kept():
    ordered = move(collections.OrderedDict(b=ones(), a=1), META)
    assert list(ordered) == ["b", "a"]
    assert move(collections.defaultdict(list, a=ones()), META)["new"] == []
    assert move(collections.deque([ones()], maxlen=4), META).maxlen == 4
    named = DictWithName(a=ones())
    named.name = "given"
    assert move(named, META).name == "given"
    plain = Plain(ones())
    plain.later = ones()  # set after construction
    assert move(plain, META).later.device == META


def test_only_the_branches_that_moved_are_rebuilt():
    inside = {"note": ["unchanged"]}
    moved = move([inside, ones()], META)
    assert moved[0] is inside


def test_a_shared_tensor_is_moved_once_and_stays_shared():
    shared, nest = ones(), [ones()]
    moved = move({"a": shared, "b": [shared], "c": nest, "d": nest}, META)
    assert moved["a"] is moved["b"][0]
    assert moved["c"] is moved["d"]


def test_a_nest_that_holds_itself_is_refused_by_path():
    loop: dict = {"a": ones()}
    loop["again"] = [loop]
    with pytest.raises(UsageError, match=r"\['again'\]\[0\].*holds itself"):
        move(loop, META)


def test_gradients_flow_through_a_move_within_a_device():
    weight = torch.ones(2, requires_grad=True)
    move([weight], CPU)[0].sum().backward()
    assert weight.grad is not None


def test_a_packed_sequence_stays_one():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move((packed, 1), META)[0]
    assert type(moved) is type(packed)
    assert moved.data.device == META
    assert moved.batch_sizes.device == CPU
    assert move(packed, CPU).data is packed.data


def test_a_module_is_moved_in_place():
    model = nn.Linear(2, 2)
    assert move({"model": model}, META)["model"] is model
    assert model.weight.device == META


def test_an_optimizers_state_is_moved_in_place_and_counters_stay():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert move(optimizer, META) is optimizer
    state = optimizer.state[model.weight]
    assert state["exp_avg"].device == META
    assert state["step"].device == CPU


def test_anything_with_a_to_is_moved_by_it():
    encoding = Encoding(ids=ones())
    assert move([encoding], META)[0] is encoding
    assert encoding["ids"].device == META

    class InPlace:
        def __init__(self):
            self.x = ones()

        def to(self, device, non_blocking=False):
            self.x = self.x.to(device, non_blocking=non_blocking)

    holder = InPlace()
    assert move(holder, META) is holder
    assert holder.x.device == META


class Holder:
    def __init__(self):
        self.parts = {"weights": ones()}


class SlotHolder:
    __slots__ = ("x",)

    def __init__(self):
        self.x = ones()


def generator():
    yield ones()


class Quantity:
    def to(self, unit):
        raise ValueError(f"{unit} is no unit")


class NoMapping(collections.abc.Mapping):
    def __init__(self):
        self._x = ones()

    def __getitem__(self, key):
        return {"x": self._x}[key]

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("obj", "parts"),
    [
        (Holder(), ["['batch'][0]", "Holder", ".parts['weights']", "to(device)"]),
        (SlotHolder(), ["SlotHolder", ".x"]),
        (np.ones(3), ["['batch'][0]", "numpy.ndarray", "torch.as_tensor"]),
        (generator(), ["generator", "iterator"]),
        ({ones()}, ["builtins.set"]),
        (Quantity(), ["Quantity", "is no unit"]),
        (NoMapping(), ["NoMapping", "takes no mapping"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_moved_is_said_once_for_its_type(obj, parts):
    nest = {"batch": [obj, obj, ones()]}
    with pytest.warns(NotMovedWarning) as caught:
        moved = move(nest, META)
    assert len(caught) == 1
    assert [part for part in parts if part not in str(caught[0].message)] == []
    assert caught[0].filename == __file__
    assert moved["batch"][0] is obj
    assert moved["batch"][2].device == META
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        move(nest, META)


@pytest.mark.parametrize("obj", [{1, 2}, object(), len, int, range(3), np.float32(1), copy, 1 + 2j])
def test_what_holds_no_tensor_is_left_alone_in_silence(obj):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert move([obj], META)[0] is obj


def test_a_full_device_is_not_mistaken_for_a_thing_that_cannot_move():
    class Full:
        def to(self, device, non_blocking=False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        move(Full(), META)


def test_it_is_public():
    assert hasten.move is move


class Asked(torch.Tensor):
    """Notes how it was to be moved, and stays where it is."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def to(self, device, non_blocking=False):
        moves.append(non_blocking)
        return self

    def is_pinned(self):
        return True


class AskedOnHost(Asked):
    device = CPU


moves = []


class Own:
    def to(self, device, non_blocking=False):
        moves.append(non_blocking)
        return self


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize(
    ("target", "overlaps"),
    [("cpu", False), ("mps", False), ("cuda", True), ("xpu", True), ("privateuseone", True)],
)
def test_the_host_waits_where_it_must(target, overlaps, wanted):
    """What is copied to it may be read at once; Apple's GPUs read what has changed by then."""
    moves.clear()
    tensor = torch.ones(2).as_subclass(Asked if target == "cpu" else AskedOnHost)
    move({"x": [tensor], "own": Own()}, torch.device(target, 0), non_blocking=wanted)
    assert moves == [overlaps and wanted is not False] * 2


def test_what_is_not_pinned_is_waited_for_where_nobody_asked_otherwise(monkeypatch):
    moves.clear()
    monkeypatch.setattr(AskedOnHost, "is_pinned", lambda tensor: False)
    move(torch.ones(2).as_subclass(AskedOnHost), torch.device("cuda", 0))
    assert moves == [False]


def test_batches_come_back_whole():
    """On the simulated device, which tells of what is read too early."""
    with hasten.simulate() as simulation:
        there = move({"x": torch.ones(9), "p": pack_sequence([torch.ones(3)])}, "cuda")
        back = move(there, "cpu", non_blocking=True)
        assert back["x"].tolist() == [1.0] * 9
        assert back["p"].data.tolist() == [1.0] * 3
        assert not [e for e in simulation.events if type(e).__name__ == "Hazard"]
