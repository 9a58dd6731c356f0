"""Batches from worker processes: PyTorch's own DataLoader workers, given hasten's jobs."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten.errors import DataError, UsageError
from hasten.feed.keys import WORKERS, mix
from hasten.feed.options import Options
from hasten.feed.order import Order
from hasten.feed.plan import Plan
from hasten.feed.samples import Made, Maker
from hasten.feed.sources import Item, Report

Job = tuple[int, int, Any]
"""(epoch, number of the batch, its indices): what travels to a worker."""


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
                f"a worker process made a tensor on {device}: leave samples on the host and let "
                "Loader(...).to(device) move the batches",
                "",
            )
        return made


class _Start:
    """The user's worker_init_fn, whose failure is kept for the first batch."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        global _start_failure  # one a process, and this process is a worker
        _start_failure = None
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
        self._jobs = _Jobs()
        self._generator = torch.Generator()
        self._persistent = bool(options.persistent_workers)
        self._loader: DataLoader[Any] | None = None

    def _build(self) -> DataLoader[Any]:
        options, plan = self._options, self._plan
        common: dict[str, Any] = {
            "num_workers": plan.workers,
            "pin_memory": plan.pinned,
            "timeout": options.timeout,
            "multiprocessing_context": options.multiprocessing_context,
            "generator": self._generator,  # else the workers' seed is drawn from the global one
            "prefetch_factor": max(1, plan.prefetch_batches // plan.workers),
            "persistent_workers": self._persistent,
        }
        if self._order is None:
            return DataLoader(
                options.dataset,
                batch_size=options.batch_size,
                drop_last=options.drop_last,
                collate_fn=options.collate_fn,
                worker_init_fn=options.worker_init_fn,
                **common,
            )
        start = _Start(options.worker_init_fn)
        return DataLoader(
            _Worker(self._maker),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._jobs,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            worker_init_fn=start,
            **common,
        )

    def batches(self, epoch: int, first: int) -> Generator[Item, None, None]:
        """See `Source`."""
        self._generator.manual_seed(mix(self._maker.seed, epoch, WORKERS))
        if self._order is not None:
            self._jobs.start(self._order, epoch, first)
        if self._loader is None:
            self._loader = self._build()
        running: Any = None
        try:
            running = self._start_workers(self._loader)
            if self._order is None:
                yield from self._stream(running, first)
            else:
                yield from self._made(running)
        except RuntimeError as error:
            if isinstance(error, DataError):
                raise
            message = _worker_trouble(error, self._options.timeout)
            if message is None:
                raise
            self.close()
            raise DataError(message) from error
        finally:
            if not self._persistent:
                _shut(running)

    def _start_workers(self, loader: DataLoader[Any]) -> Any:
        try:
            return iter(loader)
        except (AttributeError, TypeError, ImportError) as error:
            raise _unpicklable(error, self._options.dataset) from error
        except Exception as error:
            if type(error).__name__ == "PicklingError":
                raise _unpicklable(error, self._options.dataset) from error
            raise

    def _made(self, running: Iterator[Made]) -> Generator[Item, None, None]:
        for made in running:
            indices = self._jobs.indices.pop(made.number)
            if made.failure is not None:
                message, text = made.failure
                raise DataError(message) from (RemoteError(text) if text else None)
            for index, message in made.skipped:
                self._report(index, message)
            if not made.empty:
                yield made.number, made.batch, indices if made.kept is None else made.kept

    def _stream(self, running: Iterator[Any], first: int) -> Generator[Item, None, None]:
        for number, batch in enumerate(running):
            if number >= first:
                yield number, batch, None

    def close(self) -> None:
        """See `Source`."""
        if self._loader is not None:
            _shut(self._loader._iterator)
            self._loader = None


def _as_it_is(made: Made) -> Made:
    return made


def _shut(running: Any) -> None:
    if running is not None:
        running._shutdown_workers()


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"


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


def _worker_trouble(error: RuntimeError, timeout_s: float) -> str | None:
    """What became of a worker, from what DataLoader says of it; None if it is something else."""
    text = str(error)
    if "timed out after" in text:
        return f"no batch came from the worker processes within timeout={timeout_s:g} s"
    killed = re.search(r"worker \(pid\(?s?\)? ?([\d, ]+)\) is killed by signal: ([^.]*)", text)
    if killed:
        return f"worker process {killed[1]} was killed ({killed[2].strip()}). {_likely(killed[2])}"
    if re.search(r"worker.*exited unexpectedly", text):
        return f"{text}. {_likely('')}"
    return None


def _likely(name: str) -> str:
    if "Bus" in name or name == signal.Signals.SIGBUS.name:
        return (
            "Likely /dev/shm, through which batches travel, is full: give it more (docker run "
            "--shm-size=8g), or use fewer workers or a smaller batch"
        )
    if "Killed" in name or not name:
        return (
            "Likely the machine ran out of memory (see `dmesg`): use fewer workers, a smaller "
            "batch or prefetch_factor=1"
        )
    return "Likely native code of the data set crashed: try num_workers=0 to see where"
