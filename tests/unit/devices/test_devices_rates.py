"""What follows from measured rates, and measuring itself under a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import pytest
import torch

from hasten.devices import measure, measuring
from hasten.devices.rates import MatmulRate, Rates, TransferRate, crossover, ratio, summary


def product(size, seconds, dtype="float32", against=None):
    return MatmulRate(
        dtype=dtype,
        size=size,
        seconds=seconds,
        tflop_per_s=2 * size**3 / 1e12 / seconds,
        ratio=None if against is None else against / seconds,
    )


CPU = [product(64, 4e-6), product(512, 1e-3), product(4096, 1.0)]
GPU = [
    product(64, 8e-6, against=4e-6),
    product(512, 1e-5, against=1e-3),
    product(4096, 3e-3, against=1.0),
]


def test_the_crossover_is_where_the_device_wins_for_good():
    assert crossover(GPU, CPU) == 512
    assert crossover(CPU, GPU) is None
    assert crossover([product(64, 1e-6), *GPU[1:]], CPU) == 64
    # A size that only one of them measured says nothing; a late loss counts against it.
    assert crossover([*GPU, product(8192, 1.0)], CPU) == 512
    assert crossover([GPU[1], product(4096, 2.0)], CPU) is None
    assert crossover([], CPU) is None


def test_a_ratio_needs_a_reference():
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(6.0, None) is None
    assert ratio(6.0, 0.0) is None


def transfer(source, non_blocking, seconds, host_seconds=1e-5):
    return TransferRate(
        source=source,
        non_blocking=non_blocking,
        bytes=2**25,
        seconds=seconds,
        host_seconds=host_seconds,
        gb_per_s=2**25 / seconds / 1e9,
    )


RATES = Rates(
    device="cuda:0",
    name="a GPU",
    matmul=(*GPU, product(512, 5e-6, "bfloat16"), product(4096, 3e-4, "bfloat16")),
    transfers=(
        transfer("pageable", False, 6e-3),
        transfer("pinned", False, 2e-3),
        transfer("pinned", True, 1.5e-3),
        transfer("pin-then-copy", True, 9e-3),
    ),
    crossover_size=512,
)


def test_the_summary_says_what_a_person_should_take_away():
    text = "\n".join(summary(RATES))
    assert "A small job is slower on cuda:0: 64×64 matrices take 2 times as long" in text
    assert "wins from 512 on: 333 times as fast at 4096" in text
    assert "bfloat16 10× at 4096" in text
    assert "4 times as fast as from pageable memory" in text
    assert "fill buffers that are pinned already" in text


def test_the_summary_of_a_device_that_always_wins_or_never_does():
    assert "beats the CPU at every size from 64 on" in summary(replace(RATES, crossover_size=64))[0]
    assert "slower than the CPU at every size" in summary(replace(RATES, crossover_size=None))[0]
    assert summary(Rates(device="cpu", name="x")) == []


def test_the_record_is_plain_json():
    content = json.loads(json.dumps(RATES.to_json()))
    assert content["matmul"][0]["size"] == 64
    assert content["host_to_device_gb_per_s"]["pinned"] == pytest.approx(2**25 / 2e-3 / 1e9)
    assert content["summary"] == summary(RATES)
    assert json.dumps(Rates(device="cpu", name="x").to_json())


class Clock:
    """Advances when work is done, and by ``tick`` at each reading."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 100.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


@pytest.mark.parametrize(("cost", "calls"), [(0.5, 1), (1e-4, 20)])
def test_the_median_is_that_of_one_call_among_queued_ones(cost, calls):
    clock, made, waited = Clock(), count(), count()
    queue = []

    def call():
        next(made)
        queue.append(cost)

    def synchronize():
        next(waited)
        clock.now += sum(queue)  # the work is done while waiting for it
        queue.clear()

    found = measuring.median_seconds(call, synchronize=synchronize, clock=clock, until=1e9)
    assert found == pytest.approx(cost)
    assert next(waited) == 2 + measuring.SAMPLES
    assert next(made) == 2 + measuring.SAMPLES * calls


def test_a_late_measurement_ends_after_its_second_call():
    clock, made = Clock(tick=1.0), count()
    found = measuring.median_seconds(
        lambda: next(made), synchronize=lambda: None, clock=clock, until=100.0
    )
    assert found == 1.0  # the first call only warms up
    assert next(made) == 2


def test_a_clock_that_stands_still_gives_a_finite_rate():
    found = measuring.median_seconds(
        lambda: None, synchronize=lambda: None, clock=Clock(), until=1e9
    )
    assert 0 < found < 1e-6


def test_the_budget_is_kept_and_what_it_cost_is_named():
    clock = Clock(tick=0.02)
    rates = measure("cpu", budget_s=2.0, clock=clock)
    assert rates.seconds < 3.0  # one operation that has begun is finished
    assert {rate.size for rate in rates.matmul} < set(measuring.SIZES)
    assert any("no time left" in line for line in rates.left_out)
    assert rates.device == "cpu"
    assert rates.transfers == ()
    assert rates.crossover_size is None
    assert all(rate.ratio is None for rate in rates.matmul)


def test_rates_are_set_against_the_cpus_where_these_are_given(monkeypatch):
    monkeypatch.setattr(measuring, "SIZES", (64, 128))
    reference = measure("cpu", budget_s=20.0, clock=Clock(tick=5e-3))
    assert {rate.size for rate in reference.matmul} == {64, 128}
    again = measure("cpu", cpu=reference, budget_s=20.0, clock=Clock(tick=5e-3))
    assert all(rate.ratio == pytest.approx(1.0, rel=0.5) for rate in again.matmul)
    assert again.copy_ratio is not None
    assert again.convolution[0].ratio is not None


def test_what_the_device_refuses_is_left_out_and_named(monkeypatch):
    def refuse(*args, **named):
        raise NotImplementedError("not for this dtype")

    monkeypatch.setattr(measuring.functional, "conv2d", refuse)
    rates = measure("cpu", budget_s=0.5, clock=Clock(tick=5e-3))
    assert rates.convolution == ()
    assert "convolution in float32: the device does not do it" in rates.left_out


def test_a_device_that_fails_is_not_covered_up(monkeypatch):
    def fail(*args, **named):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(measuring.functional, "conv2d", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure("cpu", budget_s=0.5, clock=Clock(tick=5e-3))


def test_full_memory_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(
        measuring.runtime, "memory", lambda device: measuring.runtime.Memory(1000, 1000)
    )
    rates = measure("cpu", budget_s=0.5, clock=Clock(tick=5e-3))
    assert rates.matmul == ()
    assert rates.copy_gb_per_s is None
    assert "copy within the device: no memory left" in rates.left_out


def test_gradients_are_as_before_after_measuring():
    measure("cpu", budget_s=0.1, clock=Clock(tick=5e-3))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
