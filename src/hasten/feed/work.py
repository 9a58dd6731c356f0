"""What runs in worker processes: batches of a data set, or the batches of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import worker as torch_worker

from hasten.feed import randomness
from hasten.feed.failure import Failure
from hasten.feed.keys import WORKERS, mix
from hasten.feed.one_stream import OneStream
from hasten.feed.openfiles import OpenFiles
from hasten.feed.samples import Made, Maker


class Beginning:
    """How a worker begins: seeded, known to `get_worker_info`, and by the user's function.

    Attributes:
        failure: of a worker_init_fn that raised; for the first batch to tell.
        info: what `torch.utils.data.get_worker_info` gives.
    """

    def __init__(
        self, dataset: Any, workers: int, base: int, function: Callable[[int], None] | None
    ) -> None:
        """`base` is the number that workers' seeds are counted from; 63 bits."""
        self._dataset = dataset
        self._workers = workers
        self._base = base
        self._function = function
        self.failure: Failure | None = None
        self.info: Info | None = None

    def start(self, worker: int) -> None:
        """See `Work`."""
        randomness.seed_worker(self._base, worker)
        self.info = Info(worker, self._workers, self._base + worker, self._dataset)
        torch_worker._worker_info = self.info  # type: ignore[assignment]
        if self._function is None:
            return
        try:
            self._function(worker)
        except Exception as error:  # noqa: BLE001 - raised again by the loop
            self.failure = Failure.of_init(self._function, worker, error)

    def resized(self, workers: int) -> None:
        """There are so many workers now: for those that begin yet, and for `get_worker_info`."""
        self._workers = workers
        if self.info is not None:
            self.info.num_workers_are(workers)


class Info:
    """What `get_worker_info` gives in a worker; it knows whether its number was looked at."""

    def __init__(self, worker: int, workers: int, seed: int, dataset: Any) -> None:
        self._known = torch_worker.WorkerInfo(
            id=worker, num_workers=workers, seed=seed, dataset=dataset
        )
        self.looked_at = False

    def num_workers_are(self, workers: int) -> None:
        """From now on."""
        known = self._known
        self._known = torch_worker.WorkerInfo(
            id=known.id, num_workers=workers, seed=known.seed, dataset=known.dataset
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.looked_at = True
        return getattr(self._known, name)

    def __repr__(self) -> str:
        self.looked_at = True
        return repr(self._known)


class MapWork:
    """Makes the batches of jobs (epoch, number of the batch, indices)."""

    def __init__(self, maker: Maker, beginning: Beginning) -> None:
        self._maker = maker
        self._beginning = beginning
        self._files: OpenFiles | None = None

    def about_to_fork(self) -> None:
        """See `Forked`."""
        self._files = OpenFiles()

    def start(self, worker: int) -> None:
        """See `Work`."""
        if self._files is not None:
            self._files.own()
        self._beginning.start(worker)

    def resized(self, workers: int) -> None:
        """See `Resizable`."""
        self._beginning.resized(workers)

    def run(self, job: tuple[int, int, Any]) -> Made:
        """See `Work`."""
        epoch, number, indices = job
        if self._beginning.failure is not None:
            return Made(number, failure=self._beginning.failure)
        try:
            made = self._maker.make(epoch, number, indices)
        except Exception as error:  # noqa: BLE001 - raised again by the loop
            return Made(number, failure=Failure.of_batch(error))
        return made

    def failed(self, job: tuple[int, int, Any], error: Exception) -> Made:
        """See `Work`."""
        return Made(job[1], failure=Failure.unsendable(error))

    def left(self, job: tuple[int, int, Any], error: BaseException) -> Made:
        """See `Work`."""
        return Made(job[1], failure=Failure.left_by(error))


@dataclass(slots=True)
class Piece:
    """The next batch of a stream's worker.

    Attributes:
        samples: in it.
        ended: there is none.
        shared: the data set looked at the worker's number, or was told it by worker_init_fn.
    """

    batch: Any = None
    samples: int = 0
    ended: bool = False
    shared: bool = True
    failure: Failure | None = None


StreamJob = tuple[int, int] | None
"""(epoch, batches to pass over) to begin an epoch and give a batch; None to give the next."""


class StreamWork:
    """Reads a stream's copy, and gives a batch for each job."""

    def __init__(
        self,
        dataset: Any,
        beginning: Beginning,
        *,
        batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[Any], Any] | None,
        seed: int | None,
        told: bool,
    ) -> None:
        """`seed` is None where an epoch goes on with the generators as they are; `told`: a
        worker_init_fn may have given each copy its part."""
        self._dataset = dataset
        self._beginning = beginning
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._collate = collate_fn or (default_convert if batch_size is None else default_collate)
        self._seed = seed
        self._told = told
        self._worker = 0
        self._read: OneStream | None = None

    def start(self, worker: int) -> None:
        """See `Work`."""
        self._worker = worker
        self._beginning.start(worker)

    def run(self, job: StreamJob) -> Piece:
        """See `Work`."""
        if self._beginning.failure is not None:
            return Piece(failure=self._beginning.failure)
        try:
            if job is not None:
                epoch, skip = job
                if self._seed is not None:
                    randomness.seed(mix(self._seed, epoch, WORKERS, self._worker))
                whose = f"worker {self._worker}'s part of the stream {type(self._dataset).__name__}"
                self._read = OneStream(self._dataset, whose)
                for _ in range(skip):
                    self._next()
            piece = self._next()
        except Exception as error:  # noqa: BLE001 - raised again by the loop
            self._read = None
            return Piece(failure=Failure.of_batch(error))
        return piece

    def failed(self, job: StreamJob, error: Exception) -> Piece:
        """See `Work`."""
        return Piece(failure=Failure.unsendable(error))

    def left(self, job: StreamJob, error: BaseException) -> Piece:
        """See `Work`."""
        return Piece(failure=Failure.left_by(error))

    def _next(self) -> Piece:
        size, read = self._batch_size or 1, self._read
        samples = [] if read is None else read.next(size)
        if len(samples) < size:
            self._read = None
            if self._drop_last:
                samples = []
        info = self._beginning.info
        shared = self._told or (info is not None and info.looked_at)
        if read is None or not samples:
            return Piece(ended=True, shared=shared)
        batch = read.collated(self._collate, samples, alone=self._batch_size is None)
        return Piece(batch, len(samples), shared=shared)
