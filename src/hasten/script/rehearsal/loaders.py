"""DataLoaders in a rehearsal: samples are made in this process, long ones end early."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data._utils.worker as worker
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.labour import Labour
from hasten.script.rehearsal.origins import Origins, address, tensors_in
from hasten.script.rehearsal.places import Place, Stack, Territory

_LONG_S = 5.0  # seconds that a loader without steps may take
_OPERATIONS = 12  # calls of torch and NumPy a sample that are real work
_PLAIN = 200  # other calls a sample that are
_WATCHED = 64  # samples of a loader whose calls are counted one by one
_SAMPLES = 8  # samples that must be seen before the work is judged


class _Use:
    """What is known of one loader."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.workers = 0
        self.epochs = self.samples = self.operations = self.files = 0
        self.watched = self.arrays = self.plain = 0  # samples whose calls were counted; the calls
        self.trained = self.persistent = self.told = False
        self.init: Any = None


class Loaders:
    """Follows every DataLoader of the script."""

    def __init__(
        self,
        territory: Territory,
        origins: Origins,
        collected: Collected,
        steps: Callable[[], int],
        count: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._territory, self._origins, self._collected = territory, origins, collected
        self._steps, self._count, self._clock = steps, count, clock
        self._uses: weakref.WeakKeyDictionary[Any, _Use] = weakref.WeakKeyDictionary()
        self._by_place: dict[tuple[str, int], _Use] = {}
        self._began: weakref.WeakKeyDictionary[Any, tuple[Any, int, float]] = (
            weakref.WeakKeyDictionary()
        )
        self._in_worker: Any = None
        self._in_sample: set[int] = set()  # device memory that the sample under way has made
        self._loop = 0  # identity of the user's call that asks for the batch
        self._batches = 0
        self._fetching: _Use | None = None
        self._labour = Labour(territory)
        self.cut = 0

    def install(self) -> None:
        """Watch loaders for the life of this process."""
        loader: Any = DataLoader
        plain_init, plain_get = loader.__init__, loader._get_iterator
        base: Any = _BaseDataLoaderIter
        plain_next, plain_reset = base.__next__, base._reset

        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(this, *args, **kwargs)
            self._uses[this] = self._use_at(self._territory.stack(sys._getframe(1)))

        def get_iterator(this: Any) -> Any:
            return self._iterator(this, plain_get)

        def reset(this: Any, loader: Any, first_iter: bool = False) -> None:
            self._began[this] = loader, self._count(), self._clock()
            self._uses.setdefault(loader, _Use(())).epochs += 1
            plain_reset(this, loader, first_iter)

        def following(this: Any) -> Any:
            return self._next(this, plain_next)

        loader.__init__, loader._get_iterator = init, get_iterator
        base._reset, base.__next__ = reset, following
        base.next = following
        self._origins.on_device_result = self._device_touched
        sys.addaudithook(self._audit)

    def _use_at(self, stack: Stack) -> _Use:
        """The record of the loaders that a line makes: one a line, as loops make them anew."""
        if not stack:
            return _Use(())
        return self._by_place.setdefault((stack[0].file, stack[0].line), _Use(stack))

    def _iterator(self, loader: Any, plain: Any) -> Any:
        """An iterator that makes samples here, whatever the number of workers."""
        use = self._uses.setdefault(loader, _Use(()))
        workers, timeout = loader.num_workers, loader.timeout
        use.workers, use.persistent = workers, loader.persistent_workers
        if workers and use.init is not loader and loader.worker_init_fn is not None:
            use.init = loader
            self._as_worker(loader, lambda: loader.worker_init_fn(0))
        loader.num_workers, loader.timeout = 0, 0
        try:
            # Made as a worker: a streaming data set asks at once which share of it is wanted.
            iterator = self._as_worker(loader, lambda: plain(loader)) if workers else plain(loader)
        finally:
            loader.num_workers, loader.timeout = workers, timeout
        use.epochs += 1
        self._began[iterator] = loader, self._count(), self._clock()
        if workers:
            fetcher = iterator._dataset_fetcher
            fetcher.collate_fn = _in_this_process(fetcher.collate_fn)
        return iterator

    def _as_worker(self, loader: Any, work: Callable[[], Any]) -> Any:
        """Do some work as a worker process would: it knows its number and must not touch CUDA."""
        info = worker.WorkerInfo(
            id=0, num_workers=1, seed=torch.initial_seed(), dataset=loader.dataset
        )
        before, worker._worker_info = worker._worker_info, info
        outer, self._in_worker = self._in_worker, loader
        self._in_sample.clear()
        try:
            return work()
        finally:
            worker._worker_info = before
            self._in_worker = outer

    @property
    def in_worker(self) -> bool:
        """Whether a worker process would run this."""
        return self._in_worker is not None

    def _next(self, iterator: Any, plain: Any) -> Any:
        loader, steps, began = self._began.get(iterator, (None, self._count(), self._clock()))
        made = self._count() - steps
        if made:
            use = self._uses.get(loader)
            if use is not None:
                use.trained = True
        if made >= self._steps() or (not made and self._clock() - began > _LONG_S):
            self.cut += 1
            raise StopIteration
        use = self._uses.get(loader) if loader is not None else None
        if use is None:
            return plain(iterator)
        calls, outer, self._fetching = self._origins.calls, self._fetching, use
        stack = self._territory.stack(sys._getframe(1))
        self._loop = stack[0].frame if stack else 0
        count = not use.workers and use.watched < _WATCHED
        try:
            with self._labour if count else contextlib.nullcontext():
                batch = (
                    self._as_worker(loader, lambda: plain(iterator))
                    if use.workers
                    else plain(iterator)
                )
        finally:
            self._fetching = outer
        samples = _samples(loader, batch)
        use.samples += samples
        if count:
            use.watched += samples
            use.arrays += self._labour.arrays
            use.plain += self._labour.plain
        use.operations += self._origins.calls - calls
        self._batches += 1
        self._origins.loaded(batch, self._batches, stack, use.stack)
        return batch

    def _device_touched(self, out: torch.Tensor, args: tuple[Any, ...]) -> None:
        if self._in_worker is None:
            return
        used = {address(t) for t in tensors_in(args) if t.device.type != "cpu"}
        follows = bool(used & self._in_sample)
        self._in_sample.add(address(out))
        if follows:
            return  # the worker has failed before this
        stack = self._territory.stack(sys._getframe(2))
        if not stack:
            return
        use = self._uses.get(self._in_worker)
        at = stack[0]
        if at.frame == self._loop:  # no code of the user's makes the sample
            if use is None or use.told or not use.stack:
                return
            at = use.stack[0]
        elif use is not None:
            use.told = True
        loop = next((p for p in stack if p.frame == self._loop), None)
        related = [(loop.file, loop.line, "a worker process fails for this loop")] if loop else []
        kept = self._kept_since(args)
        if kept is not None and kept.frame not in {place.frame for place in stack}:
            related.insert(0, (at.file, at.line, "a worker uses it here"))
            at = kept
        self._collected.add(
            "HST114",
            at.file,
            at.line,
            "the data set uses the device in a DataLoader worker: Cannot re-initialize CUDA in "
            "forked subprocess.",
            fix="return CPU tensors and move the batch in the training loop",
            related=tuple(related),
        )

    def _kept_since(self, args: tuple[Any, ...]) -> Place | None:
        """Where a device tensor that a worker reads was moved there, before it started."""
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
                places = self._origins.arrived.get(address(arg))
                if places:
                    return places[0]
        return None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self._fetching is not None:
            self._fetching.files += 1

    def tell(self) -> None:
        """Say what the loaders showed, once the script has ended."""
        for (file, line), use in self._by_place.items():
            if use.workers and use.epochs > 1 and use.trained:
                self._tell_not_persistent(file, line, use)
            if not use.workers and use.trained:
                self._tell_no_workers(file, line, use)

    def _tell_not_persistent(self, file: str, line: int, use: _Use) -> None:
        if use.persistent:
            return
        self._collected.add(
            "HST125",
            file,
            line,
            f"{use.workers} worker processes are started anew at each epoch.",
            fix="persistent_workers=True",
            severity="warning",
            count=use.epochs,
        )

    def _tell_no_workers(self, file: str, line: int, use: _Use) -> None:
        if use.samples < _SAMPLES:
            return
        operations, files = use.operations / use.samples, use.files / use.samples
        arrays, plain = (n / max(use.watched, 1) for n in (use.arrays, use.plain))
        if operations + arrays < _OPERATIONS and plain < _PLAIN and files < 1:
            return
        counts = {"tensor operations": operations, "NumPy or image calls": arrays}
        counts |= {"files": files, "other calls": plain if plain >= _PLAIN else 0.0}
        work = ", ".join(f"{count:.0f} {what}" for what, count in counts.items() if count >= 1)
        self._collected.add(
            "HST123",
            file,
            line,
            f"samples are made in the training process ({work} a sample) while the device waits.",
            fix="num_workers=... and persistent_workers=True",
            severity="warning",
        )


def _samples(loader: Any, batch: Any) -> int:
    """How many samples a batch holds, as far as that can be seen."""
    if loader.batch_size:
        return int(loader.batch_size)
    first = next(iter(tensors_in((batch,))), None)
    return len(first) if first is not None and first.dim() else 1


def _in_this_process(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A collate function that makes no shared memory for a parent process."""

    def collated(samples: Any) -> Any:
        before, worker._worker_info = worker._worker_info, None
        try:
            return collate(samples)
        finally:
            worker._worker_info = before

    return collated
