"""Batches from worker processes: PyTorch's own DataLoader workers, given hasten's jobs."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from hasten.errors import DataError, UsageError
from hasten.feed import randomness
from hasten.feed.keys import WORKERS, mix, workers_generator
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.samples import Made, Maker
from hasten.feed.sources import Item, Report

Job = tuple[int, int, Any]
"""(epoch, number of the batch, its indices): what travels to a worker."""


_ON_HOST = (
    "Worker processes share no accelerator: leave samples on the host, and let "
    "Loader(...).to(device) move the batches"
)


class RemoteError(Exception):
    """The traceback of a worker process, as text: the cause of the error raised here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class _Worker:
    """The data set that DataLoader's workers see: an index is a job, a sample is a batch."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    def __getitem__(self, job: Job) -> Made:
        epoch, number, indices = job
        if _start_failure is not None:
            return Made(number, failure=_start_failure)
        try:
            made = self._maker.make(epoch, number, indices)
        except Exception as error:  # noqa: BLE001 - raised again by the loop, with this text
            return Made(number, failure=(_said(error), traceback.format_exc()))
        device = _device_tensor(made.batch)
        if device:
            made.batch = None
            made.failure = (
                f"a worker process made a tensor on {device}. {_ON_HOST}",
                "",
            )
        return made


class _StreamWorker(IterableDataset[Any]):
    """The stream that DataLoader's workers see: begun once an epoch."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if _start_failure is not None:
            raise DataError(_start_failure[0])
        worker = get_worker_info()
        assert worker is not None
        randomness.seed(mix(self._seed, self._epoch, WORKERS, worker.id))
        self._epoch += 1
        return iter(self._dataset)


class _Start:
    """What a worker does first; a failure of the user's worker_init_fn is kept for a batch.

    Ctrl-C goes to every process of the terminal, but what becomes of the run is for the main one
    to say. A handler of SIGTERM that came with the fork is the main one's too.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        global _start_failure  # one a process, and this process is a worker
        _start_failure = None
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._function is None:
            return
        try:
            self._function(worker)
        except Exception as error:  # noqa: BLE001 - raised again by the loop, with this text
            name = getattr(self._function, "__name__", type(self._function).__name__)
            _start_failure = (
                f"worker_init_fn {name} raised {type(error).__name__} in worker {worker}: {error}",
                traceback.format_exc(),
            )


_start_failure: tuple[str, str] | None = None


class _Jobs:
    """The sampler that DataLoader sees; remembers the indices of the jobs on their way."""

    def __init__(self) -> None:
        self._todo: Iterator[Job] = iter(())
        self.indices: dict[int, Any] = {}

    def start(self, order: Order, epoch: int, first: int) -> None:
        self.indices = {}
        numbered = enumerate(order.batches(epoch, first), first)
        self._todo = ((epoch, number, indices) for number, indices in numbered)

    def __iter__(self) -> Iterator[Job]:
        for job in self._todo:
            self.indices[job[1]] = job[2]
            yield job


class Processes:
    """The plan `processes`."""

    def __init__(
        self, options: Options, plan: Plan, maker: Maker, order: Order | None, report: Report
    ) -> None:
        self._options = options
        self._plan = plan
        self._maker = maker
        self._order = order
        self._report = report
        self._persistent = bool(options.persistent_workers)
        self._lasting: tuple[DataLoader[Any], _Jobs] | None = None
        self._lasting_epoch = 0

    def _build(self, jobs: _Jobs, epoch: int) -> DataLoader[Any]:
        options, plan = self._options, self._plan
        common: dict[str, Any] = {
            "num_workers": plan.workers,
            "pin_memory": plan.pinned,
            "timeout": options.timeout,
            "multiprocessing_context": options.multiprocessing_context,
            "prefetch_factor": max(1, plan.prefetch_batches // plan.workers),
            "persistent_workers": self._persistent,
        }
        start = _Start(options.worker_init_fn)
        if self._order is None:
            return DataLoader(
                _StreamWorker(options.dataset, self._maker.seed, epoch),
                batch_size=options.batch_size,
                drop_last=options.drop_last,
                collate_fn=options.collate_fn,
                worker_init_fn=start,
                **common,
            )
        return DataLoader(
            _Worker(self._maker),  # type: ignore[arg-type]
            batch_size=None,
            sampler=jobs,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=start,
            **common,
        )

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        if self._order is None and epoch != self._lasting_epoch + 1:
            self.close()  # the workers' copies of a stream count epochs themselves
        jobs = _Jobs()
        loader, jobs = self._lasting or (self._build(jobs, epoch), jobs)
        if self._persistent:
            self._lasting, self._lasting_epoch = (loader, jobs), epoch
        loader.generator = workers_generator(self._maker.seed, epoch)
        if self._order is not None:
            jobs.start(self._order, epoch, first)
        running: Any = None
        try:
            running = self._start_workers(loader)
            if self._order is None:
                yield from self._stream(running, first)
            else:
                yield from self._made(running, jobs)
        except BaseException:
            self.close()  # persistent workers too: what they were sent is of no use any more
            raise
        finally:
            if not self._persistent:
                _shut(running)

    def _start_workers(self, loader: DataLoader[Any]) -> Any:
        try:
            running: Any = iter(loader)
        except Exception as error:
            if "pickl" in f"{type(error).__name__} {error}".lower():
                raise _unpicklable(error, self._options.dataset) from error
            raise
        if running._worker_pids_set:
            # DataLoader's handler of SIGCHLD would raise at whatever line the training step is,
            # and leave it half done. Without it, next() finds a dead worker within 5 s.
            signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
            running._worker_pids_set = False
        return running

    def _made(self, running: Iterator[Made], jobs: _Jobs) -> Iterator[Item]:
        while True:
            try:
                made = next(running)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                trouble = _worker_trouble(error, self._options.timeout, running)
                if trouble is None:
                    raise
                raise DataError(trouble) from error
            indices = jobs.indices.pop(made.number)
            if made.failure is not None:
                message, text = made.failure
                raise DataError(message) from (RemoteError(text) if text else None)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield made.number, made.batch, indices if made.kept is None else made.kept

    def _stream(self, running: Iterator[Any], first: int) -> Generator[Item, None, None]:
        number = 0
        while True:
            try:
                batch = next(running)
            except StopIteration:
                return
            except Exception as error:
                trouble = _worker_trouble(error, self._options.timeout, running)
                last_line = str(error).strip().rsplit("\n", 1)[-1]
                text = trouble or f"the stream failed in a worker process: {last_line}"
                raise DataError(text) from error
            if number >= first:
                yield number, batch, None
            number += 1

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """See `Source`."""
        if self._lasting is not None:
            _shut(self._lasting[0]._iterator)
            self._lasting = None


def _as_it_is(made: Made) -> Made:
    return made


def _shut(running: Any) -> None:
    if running is not None:
        running._shutdown_workers()


def _said(error: Exception) -> str:
    text = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    if "Cannot re-initialize" in text:
        text += f". {_ON_HOST}"
    return text


def _device_tensor(batch: Any) -> str:
    """The device of the first tensor that is not on the host; '' if all are."""
    if isinstance(batch, torch.Tensor):
        return "" if batch.device.type == "cpu" else str(batch.device)
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next(filter(None, map(_device_tensor, batch)), "")
    return ""


def _unpicklable(error: Exception, dataset: Any) -> UsageError:
    return UsageError(
        f"the data set {type(dataset).__name__} cannot be sent to worker processes ({error}); "
        "define classes, functions and collate_fn at the top of a module instead of inside a "
        'function or as a lambda, or use num_workers=0 or multiprocessing_context="fork"'
    )


def _worker_trouble(error: Exception, timeout_s: float, running: Any) -> str | None:
    """What became of a worker, where DataLoader says that it is gone; None if it is not that."""
    text = str(error)
    if "timed out after" in text:
        return f"no batch came from the worker processes within timeout={timeout_s:g} s"
    said = re.search(r"worker \(pid.*(killed by signal|exited unexpectedly)", text)
    if not said and not isinstance(error, OSError | EOFError):  # those: it went while sending
        return None
    for worker in running._workers:
        worker.join(timeout=1)  # its exit status may take a moment
        if worker.exitcode is not None and worker.exitcode < 0:
            name = signal.Signals(-worker.exitcode).name
            return f"worker process {worker.pid} was killed by {name}. {_LIKELY.get(name, _CRASH)}"
    codes = [worker.exitcode for worker in running._workers if worker.exitcode]
    if not said and not codes:
        return None
    return f"a worker process ended with exit status {codes[0] if codes else 0}. {_CRASH}"


_CRASH = "Likely native code of the data set crashed: try num_workers=0 to see where"
_LIKELY = {
    "SIGKILL": (
        "Likely the machine ran out of memory (see `dmesg`): use fewer workers, a smaller batch "
        "or prefetch_factor=1"
    ),
    "SIGBUS": (
        "Likely /dev/shm, through which batches travel, is full: give it more (docker run "
        "--shm-size=8g), or use fewer workers or a smaller batch"
    ),
}
