"""Batches from one thread beside the loop's, for samples that mostly wait and draw nothing.

Only that thread touches the data set, one sample after another, so the data set need not bear
several threads. What it must not do is draw from the global random generators, which the loop's
thread uses at the same time, or depend on the thread it runs in; both are watched for. The batch
in which either is seen is made again by the loop's thread, in the ordinary way, and the rest of
the epoch by another plan.
"""

from __future__ import annotations

import queue
import random
import re
import threading
from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hasten.errors import DataError
from hasten.feed import randomness
from hasten.feed.awaited import Awaited, in_spite_of_signals
from hasten.feed.depth import Depth
from hasten.feed.describe import late, text_of
from hasten.feed.ending import close_at_end
from hasten.feed.forking import room_for
from hasten.feed.modes import Modes
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.samples import Made, Maker
from hasten.feed.sources import Item, Report


class Background:
    """The plan `threads` for data sets that may be used by one thread only.

    Attributes:
        unfit: why a batch could not be made in the thread; "" if each could.
    """

    def __init__(
        self, maker: Maker, plan: Plan, order: Order, report: Report, timeout_s: float = 0
    ) -> None:
        """`timeout_s`: longest wait for a batch; 0 for ever."""
        self._timeout_s = timeout_s
        self._maker = maker
        self._plan = plan
        self._order = order
        self._report = report
        self._depth = Depth(plan)
        self.unfit = ""

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        numbered = enumerate(self._order.batches(epoch, first), first)
        jobs: deque[_Job] = deque()
        begin = _States(alone=True)
        with _Thread(self._maker) as thread:

            def fill(count: int) -> None:
                while not self.unfit and len(jobs) < count:
                    number, indices = next(numbered, (-1, None))
                    if number < 0:
                        return
                    jobs.append(_Job(epoch, number, indices))
                    thread.add(jobs[-1])

            while True:
                fill(1 + self._depth.batches)
                if not jobs:
                    return
                job = jobs.popleft()
                if not thread.wait(job, self._timeout_s):
                    raise DataError(late("thread beside the loop's", self._timeout_s))
                before = None
                if job.number == first and begin.moved():  # the loop has only waited
                    job.made, job.unfit = None, job.unfit or _drawn(begin.moved())
                if job.unfit and not self.unfit:
                    self.unfit = job.unfit
                    thread.close()  # from here on the data set is the loop's thread's
                    if job.number == first:
                        begin.put_back(begin.moved())
                    else:
                        before = job.before  # that of a later batch holds this one's draws
                made = job.made or self._again(job, before)
                indices = job.indices if made.kept is None else made.kept
                del job
                for index, message in made.skipped:
                    self._report(index, message)
                if not made.empty:
                    self._depth.saw(made.batch)
                    fill(self._depth.batches)  # which were fewer while nothing was known
                    yield made.number, made.batch, indices
                del made  # else the loop's batch lives on while the next is made

    def _again(self, job: _Job, before: _States | None) -> Made:
        """The batch, by the loop's thread; from what the generators were `before`.

        Whoever moved them since: what its samples draw is undone, what the loop drew stays.
        """
        if before is None:
            return self._maker.make(job.epoch, job.number, job.indices)
        moved = before.moved()
        now = randomness.save(moved)
        before.put_back(moved)
        made = self._maker.make(job.epoch, job.number, job.indices)
        randomness.restore(now, moved - self._maker.uses)
        return made

    def close(self) -> None:
        """See `Source`."""


class _Job:
    """A batch to be made. When `done`, there is `made`, or else the loop's thread makes it."""

    def __init__(self, epoch: int, number: int, indices: Any) -> None:
        self.epoch = epoch
        self.number = number
        self.indices = indices
        self.made: Made | None = None
        self.unfit = ""
        self.before: _States | None = None
        self.done = threading.Event()


class _Thread:
    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._stuck = False
        self._thread = Awaited(Modes().during, self._run, name="hasten-feed")

    def __enter__(self) -> _Thread:
        close_at_end(self)
        with room_for("threads", 1):
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add(self, job: _Job) -> None:
        self._jobs.put(job)

    def wait(self, job: _Job, timeout_s: float) -> bool:
        """Whether it was done in time. If not, the thread may never end, and is left to that."""
        self._stuck = not job.done.wait(timeout_s or None)
        return not self._stuck

    def close(self) -> None:
        """End the thread after the sample it is at; what it has not made stays unmade."""
        in_spite_of_signals(self._end)

    def _end(self) -> None:
        self._closed.set()
        self._jobs.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(0 if self._stuck else None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._closed.is_set():
                self._make(job)
            job.done.set()
            del job
        while not self._jobs.empty():  # whoever waits for one makes it himself
            left = self._jobs.get()
            if left is not None:
                left.done.set()

    def _make(self, job: _Job) -> None:
        before = _States()
        try:
            with NoDraws():
                made = self._maker.attempt(
                    job.epoch, job.number, job.indices, stopped=self._closed.is_set
                )
        except _DrawError as error:
            job.unfit = str(error)
        except BaseException as error:  # noqa: BLE001 - the loop's thread makes it, and tells
            job.unfit = f"not in a thread of its own: {type(error).__name__}: {text_of(error)}"
        else:
            job.made = made
        moved = before.moved()
        if moved:
            job.made, job.before = None, before
            job.unfit = _drawn(moved)


def _drawn(moved: frozenset[str]) -> str:
    """Why samples cannot be made in the thread, where these generators have moved."""
    return f"numbers of {' and '.join(sorted(moved))} are drawn meanwhile"


class _DrawError(RuntimeError):
    """Raised in place of a draw from torch's global generator, which so does not happen."""


class NoDraws(TorchFunctionMode):
    """In this thread, functions that draw from torch's global generator raise instead.

    (A dispatch mode would see each operator, but its first use imports torch's compiler: 3 s.)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if _DRAWS.match(name) and named.get("generator") is None:
            raise _DrawError(f"{name} draws from torch's global generator")
        return func(*args, **named)


_DRAWS = re.compile(
    r"rand(n|int|perm|om)?_?(_like)?$|(bernoulli|normal|uniform|log_normal|exponential|cauchy|geometric"
    r"|multinomial|poisson|binomial|rrelu)_?$|.*dropout|_sample_dirichlet|_standard_gamma|gumbel_"
    r"|fractional_max_pool|(svd|pca)_lowrank|scaled_dot_product_attention|(rnn_tanh|rnn_relu|lstm|gru)$"
    r"|multi_head_attention_forward"
)


class _States:
    """Of the generators whose use in one thread cannot be told from that in another."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: nobody else draws meanwhile."""
        self._python = random.getstate()
        self._numpy: dict[str, Any] = np.random.get_state(legacy=False)
        self._torch_seed = torch.initial_seed()
        self._torch = torch.get_rng_state() if alone else None

    def moved(self) -> frozenset[str]:
        """Which were drawn from since, by whatever thread."""
        found = set()
        if random.getstate() != self._python:
            found.add(randomness.PYTHON)
        now: dict[str, Any] = np.random.get_state(legacy=False)
        if _comparable(now) != _comparable(self._numpy):
            found.add(randomness.NUMPY)
        drawn = self._torch is not None and not torch.equal(self._torch, torch.get_rng_state())
        if drawn or torch.initial_seed() != self._torch_seed:
            found.add(randomness.TORCH)
        return frozenset(found)

    def put_back(self, which: frozenset[str]) -> None:
        """Undo what was drawn from these since."""
        if randomness.PYTHON in which:
            random.setstate(self._python)
        if randomness.NUMPY in which:
            np.random.set_state(self._numpy)
        if randomness.TORCH in which and self._torch is not None:
            torch.set_rng_state(self._torch)


def _comparable(state: dict[str, Any]) -> tuple[Any, ...]:
    """numpy's state as something that can be compared."""
    inner = {k: v.tobytes() if hasattr(v, "tobytes") else v for k, v in state["state"].items()}
    return state["bit_generator"], inner, state.get("has_gauss"), state.get("gauss")
