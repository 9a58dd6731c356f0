"""The plan `processes`: batches from worker processes, which are replaced when they die."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch

from hasten.errors import DataError, UsageError
from hasten.feed.describe import text_of
from hasten.feed.fingerprint import fingerprint
from hasten.feed.forking import refuse_workers_here
from hasten.feed.handlers import by_a_handler
from hasten.feed.jobs import Bound, Jobs
from hasten.feed.keys import workers_generator
from hasten.feed.modes import Modes
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.pool import Pool
from hasten.feed.position import check_reached
from hasten.feed.relay import Relay
from hasten.feed.samples import Maker
from hasten.feed.serving import Work
from hasten.feed.sources import Inline, Item, Report
from hasten.feed.streams import Reader, Share, in_turn, repeats
from hasten.feed.work import Beginning, MapWork, StreamWork


class Processes:
    """Worker processes make whole batches, in turn; what they get shows no trace of who made it.

    A worker that dies is replaced, and its batches are made again from the first that has not
    come: order and randomness follow from seed, epoch and index, so nothing is lost or twice.

    Attributes:
        unfit: why a batch could not be sent from a process, where nobody asked for those.
    """

    def __init__(
        self, options: Options, plan: Plan, maker: Maker, order: Relay | None, report: Report
    ) -> None:
        self._options = options
        self._plan = plan
        self._maker = maker
        self._order = order
        self._report = report
        self._each = max(1, plan.prefetch_batches // plan.workers)
        self._lasting: Pool | None = None
        self._behind: Jobs | None = None  # of the lasting workers: of an epoch that was left
        self._taking = threading.Lock()
        self._content: object = None  # of the data set that the lasting workers have, and modes
        self.unfit = ""

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        if self._lasting is not None and self._plan.kept and self._content != self._seen():
            self.close()
        with self._taking:  # another thread may begin an iteration of its own
            lasting, self._lasting = self._lasting, None
            behind, self._behind = self._behind, None
        pool = lasting or self._started(epoch)
        whole = passed_on = False
        jobs: Jobs | None = None
        try:
            if lasting is not None:
                if behind is not None:
                    behind.drop()
                with _sent(self._options):
                    pool.resize(self._plan.workers, self._each)
            if self._order is None:
                yield from self._stream(pool, epoch, first)
            else:
                # Workers that are there already need no longer for their first batch than the loop.
                head = min(1, self._plan.head_batches) if lasting else self._plan.head_batches
                run = self._order.current
                jobs = self._jobs(pool)
                yield from self._made(jobs, self._order, epoch, first, head)
                passed_on = run.passed_on
            whole = True
        except GeneratorExit:  # a `break`: what is under way is dropped when the next epoch begins
            whole = jobs is not None and bool(self._options.persistent_workers)
            raise
        finally:
            # Where another iteration, at the same time, has kept its own, one is enough.
            kept = self._options.persistent_workers or self._content is not None or passed_on
            if whole and kept and self._lasting is None:
                self._lasting, self._behind = pool, jobs
            else:
                pool.close()

    def adopt(self, other: Processes) -> None:
        """Go on with the workers that the source of the plan before has left."""
        if other._plan.kept == self._plan.kept and other._plan.niceness == self._plan.niceness:
            with other._taking:
                self._lasting, other._lasting = other._lasting, None
                self._behind, other._behind = other._behind, None
            self._content = other._content

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = self._behind = None

    def __del__(self) -> None:
        self.close()

    def _seen(self) -> object:
        found = fingerprint(self._options.dataset, self._options.collate_fn)
        return None if found is None else (found, Modes().key)

    def _started(self, epoch: int) -> Pool:
        options, workers = self._options, self._plan.workers
        self._content = self._seen() if self._plan.kept else None
        draw = torch.empty((), dtype=torch.int64, device="cpu")
        base = int(draw.random_(generator=workers_generator(self._maker.seed, epoch)).item())
        function = options.worker_init_fn
        beginning = Beginning(options.dataset, workers, base, function)
        work: Work = MapWork(self._maker, beginning)
        if self._order is None:
            work = StreamWork(
                options.dataset,
                beginning,
                batch_size=options.batch_size,
                drop_last=options.drop_last,
                collate_fn=options.collate_fn,
                seed=self._maker.seed,
                told=function is not None,
            )
        return start_pool(options, workers, work, self._each, self._plan.niceness)

    def _headed(self, epoch: int, head: list[tuple[int, Any]]) -> Generator[Item, None, None]:
        """What the loop's process makes. What that changes in the data set (a cache that fills) is
        no reason for other workers in the next epoch; what the loop changes meanwhile is."""
        inline = Inline(self._maker, None, self._report)
        for place, each in enumerate(head):
            unchanged = self._content is not None and (not place or self._content == self._seen())
            for item in inline.made(epoch, [each]):
                if unchanged:
                    self._content = self._seen()
                yield item
                del item

    def _jobs(self, pool: Pool) -> Jobs:
        return Jobs(
            pool,
            self._each,
            self._options.timeout,
            bound=Bound(self._plan.prefetch_bytes, self._plan.batch_bytes),
            alone=(lambda job, index: (job[0], job[1], [index])) if self._maker.batched else None,
        )

    def _made(
        self, jobs: Jobs, order: Order, epoch: int, first: int, heading: int
    ) -> Generator[Item, None, None]:
        numbered = enumerate(order.batches(epoch, first), first)
        head = list(islice(numbered, heading))
        jobs.fill(numbered, lambda number, indices: (epoch, number, indices))
        # The workers are at those behind the head by now.
        yield from self._headed(epoch, head)
        while len(jobs):
            indices, made = jobs.next()
            if made.failure is not None and made.failure.of_sending and self._options.chosen:
                # In the loop's process, where somebody who did not ask for others has them come.
                self.unfit = made.failure.of_sending
                made = self._maker.make(epoch, made.number, indices)
            # Before the batch is given: workers are to work while the loop does.
            if not self.unfit:
                jobs.fill(numbered, lambda number, indices: (epoch, number, indices))
            if made.failure is not None:
                made.failure.throw()
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield made.number, made.batch, indices if made.kept is None else made.kept
            del made  # else the loop's batch lives on while the next one is waited for

    def _stream(self, pool: Pool, epoch: int, first: int) -> Generator[Item, None, None]:
        options = self._options
        share = Share(pool, self._each, Bound(self._plan.prefetch_bytes))
        readers = [
            Reader(pool, worker, epoch, self._each, options.timeout, share=share)
            for worker in range(len(pool))
        ]
        for number, piece in enumerate(in_turn(readers)):
            said = repeats(options.dataset, readers, piece)
            if said:
                raise DataError(said)
            if piece is None:
                check_reached(first, number, options.dataset)
            elif number >= first:
                yield number, piece.batch, None
            del piece


def start_pool(options: Options, workers: int, work: Work, each: int, niceness: int = 0) -> Pool:
    """Worker processes, as the options want them started.

    Raises:
        UsageError: the data set cannot be sent to them, or there can be no more processes.
    """
    context = options.multiprocessing_context
    refuse_workers_here(workers)
    with _sent(options):
        return Pool(workers, work, context=context, jobs_each=each, niceness=niceness)


@contextmanager
def _sent(options: Options) -> Iterator[None]:
    """Within, processes are started; that what they are given cannot be sent to them is told in
    words of its own."""
    try:
        yield
    except Exception as error:
        if by_a_handler(error) or not any(_pickles(f) for f, _ in walk_tb(error.__traceback__)):
            raise
        raise _unpicklable(error, options) from error


def _pickles(frame: FrameType) -> bool:
    """It is where a process that is not forked has what it is given pickled."""
    code = frame.f_code
    return code.co_name == "dump" and Path(code.co_filename).name == "reduction.py"


def _unpicklable(error: Exception, options: Options) -> UsageError:
    what = f"the data set {type(options.dataset).__name__}"
    for name in ("collate_fn", "worker_init_fn"):
        function = getattr(options, name)
        try:
            pickle.dumps(function)
        except Exception:  # noqa: BLE001 - whatever its code raises, it is this one
            what = f"{name} {getattr(function, '__name__', type(function).__name__)}"
    return UsageError(
        f"{what} cannot be sent to worker processes ({type(error).__name__}: {text_of(error)}); "
        "define classes, functions and collate_fn at the top of a module instead of inside a "
        "function or as a lambda, open in the first sample what cannot be sent (files, locks, "
        'connections), or use num_workers=0 or multiprocessing_context="fork"'
    )
