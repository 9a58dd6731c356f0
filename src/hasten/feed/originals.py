"""The workers of a DataLoader that was taken over: as many, seeded as they were, in its order."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from typing import Any

from hasten.errors import DataError, UsageError
from hasten.feed.asgiven import AsGiven, AsGivenWork, Watched
from hasten.feed.draws import Draws
from hasten.feed.iteration import Epoch
from hasten.feed.jobs import Jobs
from hasten.feed.options import Options
from hasten.feed.plan import Plan
from hasten.feed.pool import Pool
from hasten.feed.position import check_reached
from hasten.feed.samples import Made
from hasten.feed.sources import Item, Report
from hasten.feed.streams import Reader, in_turn, repeats
from hasten.feed.taken import TakenOrder
from hasten.feed.work import Beginning, StreamWork
from hasten.feed.workers import start_pool
from hasten.observe.remedies import Remedy

_CHANGES = "in a worker {0}, and what it had become there is lost"


class Running:
    """An epoch under way.

    Attributes:
        items: the batches that its `draws` know of.
        after: of the batches that are on their way to the loop: the worker, and the states of its
            generators after it where they moved.
    """

    items: Generator[Item, None, None]

    def __init__(self, draws: Draws, epoch: Epoch, first: int) -> None:
        """Batches are numbered from `first` on."""
        self.draws = draws
        self.epoch = epoch
        self.after: dict[int, tuple[int, dict[str, Any] | None]] = {}
        self._next = first

    def given(self, number: int) -> None:
        """Batch `number` is given to the loop now: draw as a DataLoader draws before it is."""
        while self._next <= number:  # more than one where all samples of a batch were left out
            worker, states = self.after.pop(self._next, (0, None))
            if states is not None:
                self.epoch.after[worker] = states
            self._next += 1
            self.draws.given()
        self.send()

    def failed(self, number: int) -> None:
        """Batch `number` could not be made: a DataLoader draws before it raises, too."""
        if self._next == number:  # not where those before it are still on their way to the loop
            self.given(number)

    def finished(self, made: Made, indices: Any, report: Report) -> Iterator[Item]:
        """The batch, once it is made; none where all its samples were left out."""
        for index, message in made.skipped:
            report(index, message)
        if made.empty:
            self.given(made.number)
        else:
            yield made.number, made.batch, indices if made.kept is None else made.kept

    def send(self) -> None:
        """Let workers begin with what is drawn now."""


class OriginalWorkers:
    """Worker processes in place of a DataLoader's: batch i is made by worker i modulo their number.

    What a worker draws depends on what it drew before, so each reply brings the states of its
    generators: another process can go on where one died, and an epoch from its middle.
    """

    def __init__(
        self, loader: Any, options: Options, maker: AsGiven, order: TakenOrder, report: Report
    ) -> None:
        self._loader = loader
        self._options = options
        self._maker = maker
        self._order = order
        self._report = report
        self._lasting: _Crew | None = None

    def run(self, draws: Draws, epoch: Epoch, first: int) -> Running:
        """An epoch that begins now, at batch `first`: its workers begin at once, too."""
        crew, self._lasting = self._lasting, None
        crew = crew or self._started(epoch)
        running = _Sending(draws, epoch, first, crew)
        running.items = begun(self._items(crew, running))
        return running

    def _items(self, crew: _Crew, running: _Sending) -> Generator[Any, None, None]:
        kept = False
        try:
            while len(crew.jobs):  # of an epoch that was left: its workers have made them too
                worker, states = self._take(crew)[2]
                if states is not None:
                    running.epoch.after[worker] = states
            running.send()
            yield None
            while len(crew.jobs):
                indices, made, running.after[made.number] = self._take(crew)
                if made.failure is not None:
                    running.failed(made.number)
                    made.failure.throw()
                yield from running.finished(made, indices, self._report)
                del made
            kept = True
        except GeneratorExit:
            kept = True
            raise
        finally:
            if kept and self._loader.persistent_workers and self._lasting is None:
                self._lasting = crew
            else:
                crew.pool.close()

    def _take(self, crew: _Crew) -> tuple[Any, Made, tuple[int, Any]]:
        indices, watched, worker = crew.take()
        if watched.changed:
            self._order.refuses = _CHANGES.format(watched.changed)
        return indices, watched.made, (worker, watched.after)

    def _started(self, epoch: Epoch) -> _Crew:
        loader = self._loader
        beginning = Beginning(loader.dataset, loader.num_workers, epoch.base, loader.worker_init_fn)
        work = AsGivenWork(self._maker, beginning)
        pool = start_pool(self._options, loader.num_workers, work, loader.prefetch_factor)
        return _Crew(pool, loader.prefetch_factor, self._options.timeout, epoch.after)

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            self._lasting.pool.close()
            self._lasting = None

    def __del__(self) -> None:
        self.close()


class _Crew:
    """Worker processes, and the states of their generators as far as they are known."""

    def __init__(
        self, pool: Pool, each: int, timeout_s: float, starts: dict[int, dict[str, Any]]
    ) -> None:
        """`starts`: of some workers, the states to begin with."""
        self.pool = pool
        me = weakref.proxy(self)  # no circle: the pool holds the data set, and goes with its user
        self.jobs = Jobs(pool, each, timeout_s, again=lambda *died: me._again(*died))
        self._starts = dict(starts)  # of those that had no job yet
        self._states = dict(starts)
        self._changed = ""

    def send(self, number: int, indices: Any) -> None:
        """Let its worker make a batch."""
        worker = number % len(self.pool)
        job = (number, indices, self._starts.pop(worker, None))
        self.jobs.add(number, indices, job, worker=worker)

    def take(self) -> tuple[Any, Watched, int]:
        """The oldest batch under way: its indices, what came, and the worker."""
        indices, reply = self.jobs.next()
        watched: Watched = reply
        worker = watched.made.number % len(self.pool)
        if watched.after is not None:
            self._states[worker] = watched.after
        self._changed = self._changed or watched.changed
        return indices, watched, worker

    def _again(self, worker: int, job: Any) -> Any:
        """What a new worker begins with: the states of the one that died."""
        if self._changed:
            raise DataError(
                f"a worker process died, and no other can go on for it: "
                f"{_CHANGES.format(self._changed)}. Begin the epoch anew"
            )
        number, indices, _ = job
        return number, indices, self._states.get(worker)


class _Sending(Running):
    def __init__(self, draws: Draws, epoch: Epoch, first: int, crew: _Crew) -> None:
        super().__init__(draws, epoch, first)
        self._crew = crew
        self._sent = first

    def send(self) -> None:
        """See `Running`."""
        while self.draws.known:
            self._crew.send(self._sent, self.draws.known.popleft())
            self._sent += 1


class _Streaming(Running):
    def given(self, number: int) -> None:
        """See `Running`: a stream has no indices to draw."""


class OriginalStream:
    """Worker processes that read a stream as those of a DataLoader do, each its copy."""

    def __init__(self, loader: Any, options: Options, order: TakenOrder, say: Any) -> None:
        self._loader = loader
        self._options = options
        self._order = order
        self._say = say
        self._lasting: tuple[Pool, list[Reader]] | None = None
        self._size: int | None = None  # of the batches that its workers make
        self._said = False  # that each of them repeats the whole

    def run(self, draws: Draws, epoch: Epoch, first: int) -> Running:
        """An epoch that begins now; the batches before `first` are read and left out.

        Raises:
            UsageError: workers that last make batches of another size than is wanted by now.
        """
        if self._lasting is not None and self._size != _size(self._loader):
            raise UsageError(
                f"the batch_size of the stream's batch_sampler is {_size(self._loader)} now, and "
                f"its persistent workers make batches of {self._size}: close the Loader first "
                "(loader.close()), or leave persistent_workers out"
            )
        running = _Streaming(draws, epoch, first)
        running.items = begun(self._items(draws, epoch, first))
        return running

    def _items(self, draws: Draws, epoch: Epoch, first: int) -> Generator[Any, None, None]:
        loader = self._loader
        pool, readers = self._lasting or (self._started(epoch), [])
        self._lasting = None
        kept = False
        fresh = draws.base is not None
        if not fresh:
            self._order.refuses = (
                "with persistent_workers, what a stream's workers give follows from all that they "
                "gave in the epochs before"
            )
        try:
            for reader in readers:  # of an epoch that was left
                reader.drain()
            readers = [
                Reader(pool, worker, 0, loader.prefetch_factor, loader.timeout, fresh=fresh)
                for worker in range(len(pool))
            ]
            yield None
            for number, piece in enumerate(in_turn(readers)):
                trouble = "" if self._said else repeats(loader.dataset, readers, piece)
                if trouble:
                    self._said = True
                    self._say(trouble)
                if piece is None:
                    check_reached(first, number, loader.dataset)
                elif number >= first:
                    yield number, piece.batch, None
                del piece
            kept = True
        except GeneratorExit:
            kept = True
            raise
        finally:
            if kept and loader.persistent_workers and self._lasting is None:
                self._lasting = pool, readers
            else:
                pool.close()

    def _started(self, epoch: Epoch) -> Pool:
        loader = self._loader
        self._size = _size(loader)
        beginning = Beginning(loader.dataset, loader.num_workers, epoch.base, loader.worker_init_fn)
        work = StreamWork(
            loader.dataset,
            beginning,
            batch_size=self._size,
            drop_last=loader.drop_last,
            collate_fn=loader.collate_fn,
            seed=None,
            told=loader.worker_init_fn is not None,
        )
        return start_pool(self._options, loader.num_workers, work, loader.prefetch_factor)

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            self._lasting[0].close()
            self._lasting = None

    def __del__(self) -> None:
        self.close()


def _size(loader: Any) -> int | None:
    """Of a stream's batches: its batch sampler's, which a loop may set."""
    size: int | None = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return size


def begun(items: Generator[Any, None, None]) -> Generator[Item, None, None]:
    """A generator past its first, empty, yield: what it has started it will close, if only it is
    dropped."""
    next(items)
    return items


def plan_of(loader: Any, reason: str, remedy: Remedy) -> Plan:
    """As many processes as the DataLoader has."""
    workers = loader.num_workers
    ahead = loader.prefetch_factor * workers
    return Plan(
        name="processes",
        reason=reason,
        remedy=remedy,
        workers=workers,
        prefetch_batches=ahead,
        prefetch_bytes=0,
    )
