"""Batches of every nesting on a simulated device: pinned, copied ahead, recorded and bounded."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import hasten
from hasten.devices.holding import held
from hasten.feed import Loader
from hasten.simulate import Copy, Hazard
from slow_device import SLOW


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((250,), float(index))


class Pair(NamedTuple):
    x: Any
    note: str


@dataclasses.dataclass(frozen=True)
class Plain:
    x: Any


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any


class Graph:
    """As PyG's: neither a container nor a dataclass, with a `to` and a `pin_memory` of its own."""

    def __init__(self, x: Any) -> None:
        self._store = {"x": x}

    @property
    def x(self) -> Any:
        return self._store["x"]

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Graph:
        return type(self)(self.x.pin_memory())


class Encoding(collections.UserDict[str, Any]):
    """As transformers' BatchEncoding, whose `to` works in place."""

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        self.data = {k: v.to(device, non_blocking=non_blocking) for k, v in self.data.items()}
        return self


class Opaque:
    """What it holds cannot be looked into: it hides in a running generator."""

    def __init__(self, x: Any) -> None:
        self._hidden = _holding(x)
        next(self._hidden)

    @property
    def x(self) -> Any:
        return self._hidden.send(None)

    def to(self, device: Any, non_blocking: bool = False) -> Opaque:
        return Opaque(self.x.to(device, non_blocking=non_blocking))


def _holding(x: Any) -> Any:
    while True:
        yield x


class OpaqueThere(Graph):
    """One that can be looked into on the host alone."""

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return Opaque(self.x.to(device, non_blocking=non_blocking))


def attrs_like(x: Any) -> Any:
    kind = type("Attrs", (), {"__attrs_attrs__": (types.SimpleNamespace(name="x"),)})
    made = kind()
    made.x = x
    return made


MAKE: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, 3),
    "list": lambda x: [x, "text"],
    "named tuple": lambda x: Pair(x, "note"),
    "dict": lambda x: {"x": x, "n": 1},
    "default dict": lambda x: collections.defaultdict(list, x=x),
    "user dict": lambda x: collections.UserDict(x=x),
    "deque": lambda x: collections.deque([x]),
    "user list": lambda x: collections.UserList([x]),
    "dataclass": Plain,
    "dataclass with slots": Slots,
    "attrs class": attrs_like,
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "argparse": lambda x: argparse.Namespace(x=x),
    "deep": lambda x: {"a": [Plain((x, None))], "b": "text"},
    "packed": lambda x: pack_sequence(list(x)),
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "own to": Graph,
    "own to, in place": lambda x: Encoding(x=x),
    "own to, within": lambda x: [Graph(x)],
}
NAMES = pytest.mark.parametrize("name", MAKE)


def tensor_in(batch: Any) -> torch.Tensor:
    return held(batch).tensors[-1]


def loader_of(make: Callable[[Any], Any], **options: Any) -> Loader:
    def collate(samples: list[torch.Tensor]) -> Any:
        return make(default_collate(samples))

    return Loader(Rows(), 4, collate_fn=collate, **options)


def trained(simulation: Any, loader: Loader) -> list[Hazard]:
    """A loop whose step takes longer than a copy, and drops each batch."""
    for batch in loader.to("cuda"):
        tensor = tensor_in(batch)
        assert tensor.is_cuda
        for _ in range(6):
            tensor.abs()
        del batch, tensor
    torch.cuda.synchronize()
    return [event for event in simulation.events if isinstance(event, Hazard)]


def uploads(simulation: Any) -> list[Copy]:
    found = [e for e in simulation.events if isinstance(e, Copy) and e.direction == "h2d"]
    assert found
    return found


@NAMES
def test_its_memory_is_not_used_again_before_the_loop_is_done_with_it(name: str) -> None:
    with hasten.simulate(spec=SLOW) as simulation:
        assert trained(simulation, loader_of(MAKE[name], plan="inline")) == []
        assert all(copy.non_blocking for copy in uploads(simulation))


@NAMES
def test_unrecorded_it_would_be_and_that_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would catch: the same code, with no tensor recorded."""
    with hasten.simulate(spec=SLOW) as simulation, monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        found = trained(simulation, loader_of(MAKE[name], plan="inline"))
        assert {hazard.kind for hazard in found} == {"reused"}


@NAMES
@pytest.mark.parametrize("plan", ["inline", "threads", "processes", "taken"])
def test_every_copy_is_from_pinned_memory(name: str, plan: str) -> None:
    if plan == "processes" and name in ("attrs class", "sparse", "compressed"):
        pytest.skip("cannot be sent between processes")
    with hasten.simulate() as simulation:
        if plan == "taken":
            loader = Loader.from_dataloader(
                DataLoader(Rows(), 4, collate_fn=lambda s: MAKE[name](default_collate(s)))
            )
        else:
            loader = loader_of(MAKE[name], plan=plan)
        with loader:
            on_device = loader.to("cuda")
            assert on_device.plan.pinned
            given = [tensor_in(batch).cpu() for batch in on_device]
        assert len(given) == 10
        assert all(copy.pinned for copy in uploads(simulation))
        assert "not page-locked" not in on_device.explain()


class Bare(Graph):
    """As a user's own: there is a `to`, and nobody has thought of pinning."""

    pin_memory = None  # type: ignore[assignment]


def test_it_is_said_of_what_cannot_be_pinned() -> None:
    with hasten.simulate() as simulation:
        loader = loader_of(lambda x: (x, Bare(x + 1)), plan="inline").to("cuda")
        for tensor, bare in loader:
            assert torch.equal(tensor.cpu() + 1, bare.x.cpu())
        assert sum(copy.pinned for copy in uploads(simulation)) == 10
        assert "tensors that are not page-locked" in loader.explain()


@NAMES
def test_its_bytes_bound_the_depth(name: str) -> None:
    made: list[int] = []

    class Counting(Rows):
        def __getitem__(self, index: int) -> Any:
            made.append(index)
            return super().__getitem__(index)

    def collate(samples: list[torch.Tensor]) -> Any:
        return MAKE[name](default_collate(samples))

    with hasten.simulate():
        loader = Loader(Counting(), 4, collate_fn=collate, plan="inline")
        plan = dataclasses.replace(loader.to("cuda").plan, ahead_bytes=4 * 250 * 4)
        feed = loader._feeds._feed(torch.device("cuda", 0))  # type: ignore[union-attr]
        feed.executor.plan = plan
        next(iter(loader.to("cuda")))
        assert len(made) == 4, "a batch fills it"
        loader.close()


@pytest.mark.parametrize("kind", [Opaque, OpaqueThere])
def test_what_cannot_be_looked_into_is_copied_on_the_loop_s_stream(kind: Any) -> None:
    """Nobody could tell the allocator of its tensors, which the loop uses."""
    with hasten.simulate(spec=SLOW) as simulation:
        loader = loader_of(kind, plan="inline").to("cuda")
        assert "looked into" not in loader.explain()
        given = []
        for batch in loader:
            assert batch.x.is_cuda
            for _ in range(6):
                batch.x.abs()
            given.append(batch.x.cpu())
            del batch
        expected = DataLoader(Rows(), 4)
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
        assert [e for e in simulation.events if isinstance(e, Hazard)] == []
        blocking = [copy for copy in uploads(simulation) if not copy.non_blocking]
        assert len(blocking) == 10
        assert len(uploads(simulation)) == (10 if kind is Opaque else 20)
        assert "test_feed_nests.Opaque, which cannot be looked into" in loader.explain()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["samples", "columns", "graphs", "taken", "mixed"])
def test_data_that_lies_on_the_device_stays_there(kind: str, workers: int) -> None:
    """It cannot be pinned, which PyTorch says with a bare RuntimeError."""
    if workers and kind != "mixed":
        pytest.skip("device memory is not for worker processes")
    with hasten.simulate():
        x = torch.arange(40.0).reshape(40, 1).cuda()

        class There(Dataset[Any]):
            def __len__(self) -> int:
                return 40

            def __getitem__(self, index: int) -> Any:
                return x[index] * 2

        class Both(Rows):
            def __getitem__(self, index: int) -> Any:
                return torch.tensor([2.0 * index])

        loader: Loader
        if kind == "columns":
            loader = Loader(TensorDataset(x * 2), 8)
        elif kind == "graphs":
            loader = Loader(There(), 8, collate_fn=lambda samples: Graph(torch.stack(samples)))
        elif kind == "taken":
            loader = Loader.from_dataloader(DataLoader(There(), 8))
        elif kind == "mixed":
            loader = Loader(Both(), 8, num_workers=workers)
        else:
            loader = Loader(There(), 8)
        with loader:
            given = [tensor_in(batch) for batch in loader.to("cuda")]
        assert all(tensor.is_cuda for tensor in given)
        assert torch.cat(given).flatten().tolist() == [2.0 * n for n in range(40)]
