"""A prepared module computes at its run's precision however it is called, and stays itself."""

from __future__ import annotations

import collections
import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from train_helpers import QUIET, mlp

import hasten
from hasten.train.half import run_at, to_float32
from hasten.train.precision import Precision


class Told:
    def __init__(self, name: str = "bfloat16") -> None:
        self.precision = Precision(name=name)
        self.device = torch.device("cpu")


class Inner(nn.Module):
    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.fail = fail
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        self.seen.append(out.dtype)
        if self.fail:
            raise ValueError("in forward")
        return out


@pytest.fixture(autouse=True)
def autocast_is_left_off() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")


X = torch.ones(2, 6)


def test_it_computes_in_half_and_gives_float32():
    module = Inner()
    run_at(module, Told())
    assert module(X).dtype == torch.float32
    assert module.seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


def test_the_precision_is_asked_at_each_call():
    module, run = Inner(), Told()
    run_at(module, run)
    module(X)
    run.precision = Precision(name="float32")
    module(X)
    assert module.seen == [torch.bfloat16, torch.float32]


def test_an_error_in_the_forward_pass_leaves_autocast_off():
    module = Inner(fail=True)
    run_at(module, Told())
    for _ in range(2):
        with pytest.raises(ValueError, match="in forward"):
            module(X)
        assert not torch.is_autocast_enabled("cpu")
    module.fail = False
    assert module(X).dtype == torch.float32


def test_an_error_in_another_hook_leaves_autocast_off():
    def fail(module: nn.Module, args: Any) -> None:
        raise ValueError("in a hook")

    module = Inner()
    module.register_forward_pre_hook(fail)
    run_at(module, Told())
    with pytest.raises(ValueError, match="in a hook"):
        module(X)


def test_modules_within_modules():
    inner = Inner()
    outer = nn.Sequential(inner, nn.ReLU(), Inner(fail=True))
    run = Told()
    run_at(outer, run)
    run_at(inner, run)
    with pytest.raises(ValueError):
        outer(X)
    outer[2].fail = False
    assert outer(X).dtype == torch.float32
    assert inner(X).dtype == torch.float32
    assert set(inner.seen) == {torch.bfloat16}


def test_a_module_that_calls_itself():
    class Again(Inner):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return super().forward(x) if depth == 0 else self(x, depth - 1)

    module = Again()
    run_at(module, Told())
    assert module(X).dtype == torch.float32 and module.seen == [torch.bfloat16]


def test_it_is_the_same_module_with_the_same_names():
    module = Inner()
    names, parameters = list(module.state_dict()), list(module.parameters())
    run_at(module, Told())
    assert list(module.state_dict()) == names
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


def test_prepared_for_another_run_it_follows_that_one():
    module = Inner()
    run_at(module, Told("bfloat16"))
    run_at(module, Told("float32"))
    module(X)
    assert module.seen == [torch.float32]
    assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1


def test_a_deep_copy_computes_alike_and_apart():
    module = Inner()
    run_at(module, Told())
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.zero_()
    assert twin(X).abs().sum() == 0 and twin.seen == [torch.bfloat16]
    assert module(X).abs().sum() > 0


def test_a_pickled_module_has_forgotten_it():
    module = Inner()
    run_at(module, Told())
    loaded = pickle.loads(pickle.dumps(module))
    assert loaded(X).dtype == torch.float32 and loaded.seen == [torch.float32]
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_threads_each_have_their_own():
    barrier = threading.Barrier(2)
    failures: list[str] = []

    class Meeting(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            barrier.wait(10)  # both are within their forward passes
            out = super().forward(x)
            barrier.wait(10)
            return out

    module = Meeting()
    run_at(module, Told())

    def work() -> None:
        for _ in range(3):
            result = module(X)
            if result.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
                failures.append(str(result.dtype))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and module.seen == [torch.bfloat16] * 6


def test_a_run_prepares_modules_so():
    run = hasten.Run(**QUIET | {"precision": "bfloat16"})
    model = run.prepare(mlp())
    assert model(X).dtype == torch.float32
    half = model(X)
    run.precision = Precision(name="float32")
    torch.testing.assert_close(model(X), mlp()(X))
    assert not torch.equal(half, mlp()(X))


class Pair(NamedTuple):
    one: torch.Tensor
    other: Any


def test_nests_come_out_as_float32_of_the_same_types():
    half = torch.ones(2, dtype=torch.bfloat16)
    whole, count = torch.ones(2), torch.ones(2, dtype=torch.int64)
    nest = Pair(half, {"a": [half, (whole, "word", None)], "b": count})
    found = to_float32(nest)
    assert type(found) is Pair and found.one.dtype == torch.float32
    assert found.other["a"][0].dtype == torch.float32
    assert found.other["a"][1][0] is whole and found.other["a"][1][1:] == ("word", None)
    assert found.other["b"] is count
    assert nest.other["a"][0] is half  # what was given is as it was


def test_mappings_keep_their_kind():
    half = torch.ones(2, dtype=torch.float16)
    for kind in (dict, collections.OrderedDict, collections.UserDict):
        found = to_float32(kind({"out": half, 3: "x"}))
        assert type(found) is kind and found["out"].dtype == torch.float32 and found[3] == "x"
    default = collections.defaultdict(list, {"out": half})
    assert to_float32(default).default_factory is list
    same = {"out": torch.ones(1)}
    assert to_float32(same) is same


def test_a_scheduler_does_not_step_where_float16_left_the_step_out() -> None:
    """As torch advises: its schedule is of the steps that were taken."""
    run = hasten.Run(**QUIET | {"precision": "float16"})
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.prepare(model, optimizer, scheduler)
    rates, weights = [], []
    given = [torch.ones(2, 4), torch.full((2, 4), 1e38), torch.ones(2, 4)]
    for _ in run.epochs(1):
        for data in run.batches(given):
            loss = (model.weight.float() * data[0, 0]).sum() * 1e-3
            run.backward(loss)
            run.step(optimizer, scheduler)
            rates.append(scheduler.get_last_lr()[0])
            weights.append(model.weight.detach().clone())
    assert torch.equal(weights[0], weights[1]), "the second step was to be left out"
    assert rates == [0.5, 0.5, 0.25]
