"""The loss of an epoch, read at once on the host and in windows elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.train.meter import LossMeter

CPU = torch.device("cpu")


@pytest.fixture(params=["host", "windowed"])
def meter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LossMeter:
    return windowed(monkeypatch) if request.param == "windowed" else LossMeter(CPU, 4)


def windowed(monkeypatch: pytest.MonkeyPatch, window: int = 4) -> LossMeter:
    """As on an accelerator: nothing is read before the window is full or somebody asks."""
    monkeypatch.setattr(runtime, "is_host", lambda device: False)
    return LossMeter(CPU, window)


def add(meter: LossMeter, *values: float, samples: int = 2) -> list[Any]:
    return [meter.add(torch.tensor(value), samples, place) for place, value in enumerate(values)]


def test_the_mean_is_over_samples(meter: LossMeter):
    meter.add(torch.tensor(1.0), 8)
    meter.add(torch.tensor(4.0), 4)
    assert meter.flush() is None
    assert meter.mean == 2.0 and meter.samples == 12


def test_a_mean_over_something_else_counts_by_how_much_of_it_there_was(meter: LossMeter):
    meter.add(torch.tensor(1.0), torch.tensor(0.5))
    meter.add(torch.tensor(4.0), torch.tensor(0.25))
    meter.add(torch.tensor(math.nan), torch.tensor(0))  # over nothing
    assert meter.flush() is None
    assert meter.mean == 2.0


def test_before_any_batch_it_is_nan(meter: LossMeter):
    assert math.isnan(meter.mean) and math.isnan(meter.recent())
    assert meter.flush() is None


def test_recent_is_since_it_was_last_asked(meter: LossMeter):
    add(meter, 1.0, 3.0)
    meter.flush()
    assert meter.recent() == 2.0
    add(meter, 7.0)
    meter.flush()
    assert meter.recent() == 7.0
    assert math.isnan(meter.recent())


def test_a_new_epoch_begins_from_nothing(meter: LossMeter):
    add(meter, 5.0, 5.0, 5.0)
    meter.flush()
    meter.reset()
    assert math.isnan(meter.mean)
    add(meter, 1.0)
    meter.flush()
    assert meter.mean == meter.recent() == 1.0


def test_what_was_not_read_of_an_epoch_is_forgotten_with_it(monkeypatch: pytest.MonkeyPatch):
    meter = windowed(monkeypatch)
    add(meter, 5.0, 5.0)
    meter.reset()
    assert meter.flush() is None and meter.samples == 0


def test_state_goes_on_to_the_bit(meter: LossMeter):
    values = [0.1, 0.7, 0.3, 1 / 3, 2 / 7, 0.9]
    add(meter, *values[:4])
    meter.flush()
    meter.recent()
    add(meter, values[4])
    meter.flush()
    other = LossMeter(CPU, 4)
    other.restore(meter.state())
    for one in (meter, other):
        add(one, values[5])
        one.flush()
    assert other.mean == meter.mean and other.recent() == meter.recent()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_on_the_host_a_bad_loss_is_seen_at_once(value: float):
    meter = LossMeter(CPU, 4)
    assert add(meter, 1.0) == [None]
    found = meter.add(torch.tensor(value), 2, "here")
    assert found is not None and found.place == "here"
    assert found.value == value or math.isnan(value)
    assert meter.mean == 1.0  # it is not added


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_elsewhere_it_is_found_when_the_window_is_full(
    monkeypatch: pytest.MonkeyPatch, value: float, at: int
):
    meter = windowed(monkeypatch)
    values = [1.0, 2.0, 3.0, 4.0]
    values[at] = value
    found = add(meter, *values)
    assert found[:3] == [None] * 3
    assert found[3].place == at
    assert meter.mean == pytest.approx(sum(range(1, at + 1)) / at) if at else True


def test_elsewhere_it_is_found_when_asked(monkeypatch: pytest.MonkeyPatch):
    meter = windowed(monkeypatch)
    add(meter, 1.0, math.inf, math.nan)
    found = meter.flush()
    assert found is not None and found.place == 1 and found.value == math.inf


def test_windows_follow_each_other(monkeypatch: pytest.MonkeyPatch):
    meter = windowed(monkeypatch, 3)
    assert add(meter, *[float(v) for v in range(7)]) == [None] * 7
    assert meter.samples == 12
    meter.flush()
    assert meter.samples == 14 and meter.mean == 3.0


def test_the_graph_is_not_held(monkeypatch: pytest.MonkeyPatch):
    meter = windowed(monkeypatch)
    weight = torch.ones(1, requires_grad=True)
    meter.add((weight * 2).sum(), 1)
    assert not meter._ring.requires_grad
    assert meter.flush() is None and meter.mean == 2.0


def test_one_element_of_any_shape_and_dtype_is_a_loss(meter: LossMeter):
    for loss in (torch.tensor([2.0]), torch.tensor([[2.0]], dtype=torch.bfloat16)):
        assert meter.add(loss, 1) is None
    meter.flush()
    assert meter.mean == 2.0


@pytest.mark.parametrize("loss", [torch.ones(3), torch.ones(0), 1.0, (torch.ones(()), {}), None])
def test_what_is_no_number_is_refused(meter: LossMeter, loss: Any):
    with pytest.raises(UsageError, match="must be one number, the mean over the batch"):
        meter.add(loss, 1)
