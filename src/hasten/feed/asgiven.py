"""Batches as a DataLoader makes them: its calls, drawing from the global generators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hasten.devices.holding import held
from hasten.errors import DataError
from hasten.feed import randomness
from hasten.feed.blame import short
from hasten.feed.changes import Attributes
from hasten.feed.describe import text_of
from hasten.feed.failure import Failure
from hasten.feed.handlers import by_a_handler
from hasten.feed.inside import Inside, Mark, alive, inside, walk
from hasten.feed.openfiles import OpenFiles
from hasten.feed.samples import Made, Maker
from hasten.feed.sources import as_rows
from hasten.feed.surroundings import kept as kept_by
from hasten.feed.tables import Table
from hasten.feed.work import Beginning

_TRIAL_S = 0.5
_CACHED = 8  # times that a cache is quicker than what it keeps
_ASKED_AGAIN = 8  # samples


class AsGiven(Maker):
    """Makes a batch as DataLoader's own fetcher does, and says more when that fails.

    Nothing is seeded: what samples and collate function draw is drawn from the global generators
    as they are.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], *, skip_errors: bool, batched: bool
    ) -> None:
        super().__init__(dataset, collate_fn, seed=0, skip_errors=skip_errors, batched=batched)
        self.fetch = None

    def make(self, epoch: int, number: int, indices: Any) -> Made:
        """See `Maker.make`."""
        made = Made(number)
        if not self.batched:
            samples, kept = self._one_by_one([indices], made)
        else:
            samples, kept = self._together(indices, made)
        if made.skipped:
            made.kept = kept
        if not made.empty:
            made.batch = self._collate(epoch, number, samples, kept)
        return made

    def _together(self, indices: Any, made: Made) -> tuple[Any, list[Any]]:
        many = getattr(self.dataset, "__getitems__", None)
        if not many:
            return self._one_by_one(list(indices), made)
        before = randomness.save()
        try:
            return many(indices), list(indices)
        except Exception as error:
            if by_a_handler(error):
                raise
            failed = error  # raised below, where no sample does by itself
        randomness.restore(before)
        found = self._one_by_one(list(indices), made)  # names the sample that it was
        if made.skipped:
            return found
        raise DataError(
            f"__getitems__ of {type(self.dataset).__name__} raised {type(failed).__name__}: "
            f"{text_of(failed)} on the samples {short(indices)}, none of which does by __getitem__"
        ) from failed

    def _one_by_one(self, indices: list[Any], made: Made) -> tuple[list[Any], list[Any]]:
        samples, kept = [], []
        for index in indices:
            try:
                sample = self.dataset[index]
            except Exception as error:  # noqa: BLE001 - raised or noted, with its index
                made.skipped.append((index, self.skip(index, error)))
            else:
                samples.append(sample)
                kept.append(index)
        return samples, kept


class Gathering(AsGiven):
    """Makes the same of whole tensors, by one indexed copy: for workers that have them as they
    were when their epoch began, as the table has."""

    def __init__(self, given: AsGiven, table: Table) -> None:
        skip = given.skip_errors
        super().__init__(given.dataset, given.collate_fn, skip_errors=skip, batched=True)
        self._table = table

    def make(self, epoch: int, number: int, indices: Any) -> Made:
        """See `Maker.make`."""
        try:
            rows = as_rows(indices, self._table.rows)
        except DataError:  # no rows of a table: the data set says itself what it makes of them
            return super().make(epoch, number, indices)
        return Made(number, self._table.batch(rows))


@dataclass(slots=True)
class Watched:
    """A batch, and what making it did.

    Attributes:
        made: the batch.
        moved: names of the global generators that it drew from.
        after: their states afterwards, `randomness.packed`; None where nothing moved.
        changed: how the data set (or collate function) is not what it was when the worker began,
            in words, or that a file that was open then is at another place; "" if neither.
    """

    made: Made
    moved: frozenset[str] = frozenset()
    after: dict[str, Any] | None = None
    changed: str = ""


@dataclass(frozen=True)
class Trial:
    """A job: try the samples of these batches, for at most half a second."""

    batches: list[Any]


@dataclass(frozen=True)
class Tried:
    """What came of a trial.

    Attributes:
        batch_s: seconds that a batch takes; None where none came.
        busy: the share of them that is computing.
        batch_bytes: of its tensors.
        moved: names of the global generators that were drawn from.
        changed: see `Watched`.
        unseen: it holds more than can be looked at, or what cannot be looked into.
        cut: it took too long, and was ended: what it does is not known.
        caches: samples are kept for when they are asked for again.
    """

    batch_s: float | None
    busy: float
    batch_bytes: int
    moved: frozenset[str]
    changed: str
    unseen: bool
    cut: bool = False
    caches: bool = False


class AsGivenWork:
    """A worker that makes batches as they are given, and watches what making them does.

    With `beginning` it is a worker of the DataLoader that was taken over: seeded as that would be.
    Without, it stands for the main process, where samples draw from generators that are not here.
    """

    def __init__(self, maker: AsGiven, beginning: Beginning | None) -> None:
        self._maker = maker
        self._beginning = beginning
        self._at_start: Inside = None
        self._mark: Mark | None = None
        self._files: OpenFiles | None = None
        self._attributes: Attributes | None = None

    def about_to_fork(self) -> None:
        """See `Forked`. A DataLoader's own workers share what is open, as they always did."""
        if self._beginning is None:
            self._files = OpenFiles()
            # Made here, as a fork that counted references to all items would copy their memory.
            self._mark = self._mark or Mark(self._maker.dataset, self._maker.collate_fn)

    def start(self, worker: int) -> None:
        """See `Work`."""
        if self._beginning is not None:
            self._beginning.start(worker)
        if self._files is not None:
            self._files.own(writable=True)
        if self._mark is None:
            self._at_start = self._inside()
            self._note_attributes()

    def _note_attributes(self) -> None:
        self._attributes = Attributes(self._maker.dataset, self._maker.collate_fn)

    def _inside(self) -> Inside:
        return inside(self._maker.dataset, self._maker.collate_fn)

    def run(self, job: Trial | tuple[int, Any, dict[str, Any] | None]) -> Watched | Tried:
        """Jobs are (number of the batch, its indices, states to set before or None)."""
        if isinstance(job, Trial):
            return self._tried(job)
        number, indices, state = job
        if self._beginning is not None and self._beginning.failure is not None:
            return Watched(Made(number, failure=self._beginning.failure))
        if state is not None:
            randomness.restore(randomness.unpacked(state))
        before = randomness.save()
        try:
            made = self._maker.make(0, number, indices)
        except Exception as error:  # noqa: BLE001 - raised again by the loop
            made = Made(number, failure=Failure.of_batch(error))
        moved = randomness.touched(before)
        after = randomness.packed(randomness.save()) if moved else None
        return Watched(made, moved, after, changed=self._changed())

    def _changed(self) -> str:
        if self._files is not None and self._files.moved():
            return "its samples read on in a file that was open before"
        if self._mark is not None:
            told, changed = self._mark.told, self._mark.changed()
        else:
            told = self._at_start is not None
            changed = told and self._inside() != self._at_start
        if not told:
            return "what its data set holds cannot be watched for changes"
        others = self._attributes.others() if changed and self._attributes is not None else ""
        return f"its data set changes when it is asked for samples{others}" if changed else ""

    def failed(self, job: Any, error: Exception) -> Watched:
        """See `Work`."""
        return Watched(Made(job[0], failure=Failure.unsendable(error)))

    def left(self, job: Any, error: BaseException) -> Watched | Tried:
        """See `Work`."""
        if isinstance(job, Trial):
            return Tried(None, 1.0, 0, frozenset(), changed="", unseen=False)
        return Watched(Made(job[0], failure=Failure.left_by(error)))

    def _tried(self, job: Trial) -> Tried:
        before, end = randomness.save(), time.perf_counter() + _TRIAL_S
        batch_s, busy, size, each_s = None, 1.0, 0, 0.0
        maker, mark = self._maker, self._mark
        self._note_attributes()
        kept, quicker, asked = None, True, False
        # One sample first, which warms up, for seconds where it imports; then as many of a batch as
        # there is time for, one more at least.
        for turn, indices in enumerate([*job.batches[:1], *job.batches]):
            whole = len(indices) if maker.batched else 1
            fits = int((end - time.perf_counter()) / each_s) - quicker if each_s else 1
            count = max(1, min(whole, fits))
            # The last ones, as the first has been made once.
            first = whole - count if each_s else 0
            part = indices if count == whole else list(indices)[first : first + count]
            cost = _Cost(maker, part)
            if cost.made is None:
                each_s = each_s or cost.wall_s
                continue
            late = each_s > 0 and time.perf_counter() > end
            each_s = cost.wall_s / count
            if batch_s is None or each_s * whole < batch_s:  # others may have had the core
                batch_s, busy = each_s * whole, cost.busy
            size = whole * held(cost.made.batch).bytes // count
            if late:
                break
            if kept is None:
                kept = self._kept()
            elif quicker and turn + whole > 2:  # else it is the one of the first turn
                asked, few = True, int((end - time.perf_counter()) / each_s)
                few = max(1, min(_ASKED_AGAIN, count, few))
                again = _Cost(maker, list(part)[-few:] if maker.batched else part)
                quicker = cost.many_times(again, few / count)
        caches = (asked and quicker) or (kept is not None and kept != self._kept())
        unseen = mark is None or not mark.told or alive(maker.dataset, maker.collate_fn)
        moved = randomness.touched(before)
        return Tried(batch_s, busy, size, moved, self._changed(), unseen, caches=caches)

    def _kept(self) -> list[int]:
        return kept_by(walk([self._maker.dataset, self._maker.collate_fn]))


class _Cost:
    """A batch, and the seconds that making it took; without a batch where it raised, which is told
    with its index when it is iterated."""

    def __init__(self, maker: AsGiven, indices: Any) -> None:
        started, cpu_started = time.perf_counter(), time.thread_time()
        self.made: Made | None
        try:
            self.made = maker.make(0, 0, indices)
        except Exception:  # noqa: BLE001 - see above
            self.made = None
        self.cpu_s = time.thread_time() - cpu_started
        self.wall_s = max(time.perf_counter() - started, 1e-9)
        self.busy = min(1.0, self.cpu_s / self.wall_s)

    def many_times(self, again: _Cost, share: float) -> bool:
        """Whether asking again for this share of it was so much quicker that it is kept.

        In processor time, too: files that are read again come quicker, as the system keeps them.
        """
        less = again.wall_s * _CACHED <= self.wall_s * share
        return again.made is not None and less and again.cpu_s * _CACHED <= self.cpu_s * share
