"""Where hasten chooses, what comes is what a DataLoader of the same arguments gives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from hasten.devices import runtime
from hasten.errors import DataError, UsageError
from hasten.feed import Loader
from hasten.feed import sizing as sizing_module
from hasten.feed.measure import Measured


@pytest.fixture
def processes_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what samples cost; hasten chooses those then."""
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    cost = Measured(samples=9, seconds=0.5, cpu_seconds=0.5, bytes=32)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)


class Learnt(kinds.Plain):
    """Samples that autograd would go on from."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index), requires_grad=True) * 2


class OfTwoDtypes(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index], dtype=(torch.int64, torch.float32)[index % 2])


class SomeUnsendable(kinds.Plain):
    def __getitem__(self, index: int) -> Any:
        return (lambda: index) if index == 13 else index


def _values(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("learnt", [True, False])
def test_what_no_process_can_send_comes_from_the_loop_s(learnt: bool, processes_pay: None) -> None:
    data: Any = Learnt() if learnt else SomeUnsendable()
    options: Any = {"batch_size": 2, "collate_fn": None if learnt else _values}
    expected = list(DataLoader(data, **options))
    with Loader(data, **options) as loader:
        assert loader.plan.name == "processes"
        found = [list(loader) for _ in range(2)]
        assert loader.plan.name == "inline"
        assert "not processes: batches cannot be sent (" in loader.explain()
    for epoch in found:
        assert len(epoch) == len(expected)
        if learnt:
            assert all(batch.grad_fn is not None for batch in epoch)
            assert all(map(torch.equal, epoch, expected))
        else:
            plain = [[sample() if callable(sample) else sample for sample in b] for b in epoch]
            assert list(chain.from_iterable(plain)) == list(range(23))


def test_processes_collate_what_the_loop_s_thread_does(processes_pay: None) -> None:
    """Some dtypes go together by default, but not into the memory that a worker stacks into."""
    expected = list(DataLoader(OfTwoDtypes(), 4))
    for options in ({}, {"num_workers": 1}):
        with Loader(OfTwoDtypes(), 4, **options) as loader:
            assert loader.plan.name == "processes"
            assert kinds.same(list(loader), expected)
            assert loader.plan.name == "processes"


class Half(kinds.Plain):
    """Its sample's dtype is that of the index, and it is no int for all that asks for one."""

    def __getitem__(self, index: Any) -> Any:
        return index / 2, type(index).__name__


class HalfTogether(Half):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(indices[place] / 2, type(indices).__name__) for place in range(len(indices))]


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler, tensor": lambda: {"sampler": torch.tensor([3, 1, 2]), "batch_size": 2},
    "sampler, array": lambda: {"sampler": np.array([3, 1, 2], dtype=np.int32), "batch_size": 2},
    "sampler, alone": lambda: {"sampler": torch.tensor([3, 1, 2]), "batch_size": None},
    "batch_sampler, tensors": lambda: {"batch_sampler": [torch.tensor([3, 1]), torch.tensor([2])]},
    "batch_sampler, arrays": lambda: {"batch_sampler": [np.array([3, 1], dtype=np.int16)]},
    "batch_sampler, tuples": lambda: {"batch_sampler": [(3, 1), (2,)]},
    "batch_sampler, ranges": lambda: {"batch_sampler": [range(3), range(4, 6)]},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    "in order": lambda: {"batch_size": 4},
}


@pytest.mark.parametrize("plan", ["inline", "threads", "processes"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_data_set_is_given_the_sampler_s_own_indices(
    kind: str, together: bool, plan: str
) -> None:
    data = HalfTogether() if together else Half()
    with Loader(data, **SAMPLERS[kind](), plan=plan) as loader:
        assert kinds.same(list(loader), list(DataLoader(data, **SAMPLERS[kind]())))


@pytest.mark.parametrize("dataset", [kinds.Drawing(), kinds.Fetching()])
def test_draws_follow_from_the_index_whatever_kind_of_number_it_is(dataset: Any) -> None:
    given: list[Any] = [[4, 7, 1], np.array([4, 7, 1]), torch.tensor([4, 7, 1], dtype=torch.uint8)]
    found = [list(Loader(dataset, 2, sampler=sampler, plan="inline")) for sampler in given]
    plain = [[batch[0] for batch in batches] for batches in found]
    assert kinds.same(plain[1], plain[0])
    assert kinds.same(plain[2], plain[0])
    if isinstance(dataset, kinds.Fetching):
        assert kinds.same(found[2], found[0]), "fetch is given Python's numbers"


def test_a_failing_sample_is_named_by_its_number() -> None:
    class Failing(kinds.Plain):
        paths = tuple(f"{number}.png" for number in range(23))

        def __getitem__(self, index: Any) -> Any:
            raise ValueError("broken")

    loader = Loader(Failing(), 2, sampler=torch.tensor([4, 7]), plan="inline")
    with pytest.raises(DataError, match=r"^sample 4 \(4\.png\) of Failing"):
        list(loader)


PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    "every row is another": lambda self, index: tuple(column[index] * 2 for column in self.tensors),
    "the last row is": lambda self, index: tuple(c[min(index, 98)] for c in self.tensors),
    "rows behind 50 are": lambda self, index: tuple(c[index % 50] for c in self.tensors),
    "in its nesting": lambda self, index: {"x": self.tensors[0][index]},
    "in its dtype": lambda self, index: tuple(c[index].double() for c in self.tensors),
    "it draws": lambda self, index: (torch.rand(1), self.tensors[0][index])[1:],
    "it raises": lambda self, index: 1 / 0,
}


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("below", ["itself", "Subset", "ConcatDataset"])
def test_whole_tensors_are_compared_with_the_ordinary_way_and_not_assumed(
    below: str, patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class known by name may be changed by somebody's program."""
    whole: Any = TensorDataset(torch.arange(100.0)[:, None])
    data = {
        "itself": whole,
        "Subset": Subset(whole, list(range(100))),
        "ConcatDataset": ConcatDataset([whole, whole]),
    }[below]
    assert Loader(data, 10).plan.name == "gather"
    monkeypatch.setattr(TensorDataset, "__getitem__", PATCHES[patch])
    loader = Loader(data, 10)
    assert loader.plan.name != "gather"
    if patch == "it raises":
        with pytest.raises(DataError, match="ZeroDivisionError"):
            list(loader)
    else:
        assert kinds.same(list(loader), list(DataLoader(data, 10)))
    with pytest.raises(UsageError, match="is not recognised as one"):
        list(Loader(data, 10, plan="gather"))
