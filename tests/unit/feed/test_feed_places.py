"""How batches come to a device, by its type: what is planned, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten
from hasten.devices import runtime
from hasten.devices.runtime import queues
from hasten.feed import Loader, placing


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ("mps", {"pin": False, "can_pin": False, "ahead": 0}, "Apple's GPUs"),
        ("meta", {"pin": False, "can_pin": False, "ahead": 0}, "no asynchronous copies"),
        ("cuda", {"pin": False, "can_pin": True, "ahead": 2}, "pageable memory"),
        ("cuda", {"pin": False, "can_pin": False, "ahead": 2}, "cannot be page-locked"),
        ("cuda", {"pin": True, "can_pin": True, "ahead": 2}, ""),
    ],
)
def test_why_copies_cannot_run_beside_the_computation(
    device: str, options: dict[str, Any], said: str
) -> None:
    why = placing.why_not_beside(torch.device(device), **options)
    assert (said in why) and bool(said) == bool(why)


def test_explain_says_it() -> None:
    dataset = TensorDataset(torch.arange(400.0).reshape(100, 4))
    assert "nothing is copied" in Loader(dataset, 7).to("cpu").explain()
    with hasten.simulate():
        loader = Loader(dataset, 7, plan="gather", pin_memory=False)
        assert "pin_memory=False" in loader.to("cuda").explain()
        assert "do not run beside" not in Loader(dataset, 7, plan="gather").to("cuda").explain()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"copy_engines": 0}, {}, "has no copy engine of its own"),
        ({"copy_engines": 2}, {}, ""),
        ({"copy_engines": None}, {}, ""),
        ({"can_pin": False}, {}, "memory cannot be page-locked for cuda:0"),
        ({"stream": None}, {}, "cuda:0 gives no second queue"),
        ({"stream": None, "can_overlap": False}, {}, "cuda has no asynchronous copies"),
        ({}, {"pin_memory": False}, "a copy from pageable memory holds up the host"),
    ],
)
@pytest.mark.parametrize("kind", ["gather", "workers", "taken gather", "taken workers", "taken"])
def test_explain_tells_each_reason(
    kind: str,
    change: dict[str, Any],
    options: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if options and "taken" in kind:
        pytest.skip("a DataLoader's pin_memory=False is what it is where nobody thought of it")
    with hasten.simulate():
        for name, value in change.items():
            monkeypatch.setattr(runtime, name, lambda device, value=value: value)
        with loader_of(kind, **options) as loader:
            told = reasons(loader.to("cuda").explain())
            if kind == "taken" and change == {"can_pin": False}:
                said = "a batch is made when the loop asks for it"
            assert len(told) == bool(said) and all(said in line for line in told)
            plan = loader.to("cuda").plan
            assert plan.pinned == (not options and "can_pin" not in change)


def loader_of(kind: str, **options: Any) -> Loader:
    tensors, samples = TensorDataset(torch.ones(9)), Samples()
    if kind == "gather":
        return Loader(tensors, 2, plan="gather", **options)
    if kind == "workers":
        return Loader(samples, 2, num_workers=1, **options)
    if kind == "taken gather":
        return Loader.from_dataloader(DataLoader(tensors, 2), plan="gather")
    if kind == "taken workers":
        return Loader.from_dataloader(DataLoader(samples, 2, num_workers=1))
    return Loader.from_dataloader(DataLoader(samples, 2), plan="inline")


def reasons(explained: str) -> list[str]:
    return [line for line in explained.splitlines() if "do not run beside" in line]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index))


KINDS = ("gather", "workers", "taken gather", "taken workers", "taken")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("type_", "ahead", "pinned", "said"),
    [
        ("cuda", True, True, ""),
        ("xpu", True, True, ""),
        ("privateuseone", True, True, ""),
        ("mps", False, False, "Apple's GPUs"),
        ("meta", False, False, "meta has no asynchronous copies"),
    ],
)
def test_copies_run_ahead_as_far_as_the_device_s_rules_allow(
    kind: str, type_: str, ahead: bool, pinned: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is here: what PyTorch is asked, it answers as if all were."""
    monkeypatch.setattr(queues, "ask", lambda default, function, *given, **named: object())
    monkeypatch.setattr(queues, "_pinning", lambda kind: True)
    monkeypatch.setattr(runtime, "memory", lambda device: None)
    with loader_of(kind) as loader:
        plan = loader.to(torch.device(type_, 0)).plan
        assert (plan.ahead_batches > 0, plan.pinned) == (ahead, pinned)
        assert plan.copied
        [stage] = [stage for stage in plan.stages if stage.name == "copy"]
        assert stage.by == ("device" if ahead else "loop")
        told = reasons(loader.explain(torch.device(type_, 0)))
        assert len(told) == bool(said) and all(said in line for line in told)


@pytest.mark.parametrize("type_", ["cuda", "mps", None])
@pytest.mark.parametrize("where", [None, "cpu"])
def test_pin_memory_of_batches_on_the_host_is_for_a_device_that_can_use_it(
    type_: str | None, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a DataLoader's is: for Apple's GPUs nothing can be pinned."""
    there = None if type_ is None else torch.device(type_, 0)
    monkeypatch.setattr(runtime, "accelerator", lambda: there)
    monkeypatch.setattr(queues, "_pinning", lambda kind: True)
    tensors = TensorDataset(torch.ones(9))
    for loader in (
        Loader(tensors, 2, pin_memory=True),
        Loader.from_dataloader(DataLoader(tensors, 2, pin_memory=True)),
    ):
        plan = loader.plan if where is None else loader.to(where).plan
        assert plan.pinned == (type_ == "cuda")
        assert not Loader(tensors, 2).plan.pinned


def test_explain_tells_of_apple_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is here: what is asked of it is answered as it would be."""
    monkeypatch.setattr(runtime, "memory", lambda device: None)
    loader = Loader(TensorDataset(torch.ones(9)), 2, plan="gather")
    told = loader.explain(torch.device("mps", 0))
    assert "non-blocking copy may read memory that has changed" in told
    assert "pin " not in told and "ahead of the loop" not in told


def test_a_device_without_a_second_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with hasten.simulate():
        monkeypatch.setattr(runtime, "stream", lambda device: None)
        plan = Loader(TensorDataset(torch.ones(9)), 2, plan="gather").to("cuda").plan
        assert plan.ahead_batches == 0
        assert "no second queue" in plan.explain()
