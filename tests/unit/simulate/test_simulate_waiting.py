"""Queues and the virtual clock: who waits, where, and which orders are hazards."""

from __future__ import annotations

import pytest
import torch

import hasten
from hasten.simulate import Copy, DeviceSpec, Hazard, Sync


@pytest.fixture
def sim():
    with hasten.simulate() as simulation:
        yield simulation


def since(simulation, mark, kind):
    return [event for event in simulation.events[mark:] if isinstance(event, kind)]


WAITS = {
    "item": (lambda x: x[0].item(), ["item"]),
    "float": (lambda x: float(x[0]), ["item"]),
    "if": (lambda x: 1 if (x > 0).any() else 0, ["bool"]),
    "cpu": (lambda x: x.cpu(), ["cpu"]),
    "to cpu": (lambda x: x.to("cpu"), ["cpu"]),
    "copy_ to the host": (lambda x: torch.empty(4).copy_(x), ["cpu"]),
    "tolist": (lambda x: x.tolist(), ["tolist"]),
    "print": (lambda x: str(x), ["print"]),
    "format": (lambda x: f"{x[0]:.3f}", ["print"]),
    "nonzero": (lambda x: x.nonzero(), ["nonzero"]),
    "a mask": (lambda x: x[x > 0], ["mask"]),
    "masked_select": (lambda x: x.masked_select(x > 0), ["mask"]),
    "unique": (lambda x: x.unique(), ["unique"]),
    "equal": (lambda x: torch.equal(x, x), ["equal"]),
    "synchronize": (lambda x: torch.cuda.synchronize(), ["synchronize"]),
    "an index": (lambda x: [1, 2][torch.tensor(1, device="cuda")], ["item"]),
    "arithmetic": (lambda x: (x + 1).mean().detach(), []),
    "a number through a mask": (lambda x: x.__setitem__(x > 9, 0.0), []),
    "to the device": (lambda x: torch.ones(2).cuda(), []),
    "a step": (lambda x: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0), []),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_counted_and_named(sim, name):
    call, kinds = WAITS[name]
    x = torch.arange(4.0, device="cuda")
    mark = len(sim.events)
    call(x)
    found = since(sim, mark, Sync)
    assert [event.kind for event in found] == kinds
    assert all(event.location.file == __file__ for event in found)


def test_the_host_runs_ahead_until_it_waits():
    spec = DeviceSpec(
        name="Slow",
        memory_bytes=1 << 30,
        flops_per_s=1e6,
        memory_bytes_per_s=1e6,
        host_copy_bytes_per_s=1e6,
        launch_s=1e-3,
    )
    with hasten.simulate(spec=spec) as simulation:
        assert torch.cuda.get_device_name() == "Slow"
        x = torch.ones(1000, device="cuda")
        begun = simulation.clock.host_s
        y = x + x  # 12,000 bytes: 12 ms of work, and 1 ms to launch
        assert simulation.clock.host_s - begun == pytest.approx(1e-3)
        y[0].item()
        assert simulation.clock.host_s - begun > 12e-3
        assert [e.waited_s > 0 for e in simulation.events if isinstance(e, Sync)] == [True]


def test_streams_overlap_and_events_order_them(sim):
    x = torch.ones(1000, 1000, device="cuda")
    stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True),) * 2
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        x @ x
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert stream.query() and start.elapsed_time(end) > 0


def test_host_memory_changed_before_its_copy_ran_is_a_hazard(sim):
    mark = len(sim.events)
    batch = torch.ones(1000, 1000).pin_memory()
    batch.to("cuda", non_blocking=True)
    batch.fill_(2)
    torch.cuda.synchronize()
    [hazard] = since(sim, mark, Hazard)
    assert hazard.kind == "source-changed" and hazard.location.file == __file__


def test_a_change_through_numpy_is_seen_too(sim):
    batch = torch.ones(100).pin_memory()
    batch.to("cuda", non_blocking=True)
    batch.numpy()[:] = 2
    torch.cuda.synchronize()
    assert [e.kind for e in sim.events if isinstance(e, Hazard)] == ["source-changed"]


@pytest.mark.parametrize("wait", ["synchronize", "event", "stream"])
def test_host_memory_changed_after_waiting_is_none(sim, wait):
    batch = torch.ones(1000, 1000).pin_memory()
    event = torch.cuda.Event()
    there = batch.to("cuda", non_blocking=True)
    event.record()
    if wait == "synchronize":
        torch.cuda.synchronize()
    elif wait == "event":
        event.synchronize()
    else:
        torch.cuda.current_stream().synchronize()
    batch.fill_(2)
    there.sum().item()
    assert not [e for e in sim.events if isinstance(e, Hazard)]


def test_pageable_memory_is_copied_before_the_call_returns(sim):
    batch = torch.ones(1000)
    there = batch.to("cuda", non_blocking=True)
    batch.fill_(2)
    torch.cuda.synchronize()
    assert there.sum().item() == 1000
    assert not [e for e in sim.events if isinstance(e, Hazard)]


@pytest.mark.parametrize("read", [lambda x: x.sum(), lambda x: x.numpy(), lambda x: x.tolist()])
def test_reading_a_copy_to_the_host_too_early_is_a_hazard(sim, read):
    there = torch.ones(1000, device="cuda")
    here = there.to("cpu", non_blocking=True)
    read(here)
    assert [e.kind for e in sim.events if isinstance(e, Hazard)] == ["read-before-sync"]


def test_reading_it_after_waiting_is_none(sim):
    here = torch.ones(1000, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert here.sum() == 1000
    assert not [e for e in sim.events if isinstance(e, Hazard)]


def test_copies_say_what_they_moved(sim):
    batch = torch.ones(10)
    for _ in range(2):
        batch.cuda()
    batch.add_(1)
    batch.cuda()
    copies = [e for e in sim.events if isinstance(e, Copy)]
    assert {e.bytes for e in copies} == {40} and not any(e.pinned for e in copies)
    assert len({e.storage_id for e in copies}) == 1
    assert copies[0].version == copies[1].version != copies[2].version


def test_waiting_is_counted_in_a_backward_pass_too(sim):
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda grad: print(grad.sum().item()))
    mark = len(sim.events)
    (x * 2).sum().backward()
    [event] = since(sim, mark, Sync)
    assert event.kind == "item" and event.location.file == __file__
