"""The step timeline: where the time of each training step goes, at next to no cost.

The host clock is read at each change of phase. On an accelerator that tells only how long the host
took to *launch* the work, so on a sample of steps a device event is recorded beside each reading;
the events are read later, when they say that they are done, and never waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import compress, islice
from operator import sub
from statistics import fmean, median
from typing import Any, Protocol

import torch

PHASES = ("wait", "copy", "forward", "backward", "optimizer", "other")
WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(6)

_KEPT_STEPS = 4096  # medians are over the last so many steps; totals are exact
_PENDING = 8  # sampled steps whose events the device has not reached; more are not sampled
_MARKS = 64  # phase changes of one sampled step; a longer step is not sampled
_EVENT_COST = 0.002  # of the host's time that recording events may take


class DeviceEvent(Protocol):
    """What the timeline needs of a device event (``torch.Event`` has it)."""

    def record(self) -> Any:
        """Queue the event on the device's current stream."""

    def query(self) -> bool:
        """Whether the device has passed the event; never waits."""

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this event to the other, both passed."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The host's time in one phase, in seconds."""

    median_s: float
    """Of a step."""
    total_s: float


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Where the time of a stretch of steps went. Plain data."""

    steps: int
    samples: int
    seconds: float
    """Elapsed on the host clock, everything included."""
    phases: Mapping[str, PhaseTime]
    """On the host's clock; on an accelerator this is the time to launch the work."""
    device: Mapping[str, float] | None = None
    """Mean seconds a step that the device's queue spent in each phase; ``None`` on the host and
    while no sampled step is done. ``wait`` is time in which the device had no batch."""
    device_steps: int = 0
    """Sampled steps behind ``device``."""
    device_behind: float | None = None
    """Share of sampled steps at whose end the device still had work queued by the host: near 1
    the device sets the pace, near 0 the host does."""

    def plus(self, other: StepSummary) -> StepSummary:
        """Both stretches as one; its medians are the means of theirs, by steps."""
        steps = self.steps + other.steps

        def mean(mine: float, its: float, my_weight: int, its_weight: int) -> float:
            weight = my_weight + its_weight
            return (mine * my_weight + its * its_weight) / weight if weight else 0.0

        sampled = [part for part in (self, other) if part.device is not None]
        device, behind = None, None
        for part in sampled:
            device, behind = part.device, part.device_behind
        if len(sampled) == 2 and self.device is not None and other.device is not None:
            weights = self.device_steps, other.device_steps
            device = {k: mean(self.device[k], other.device[k], *weights) for k in self.device}
            behind = mean(self.device_behind or 0.0, other.device_behind or 0.0, *weights)
        return StepSummary(
            steps=steps,
            samples=self.samples + other.samples,
            seconds=self.seconds + other.seconds,
            phases={
                name: PhaseTime(
                    median_s=mean(
                        phase.median_s, other.phases[name].median_s, self.steps, other.steps
                    ),
                    total_s=phase.total_s + other.phases[name].total_s,
                )
                for name, phase in self.phases.items()
            },
            device=device,
            device_steps=self.device_steps + other.device_steps,
            device_behind=behind,
        )

    @property
    def samples_per_s(self) -> float:
        """Samples a second; 0 for an empty stretch."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds a step; 0 for an empty stretch."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of the stretch in each phase, as the device saw it where it was sampled.

        The device's shares are scaled to the stretch, so that the phases sum to ``seconds``.
        """
        if self.device is None or not (whole := sum(self.device.values())):
            return {name: phase.total_s for name, phase in self.phases.items()}
        return {name: self.seconds * self.device.get(name, 0.0) / whole for name in PHASES}

    @property
    def wait_share(self) -> float:
        """Share of the stretch spent waiting for data, 0 to 1."""
        spent = self.seconds_by_phase
        whole = sum(spent.values())
        return spent["wait"] / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dumps``."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds,
            "phases": {
                name: {"median_s": phase.median_s, "total_s": phase.total_s}
                for name, phase in self.phases.items()
            },
            "device": None if self.device is None else dict(self.device),
            "device_steps": self.device_steps,
            "device_behind": self.device_behind,
        }


@dataclass(frozen=True)
class Mark:
    """A point of a timeline, to ask later for the summary since then."""

    at_s: float
    totals_s: tuple[float, ...]
    steps: int
    samples: int
    sampled_steps: int
    entries: int


class Timeline:
    """Times the phases of every step.

    ``start`` and ``step_done`` are closures over local variables: that is the cheapest form that
    Python has, and both are called on every step. Bind them once (``start = timeline.start``).

    Args:
        device: where the step runs; ``None`` or the host for host timing only.
        clock: seconds, monotonic.
        new_event: makes a device event, or gives ``None`` where the device has none; default is
            :func:`hasten.devices.runtime.event`.
    """

    start: Callable[[int], None]
    """``start(phase)`` ends the running phase and starts this one (``WAIT``, ``COPY``, ...)."""

    step_done: Callable[[int], None]
    """``step_done(samples)`` ends the step; what follows is ``OTHER`` of the next step."""

    totals: Callable[[], tuple[float, ...]]
    """Host seconds in each phase since the timeline was made, in the order of ``PHASES``; cheap."""

    def __init__(
        self,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        new_event: Callable[[], DeviceEvent | None] | None = None,
    ) -> None:
        self._sampler = _sampler(device, clock, new_event)
        self._make_closures(clock)
        self._last = self.mark()

    def _make_closures(self, clock: Callable[[], float]) -> None:
        # One number more than there are phases: 1 in the rows that mark() inserts between steps.
        totals = [0.0] * (len(PHASES) + 1)
        running, since = OTHER, clock()
        steps = samples = marks = 0
        history: deque[tuple[float, ...]] = deque(maxlen=_KEPT_STEPS + 1)
        keep = history.append
        sampler = self._sampler
        due = sampler.due_at if sampler else -1
        sampling = False

        def start(phase: int) -> None:
            nonlocal running, since
            now = clock()
            totals[running] += now - since
            running = phase
            since = now
            if sampling:
                sampler.note(phase)  # type: ignore[union-attr]

        def step_done(count: int) -> None:
            nonlocal running, since, steps, samples, sampling, due
            now = clock()
            totals[running] += now - since
            running = OTHER
            since = now
            steps += 1
            samples += count
            keep(tuple(totals))
            if sampling:
                sampler.end()  # type: ignore[union-attr]
                sampling = False
            if steps == due:
                sampling, due = sampler.begin(steps, now)  # type: ignore[union-attr]

        def current() -> tuple[float, ...]:
            nonlocal since
            now = clock()
            totals[running] += now - since
            since = now
            return tuple(totals[:-1])

        def mark() -> Mark:
            nonlocal marks
            spent = current()
            # What came between steps (validation, a checkpoint) is no part of either.
            keep((*spent, 1.0))
            marks += 1
            if sampling:
                sampler.restart()  # type: ignore[union-attr]
            sampled = sampler.read() if sampler else 0
            return Mark(since, spent, steps, samples, sampled, steps + marks)

        self.start, self.step_done, self.totals = start, step_done, current
        self._history, self._mark = history, mark

    def mark(self) -> Mark:
        """The present point; call it between steps."""
        return self._mark()

    def summary(self, since: Mark | None = None) -> StepSummary:
        """The stretch since a mark, or since the last summary without one. Call between steps.

        Medians are over the last 4,096 steps of the stretch; totals are exact.
        """
        now = self.mark()
        if since is None:
            since, self._last = self._last, now
        steps = now.steps - since.steps
        medians = [0.0] * len(PHASES)
        if steps:
            wanted = min(now.entries - since.entries + 1, len(self._history))
            rows = list(islice(reversed(self._history), wanted))  # newest first
            of_steps = [not row[-1] for row in rows[:-1]]
            # Lists of numbers, not of lists: thousands of new containers would wake the collector.
            # And no numpy: its first median takes 15 ms, more than a small run's epoch.
            columns = ([row[i] for row in rows] for i in range(len(PHASES)))
            medians = [median(compress(map(sub, c, c[1:]), of_steps)) for c in columns]
        device, count, behind = (None, 0, None)
        if self._sampler:
            device, count, behind = self._sampler.means(since.sampled_steps)
        return StepSummary(
            steps=steps,
            samples=now.samples - since.samples,
            seconds=now.at_s - since.at_s,
            phases={
                name: PhaseTime(median_s=medians[i], total_s=now.totals_s[i] - since.totals_s[i])
                for i, name in enumerate(PHASES)
            },
            device=device,
            device_steps=count,
            device_behind=behind,
        )


def _sampler(
    device: torch.device | None,
    clock: Callable[[], float],
    new_event: Callable[[], DeviceEvent | None] | None,
) -> _Sampler | None:
    if new_event is None:
        if device is None or device.type == "cpu":
            return None
        from hasten.devices import runtime

        def new_event() -> DeviceEvent | None:
            return runtime.event(device, timing=True)

    first = new_event()
    return None if first is None else _Sampler(first, new_event, clock)


class _Sampler:
    """Device events of a sample of steps: recorded, parked in a ring, read when done."""

    def __init__(
        self,
        first: DeviceEvent,
        new_event: Callable[[], DeviceEvent | None],
        clock: Callable[[], float],
    ) -> None:
        self.due_at = 2  # the first step allocates and compiles: it tells nothing
        self._new_event, self._clock = new_event, clock
        self._free: list[DeviceEvent] = [first]
        self._phases: list[int] = []
        self._events: list[DeviceEvent] = []
        self._pending: deque[tuple[list[int], list[DeviceEvent], bool]] = deque()
        self._done: deque[tuple[list[float], bool]] = deque(maxlen=_KEPT_STEPS)
        self._read = 0
        self._cost_s = 0.0
        self._last_begin = (0, clock())

    def begin(self, step: int, now: float) -> tuple[bool, int]:
        """Whether to sample the coming step, and the step after which to ask again."""
        before, at = self._last_begin
        self._last_begin = (step, now)
        step_s = (now - at) / max(step - before, 1)
        period = 16
        while step_s > 0 and period < 1024 and self._cost_s > _EVENT_COST * step_s * period:
            period *= 2
        if step < 16:
            period = step  # steps 2, 4, 8, 16: a short run gets its evidence too
        self.read()
        if len(self._pending) >= _PENDING:
            return False, step + period
        self._cost_s = 0.0
        self.note(OTHER)
        return True, step + period

    def note(self, phase: int) -> None:
        """Record an event for the start of a phase."""
        began = self._clock()
        if len(self._events) < _MARKS and (event := self._take()) is not None:
            event.record()
            self._events.append(event)
        self._phases.append(phase)
        self._cost_s += self._clock() - began

    def _take(self) -> DeviceEvent | None:
        return self._free.pop() if self._free else self._new_event()

    def restart(self) -> None:
        """Begin the sampled step anew: something that is no step came after its beginning."""
        self._free += self._events
        self._phases, self._events = [], []
        self.note(OTHER)

    def end(self) -> None:
        """Close the sampled step and park its events."""
        # The event halfway through the step: the device passes it well before the host gets here
        # if the host sets the pace, and is still on its way to it if the device does. The last
        # event would not tell: no device is there in the microsecond since it was queued.
        behind = bool(self._events) and not self._events[len(self._events) // 2].query()
        self.note(OTHER)
        if len(self._events) == len(self._phases):
            self._pending.append((self._phases, self._events, behind))
        else:
            self._free += self._events
        self._phases, self._events = [], []

    def read(self) -> int:
        """Read the steps that the device has passed; gives how many were read in all."""
        while self._pending and self._pending[0][1][-1].query():
            phases, events, behind = self._pending.popleft()
            spent = [0.0] * len(PHASES)
            for i, phase in enumerate(phases[:-1]):
                spent[phase] += events[i].elapsed_time(events[i + 1]) / 1000
            self._done.append((spent, behind))
            self._free += events
            self._read += 1
        return self._read

    def means(self, since: int) -> tuple[dict[str, float] | None, int, float | None]:
        """Mean device seconds of each phase, steps and share behind, of samples after ``since``."""
        count = min(self._read - since, len(self._done))
        if count <= 0:
            return None, 0, None
        recent = list(self._done)[-count:]
        spent = [fmean(phase) for phase in zip(*(step for step, _ in recent), strict=True)]
        behind = sum(late for _, late in recent) / count
        return dict(zip(PHASES, spent, strict=True)), count, behind
