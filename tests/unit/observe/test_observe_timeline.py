from __future__ import annotations

import json

import pytest
import torch

from hasten.observe.timeline import (
    BACKWARD,
    COPY,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    WAIT,
    Timeline,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A queue that takes events at once and passes them when its clock gets there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queued_until = 0.0
        self.made = 0

    def launch(self, seconds: float) -> None:
        self.queued_until = max(self.queued_until, self.clock.now) + seconds

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.at = max(self.device.queued_until, self.device.clock.now)

    def query(self) -> bool:
        return self.at is not None and self.device.clock.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query(), "an event was read before the device had passed it"
        assert other.query(), "an event was read before the device had passed it"
        assert self.at is not None
        assert other.at is not None
        return (other.at - self.at) * 1000

    def synchronize(self) -> None:
        raise AssertionError("the timeline must never wait for the device")


ORDER = (WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER)


def host_step(timeline: Timeline, clock: Clock, seconds: dict[int, float], samples: int) -> None:
    for phase in ORDER:
        timeline.start(phase)
        clock.now += seconds.get(phase, 0.0)
    timeline.step_done(samples)


def test_host_totals_and_medians():
    clock = Clock()
    timeline = Timeline(clock=clock)
    for forward in (1.0, 2.0, 9.0):
        host_step(timeline, clock, {WAIT: 0.5, FORWARD: forward}, 8)
    clock.now += 0.25

    summary = timeline.summary()

    assert (summary.steps, summary.samples) == (3, 24)
    assert summary.seconds == 13.75
    assert summary.phases["forward"].median_s == 2.0
    assert summary.phases["forward"].total_s == 12.0
    assert summary.phases["wait"].total_s == 1.5
    assert summary.phases["other"].total_s == 0.25
    assert summary.seconds_by_phase["forward"] == 12.0
    assert summary.wait_share == pytest.approx(1.5 / 13.75)
    assert summary.samples_per_s == pytest.approx(24 / 13.75)
    assert summary.device is None
    assert list(summary.phases) == list(PHASES)
    json.dumps(summary.to_json(), allow_nan=False)


def test_phases_sum_to_the_elapsed_time_whatever_the_order():
    clock = Clock()
    timeline = Timeline(clock=clock)
    for i, phase in enumerate((FORWARD, FORWARD, OTHER, COPY, BACKWARD, WAIT) * 5):
        timeline.start(phase)
        clock.now += 0.5 + i
        if i % 4 == 3:
            timeline.step_done(1)
    summary = timeline.summary()
    assert sum(p.total_s for p in summary.phases.values()) == pytest.approx(summary.seconds)


def test_each_summary_covers_the_steps_since_the_last_one():
    clock = Clock()
    timeline = Timeline(clock=clock)
    host_step(timeline, clock, {FORWARD: 1.0}, 1)
    timeline.summary()
    host_step(timeline, clock, {FORWARD: 3.0}, 2)
    second = timeline.summary()
    assert (second.steps, second.samples, second.phases["forward"].total_s) == (1, 2, 3.0)
    empty = timeline.summary()
    assert (empty.steps, empty.seconds, empty.samples_per_s, empty.step_s) == (0, 0.0, 0.0, 0.0)
    assert empty.wait_share == 0.0


def test_marks_are_independent_of_one_another_and_leave_validation_out():
    clock = Clock()
    timeline = Timeline(clock=clock)
    epoch = timeline.mark()
    host_step(timeline, clock, {FORWARD: 1.0}, 1)
    log_point = timeline.mark()
    host_step(timeline, clock, {FORWARD: 5.0}, 1)
    assert timeline.summary(log_point).phases["forward"].median_s == 5.0
    host_step(timeline, clock, {FORWARD: 2.0}, 1)
    assert timeline.summary(epoch).steps == 3
    assert timeline.summary(epoch).phases["forward"].median_s == 2.0

    clock.now += 1000.0  # validation
    epoch = timeline.mark()
    host_step(timeline, clock, {FORWARD: 1.0}, 1)
    summary = timeline.summary(epoch)
    assert summary.seconds == 1.0
    assert summary.phases["other"].median_s == 0.0


def test_totals_stay_exact_and_memory_bounded_over_many_steps():
    clock = Clock()
    timeline = Timeline(clock=clock)
    for i in range(10_000):
        host_step(timeline, clock, {FORWARD: 1.0 if i < 9000 else 2.0}, 1)
    summary = timeline.summary()
    assert summary.steps == 10_000
    assert summary.phases["forward"].total_s == pytest.approx(11_000)
    assert summary.phases["forward"].median_s == 1.0
    assert len(timeline._history) <= 4097


def test_the_device_shows_where_its_own_time_went():
    clock = Clock()
    device = Device(clock)
    timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
    for _ in range(200):  # data arrives every 10 ms, the device works 4 ms of them
        timeline.start(WAIT)
        clock.now += 0.0095
        for phase, work in ((FORWARD, 0.001), (BACKWARD, 0.002), (OPTIMIZER, 0.001)):
            timeline.start(phase)
            device.launch(work)
            clock.now += 0.0001
        timeline.step_done(32)
    clock.now += 1.0

    summary = timeline.summary()

    assert summary.device is not None
    assert summary.device_steps >= 10
    assert summary.device["backward"] == pytest.approx(0.002, rel=0.1)
    assert summary.device["wait"] == pytest.approx(0.006, rel=0.15)
    # On the host's clock the launches look like nothing; the device's clock is what counts.
    assert summary.phases["backward"].median_s == pytest.approx(0.0001)
    assert summary.seconds_by_phase["backward"] / summary.seconds == pytest.approx(0.2, rel=0.15)


def test_a_device_that_lags_and_a_host_that_lags_are_told_apart():
    def behind(launch: float, work: float) -> float | None:
        clock = Clock()
        device = Device(clock)
        timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
        for _ in range(100):
            for phase in (WAIT, FORWARD, BACKWARD, OPTIMIZER):
                timeline.start(phase)
                clock.now += launch
                device.launch(work)
            timeline.step_done(1)
            clock.now = max(clock.now, device.queued_until - 0.5)  # a bounded queue
        clock.now += 10.0
        return timeline.summary().device_behind

    assert behind(launch=0.001, work=0.05) == pytest.approx(1.0, abs=0.3)
    assert behind(launch=0.05, work=0.001) == 0.0


def test_events_the_device_never_reaches_are_bounded_and_never_waited_for():
    clock = Clock()
    device = Device(clock)
    timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
    device.queued_until = 1e9
    for _ in range(5000):
        host_step(timeline, clock, {FORWARD: 0.01}, 1)
    summary = timeline.summary()
    assert summary.device is None
    assert summary.device_steps == 0
    assert device.made < 100


def test_events_are_reused():
    clock = Clock()
    device = Device(clock)
    timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
    for _ in range(5000):
        host_step(timeline, clock, {FORWARD: 0.01}, 1)
    assert timeline.summary().device_steps > 100
    assert device.made < 20


def test_sampling_grows_rarer_where_events_are_dear():
    def sampled(event_s: float) -> int:
        clock = Clock()
        device = Device(clock)

        class Dear(Event):
            def record(self) -> None:
                clock.now += event_s
                super().record()

        timeline = Timeline(torch.device("cuda"), clock, new_event=lambda: Dear(device))
        for _ in range(4000):
            host_step(timeline, clock, {FORWARD: 0.001}, 1)
        return timeline.summary().device_steps

    assert sampled(1e-6) > 200
    assert 1 <= sampled(1e-4) < 60


def test_a_step_with_very_many_phases_is_not_sampled_and_costs_few_events():
    clock = Clock()
    device = Device(clock)
    timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
    for _ in range(100):
        for _ in range(200):
            timeline.start(FORWARD)
            timeline.start(BACKWARD)
        timeline.step_done(1)
    assert timeline.summary().device_steps == 0
    assert device.made <= 65


def test_a_pause_between_steps_is_no_part_of_a_sampled_step():
    clock = Clock()
    device = Device(clock)
    timeline = Timeline(torch.device("cuda"), clock, new_event=device.event)
    for _ in range(64):
        host_step(timeline, clock, {FORWARD: 0.01}, 1)
        clock.now += 50.0
        timeline.mark()
    summary = timeline.summary()
    assert summary.device is not None
    assert summary.device["other"] < 0.01


def test_the_host_needs_no_events():
    assert Timeline(torch.device("cpu"))._sampler is None
    assert Timeline(torch.device("cuda"), new_event=lambda: None)._sampler is None
