"""What only a real accelerator shows: pinned copies, capability, rates against the CPU's."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import hasten
from hasten.devices import advice, describe, measure, runtime
from hasten.devices.measuring import SIZES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    found = runtime.accelerator()
    if found is None:
        pytest.skip("no accelerator here")
    return found


def test_auto_is_the_accelerator(device, monkeypatch):
    monkeypatch.delenv("HASTEN_DEVICE", raising=False)
    assert hasten.device() == device
    assert hasten.device(device.type) == device
    assert hasten.device(0).type == device.type


def test_nothing_is_advised_about_an_accelerator_in_use(device):
    assert not [line for line in advice() if "does not see it" in line or "no driver" in line]


def test_an_index_too_large_names_those_that_are_here(device):
    with pytest.raises(hasten.DeviceUnavailable, match=f"{device.type}:0"):
        hasten.device(f"{device.type}:{runtime.count(device.type)}")


def test_it_is_described_in_full(device):
    info = describe()[0]
    assert info.device == str(device)
    assert info.name not in {str(device), ""}
    if device.type == "cuda":
        assert info.capability and info.multiprocessors


def test_pinned_memory_is_copied_without_blocking_and_whole(device):
    if not runtime.can_pin(device):
        pytest.skip("memory cannot be pinned for this accelerator")
    batch = {"x": torch.arange(1 << 22).pin_memory(), "y": torch.ones(3)}
    moved = hasten.move(batch, device)
    runtime.synchronize(device)
    assert torch.equal(moved["x"].cpu(), batch["x"])
    assert moved["y"].device == device


def test_a_mismatch_is_named_where_torch_only_refuses(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.mask = torch.ones(4)

        def forward(self, x):
            return self.layer(x) * self.mask

    model = Masked().to(device)
    batch = torch.ones(2, 4, device=device)
    with pytest.raises(RuntimeError):
        model(batch)
    with pytest.raises(hasten.DeviceMismatch) as caught:
        hasten.same_device(model, batch)
    assert "model.mask is on cpu" in str(caught.value)
    assert 'self.register_buffer("mask", …)' in str(caught.value)
    assert caught.value.tensors["batch"] == str(device)


def test_an_optimizer_made_on_the_cpu_follows_its_model(device):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.to(device)
    with pytest.raises(hasten.DeviceMismatch, match=r"exp_avg"):
        hasten.same_device(model, optimizer)
    hasten.move(optimizer, device)
    assert hasten.same_device(model, optimizer) == device
    optimizer.zero_grad()
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    runtime.synchronize(device)


def test_memory_that_is_used_is_no_longer_free(device):
    runtime.empty_cache(device)  # memory kept in reserve would serve the tensor below
    before = runtime.memory(device)
    if before is None:
        pytest.skip("this accelerator does not tell its memory")
    kept = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    runtime.synchronize(device)
    after = runtime.memory(device)
    assert after is not None
    assert after.free_bytes < before.free_bytes
    del kept
    runtime.empty_cache(device)


def test_tf32_is_set_for_a_while_only(device):
    if not runtime.has_tf32(device):
        pytest.skip("no TF32 on this accelerator")
    a = torch.rand(512, 512, device=device) - 0.5
    with runtime.float32_products(device, tf32=False):
        exact = a @ a
    with runtime.float32_products(device, tf32=True):
        rounded = a @ a
    with runtime.float32_products(device, tf32=False):
        again = a @ a
    assert torch.equal(exact, again)
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=0.1)


def test_float8_multiplies_where_it_is_claimed(device):
    if not runtime.has_float8(device):
        pytest.skip("no float8 on this accelerator")
    product = runtime.float8_product(torch.ones(64, 64, device=device))()
    assert float(product[0, 0]) == 64.0


def test_rates_cover_every_dtype_size_and_way_of_copying(device):
    rates = measure(device, budget_s=16.0)
    dtypes = set(rates.dtypes())
    assert {"float32", "bfloat16", "float16"} <= dtypes
    assert ("tf32" in dtypes) == runtime.has_tf32(device)
    assert {rate.size for rate in rates.matmul} <= set(SIZES)
    compared = [rate for rate in rates.matmul if rate.ratio is not None]
    assert compared
    assert rates.convolution and rates.copy_gb_per_s
    ways = {(way.source, way.non_blocking) for way in rates.transfers}
    if runtime.can_pin(device):
        sources = ("pageable", "pinned", "pin-then-copy")
        assert ways == {(source, flag) for source in sources for flag in (False, True)}
    print(json.dumps(rates.to_json()))
