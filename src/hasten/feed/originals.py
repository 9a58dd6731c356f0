"""The workers of a DataLoader that was taken over: as many, seeded as they were, in its order."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from hasten.errors import DataError, UsageError
from hasten.feed import randomness
from hasten.feed.asgiven import AsGiven, AsGivenWork, Watched
from hasten.feed.draws import Draws
from hasten.feed.inside import bulky, inside
from hasten.feed.jobs import Jobs, raise_failure
from hasten.feed.options import Options
from hasten.feed.plan import Plan
from hasten.feed.pool import Pool
from hasten.feed.position import check_reached
from hasten.feed.readers import Reader, in_turn, repeats
from hasten.feed.samples import Made
from hasten.feed.sources import Item, Report
from hasten.feed.taken import TakenOrder
from hasten.feed.work import Beginning, StreamWork
from hasten.feed.workers import start_pool

_CHANGES = (
    "the data set changes in its workers when samples are made (a generator, a counter or a cache "
    "of its own), and what it had become there is lost"
)


class Running:
    """An epoch under way.

    Attributes:
        items: the batches that its `draws` know of.
        after: of the batches that are on their way to the loop: the worker, and the states of its
            generators after it where they moved.
    """

    def __init__(self, draws: Draws, items: Generator[Item, None, None] | None = None) -> None:
        self.draws = draws
        self.after: dict[int, tuple[int, dict[str, Any] | None]] = {}
        self._next = 0
        if items is not None:
            self.items = items

    def begin(self, first: int) -> None:
        """Batches are numbered from `first` on."""
        self._next = first

    def given(self, number: int, order: TakenOrder) -> None:
        """Batch `number` is given to the loop now: draw as a DataLoader draws before it is."""
        while self._next <= number:  # more than one where all samples of a batch were left out
            worker, states = self.after.pop(self._next, (0, None))
            if states is not None:
                order.after[worker] = states
            self._next += 1
            self.draws.given()
        self.send()

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
        self._lasting: tuple[Pool, Jobs] | None = None
        self._latest: dict[int, dict[str, Any]] = {}
        self._changed = False

    def run(self, draws: Draws, first: int) -> Running:
        """An epoch that begins now, at batch `first`."""
        lasting, self._lasting = self._lasting, None
        starts: dict[int, dict[str, Any]] = {}
        if lasting is None:
            self._latest, self._changed = dict(self._order.after), False
            starts = dict(self._order.after)
            pool = self._started()
            each = self._loader.prefetch_factor
            lasting = pool, Jobs(pool, each, self._options.timeout, again=self._again)
        running = _Sending(draws, lasting[1], self._loader.num_workers, first, starts)
        running.items = self._items(*lasting, running)
        return running

    def _items(self, pool: Pool, jobs: Jobs, running: _Sending) -> Generator[Item, None, None]:
        kept = False
        try:
            while len(jobs):  # of an epoch that was left: its workers have made them too
                self._take(jobs)
            running.send()
            while len(jobs):
                indices, made, running.after[made.number] = self._take(jobs)
                if made.failure is not None:
                    raise_failure(made.failure)
                for index, message in made.skipped:
                    self._report(index, message)
                if made.empty:
                    running.given(made.number, self._order)
                else:
                    yield made.number, made.batch, indices if made.kept is None else made.kept
                del made
            kept = True
        except GeneratorExit:
            kept = True
            raise
        finally:
            if kept and self._loader.persistent_workers and self._lasting is None:
                self._lasting = pool, jobs
            else:
                pool.close()

    def _take(self, jobs: Jobs) -> tuple[Any, Made, tuple[int, Any]]:
        indices, reply = jobs.next()
        watched: Watched = reply
        worker = watched.made.number % self._loader.num_workers
        if watched.after is not None:
            self._latest[worker] = watched.after
        if watched.changed and not self._changed:
            self._changed = True
            self._order.refuses = _CHANGES
        return indices, watched.made, (worker, watched.after)

    def _started(self) -> Pool:
        loader = self._loader
        beginning = Beginning(
            loader.dataset, loader.num_workers, self._order.base, loader.worker_init_fn
        )
        work = AsGivenWork(self._maker, beginning)
        return start_pool(self._options, loader.num_workers, work, loader.prefetch_factor)

    def _again(self, worker: int, job: Any) -> Any:
        """What a new worker begins with: the states of the one that died."""
        if self._changed:
            raise DataError(
                f"a worker process died, and no other can go on for it: {_CHANGES}. Begin the "
                "epoch anew"
            )
        number, indices, _ = job
        return number, indices, self._latest.get(worker)

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            self._lasting[0].close()
            self._lasting = None

    def __del__(self) -> None:
        self.close()


class _Sending(Running):
    def __init__(
        self, draws: Draws, jobs: Jobs, workers: int, first: int, starts: dict[int, dict[str, Any]]
    ) -> None:
        super().__init__(draws)
        self._jobs = jobs
        self._workers = workers
        self._sent = first
        self._starts = starts  # of each worker, states to begin with
        self.begin(first)

    def send(self) -> None:
        """See `Running`."""
        while self.draws.known:
            number, indices = self._sent, self.draws.known.popleft()
            worker = number % self._workers
            job = (number, indices, self._starts.pop(worker, None))
            self._jobs.add(number, indices, job, worker=worker)
            self._sent += 1


class _Streaming(Running):
    def given(self, number: int, order: TakenOrder) -> None:
        """See `Running`: a stream has no indices to draw."""


class OriginalStream:
    """Worker processes that read a stream as those of a DataLoader do, each its copy."""

    def __init__(self, loader: Any, options: Options, order: TakenOrder, say: Any) -> None:
        self._loader = loader
        self._options = options
        self._order = order
        self._say = say
        self._lasting: tuple[Pool, list[Reader]] | None = None

    def run(self, draws: Draws, first: int) -> Running:
        """An epoch that begins now; the batches before `first` are read and left out."""
        return _Streaming(draws, self._items(draws, first))

    def _items(self, draws: Draws, first: int) -> Generator[Item, None, None]:
        loader = self._loader
        pool, readers = self._lasting or (self._started(), [])
        self._lasting = None
        kept, said = False, False
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
            for number, piece in enumerate(in_turn(readers)):
                trouble = "" if said else repeats(loader.dataset, readers, piece)
                if trouble:
                    said = True
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

    def _started(self) -> Pool:
        loader = self._loader
        beginning = Beginning(
            loader.dataset, loader.num_workers, self._order.base, loader.worker_init_fn
        )
        work = StreamWork(
            loader.dataset,
            beginning,
            batch_size=loader.batch_size,
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


class Virtual:
    """A DataLoader's workers played in the loop's own thread, each with its generators.

    Each has a copy of the data set, as a process would have; large tensors and long lists are
    shared, as long as none of them changes them.
    """

    def __init__(self, loader: Any, maker: AsGiven, order: TakenOrder, report: Report) -> None:
        self._loader = loader
        self._maker = maker
        self._order = order
        self._report = report
        self._players: list[_Player] = []
        self._left: list[tuple[int, Any]] = []

    def run(self, draws: Draws, first: int) -> Running:
        """An epoch that begins now, at batch `first`."""
        if not (self._loader.persistent_workers and self._players):
            self._players = self._started()
            self._left = []
        running = Running(draws)
        running.begin(first)
        running.items = self._items(running, first)
        return running

    def _items(self, running: Running, first: int) -> Generator[Item, None, None]:
        left, self._left = self._left, []
        for number, indices in left:  # of an epoch that was left: its workers have made them too
            self._make(number, indices)
        number, known = first, running.draws.known
        try:
            while known:
                indices = known.popleft()
                made, running.after[number] = self._make(number, indices)
                number += 1
                for index, message in made.skipped:
                    self._report(index, message)
                if made.empty:
                    running.given(made.number, self._order)
                else:
                    yield made.number, made.batch, indices if made.kept is None else made.kept
                del made
        finally:
            if self._loader.persistent_workers:
                self._left = list(enumerate(known, number))

    def _make(self, number: int, indices: Any) -> tuple[Made, tuple[int, Any]]:
        worker = number % len(self._players)
        made, after = self._players[worker].make(number, indices)
        return made, (worker, after)

    def _started(self) -> list[_Player]:
        loader = self._loader
        shared = {id(item): item for item in bulky(loader.dataset, self._maker.collate_fn)}
        players = []
        for worker in range(loader.num_workers):
            try:
                maker = copy.deepcopy(self._maker, dict(shared))
            except Exception as error:
                raise UsageError(
                    f'plan="inline" plays {loader.num_workers} workers, each with its copy of the '
                    f"data set, and {type(loader.dataset).__name__} cannot be copied ({error}); "
                    'leave the plan to hasten ("auto")'
                ) from error
            beginning = Beginning(
                maker.dataset, loader.num_workers, self._order.base, loader.worker_init_fn
            )
            players.append(_Player(worker, maker, beginning, self._order.after.get(worker)))
        return players

    def close(self) -> None:
        """See `Source`."""
        self._players = []


class _Player:
    """One worker played in this process."""

    def __init__(
        self, worker: int, maker: AsGiven, beginning: Beginning, state: dict[str, Any] | None
    ) -> None:
        self._maker = maker
        self._beginning = beginning
        outside = randomness.save()
        info = torch_worker._worker_info
        try:
            beginning.start(worker)
            if state is not None:
                randomness.restore(randomness.unpacked(state))
            self._states = randomness.save()
        finally:
            randomness.restore(outside)
            torch_worker._worker_info = info
        self._bulk = bulky(maker.dataset, maker.collate_fn)
        self._shared = inside(*self._bulk)

    def make(self, number: int, indices: Any) -> tuple[Made, dict[str, Any] | None]:
        """A batch, and the states of the generators if it drew from them."""
        if self._beginning.failure is not None:
            raise_failure(self._beginning.failure)
        outside, threads = randomness.save(), torch.get_num_threads()
        info = torch_worker._worker_info
        randomness.restore(self._states)
        torch_worker._worker_info = self._beginning.info  # type: ignore[assignment]
        torch.set_num_threads(1)
        try:
            made = self._maker.make(0, number, indices)
            moved = randomness.touched(self._states)
            if moved:
                self._states = randomness.save()
        finally:
            randomness.restore(outside)
            torch_worker._worker_info = info
            torch.set_num_threads(threads)
        if inside(*self._bulk) != self._shared:
            raise DataError(
                f"the data set {type(self._maker.dataset).__name__} changes what its workers share "
                'with plan="inline"; leave the plan to hasten ("auto")'
            )
        return made, randomness.packed(self._states) if moved else None


def plan_of(loader: Any, reason: str) -> Plan:
    """As many processes as the DataLoader has."""
    workers = loader.num_workers
    ahead = loader.prefetch_factor * workers
    return Plan(name="processes", reason=reason, workers=workers, prefetch_batches=ahead)
