"""What every device promises: one suite over the CPU and, where there is one, the accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hasten
from hasten.devices import describe, measure, runtime


@pytest.fixture(
    params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)],
    name="device",
    scope="module",
)
def any_device(request):
    if request.param == "cpu":
        return torch.device("cpu")
    found = runtime.accelerator()
    if found is None:
        pytest.skip("no accelerator here")
    return found


def test_it_is_chosen_by_its_name(device):
    assert hasten.device(str(device)) == device
    assert hasten.device(device) == device


def test_it_passes_its_trial_and_is_described(device):
    assert runtime.trial(device) is None
    [info] = [info for info in describe() if info.device == str(device)]
    assert info.problem is None
    assert info.name
    assert info.type == device.type
    assert info.memory_total_bytes and info.memory_free_bytes
    assert info.memory_free_bytes <= info.memory_total_bytes
    assert set(info.dtypes.values()) <= {"fast", "works", "no"}


def test_a_nest_goes_there_and_comes_back_unchanged(device):
    batch = {"x": torch.arange(6.0).reshape(2, 3), "y": (torch.tensor([1, 2]), "name")}
    there = hasten.move(batch, device)
    assert {there["x"].device, there["y"][0].device} == {device}
    assert hasten.move(there, device) is there
    back = hasten.move(there, "cpu")
    assert torch.equal(back["x"], batch["x"])
    assert torch.equal(back["y"][0], batch["y"][0])
    assert back["y"][1] == "name"


def test_values_that_come_back_are_whole_whatever_is_asked_of_the_copy(device):
    there = torch.full((1 << 20,), 3.0, device=device)
    for non_blocking in (None, True, False):
        back = hasten.move([there * 2], "cpu", non_blocking=non_blocking)[0]
        assert bool((back == 6.0).all())


def test_what_meets_there_meets(device):
    model = nn.Linear(3, 2).to(device)
    batch = hasten.move([torch.ones(4, 3)], device)
    assert hasten.same_device(model, batch, torch.tensor(0.5)) == device
    assert model(batch[0]).device == device


def test_synchronising_leaves_results_in_place(device):
    a = torch.ones(64, 64, device=device)
    b = a @ a
    runtime.synchronize(device)
    assert float(b[0, 0]) == 64.0


def test_seeds_and_states_repeat_random_numbers(device):
    before = torch.get_rng_state()
    runtime.manual_seed(device, 11)
    state = runtime.rng_state(device)
    first = torch.rand(5, device=device)
    runtime.manual_seed(device, 11)
    assert torch.equal(torch.rand(5, device=device), first)
    if state is not None:
        assert state.device.type == "cpu"
        runtime.set_rng_state(device, state)
        assert torch.equal(torch.rand(5, device=device), first)
    torch.set_rng_state(before)


def test_autocast_takes_the_dtypes_that_are_claimed(device):
    layer = nn.Linear(8, 8).to(device)
    for dtype in runtime.autocast_dtypes(device):
        with torch.autocast(device.type, dtype=dtype):
            assert layer(torch.ones(2, 8, device=device)).dtype is dtype


def test_fast_dtypes_multiply(device):
    for dtype in runtime.fast_dtypes(device):
        ones = torch.ones(16, 16, device=device, dtype=dtype)
        assert float((ones @ ones)[0, 0]) == 16.0


def test_memory_that_runs_out_is_known(device):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert runtime.is_out_of_memory(caught.value)


def test_peak_memory_counts_where_it_counts(device):
    runtime.reset_peak(device)
    kept = torch.ones(1 << 20, device=device)
    peak = runtime.peak_bytes(device)
    assert peak is None or peak >= kept.numel() * 4
    assert (peak is None) == (runtime.is_host(device) or device.type == "mps")
    runtime.empty_cache(device)


def test_events_tell_the_time_between_them(device):
    start, end = runtime.event(device, timing=True), runtime.event(device, timing=True)
    if start is None or end is None:
        assert runtime.is_host(device)
        return
    start.record()
    torch.ones(512, 512, device=device) @ torch.ones(512, 512, device=device)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_a_copy_on_a_stream_of_its_own_arrives(device):
    source = torch.arange(1000.0)
    if runtime.can_pin(device):
        source = source.pin_memory()
    stream, current = runtime.stream(device), runtime.current_stream(device)
    with runtime.on_stream(stream):
        there = source.to(device, non_blocking=runtime.can_overlap(device))
    if stream is not None and current is not None:
        current.wait_stream(stream)
    assert float((there * 2).sum()) == float((source * 2).sum())


def test_float32_products_are_exact_unless_tf32_is_asked_for(device):
    a = torch.rand(256, 256) - 0.5
    exact = a.double() @ a.double()
    there = a.to(device)
    with runtime.float32_products(device, tf32=False):
        assert torch.allclose((there @ there).cpu().double(), exact, atol=1e-5)


def test_a_short_measurement_gives_rates_for_what_it_had_time_for(device):
    rates = measure(device, budget_s=1.0)
    assert rates.device == str(device)
    assert rates.best("float32")
    assert all(rate.tflop_per_s > 0 for rate in rates.matmul)
    assert bool(rates.transfers) != runtime.is_host(device)
