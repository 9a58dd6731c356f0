"""Run: one's own training loop, made fast on any device and safe against being stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten import devices
from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.observe import timeline as phases
from hasten.train import precision
from hasten.train import state as states
from hasten.train.half import run_at
from hasten.train.keeping import Keeper
from hasten.train.settings import RunOptions, RunSettings
from hasten.train.source import Source, close, count

T = TypeVar("T")

_LOOK_EVERY_S = 0.1  # between looks at progress, time-based checkpoints and the like


class Run(Keeper):
    """What surrounds the body of a training loop.

    ::

        run = hasten.Run(device="auto", precision="auto")
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(10):
            for data, labels in run.batches(loader):
                run.backward(criterion(model(data), labels))
                run.step(optimizer)

    Says ``Using device: …`` when made; prints a line an epoch; with ``folder`` also logs, saves
    checkpoints and resumes. Keyword arguments are those of
    :class:`hasten.train.settings.RunSettings`.

    Raises:
        UsageError: an option is wrong.
        DeviceUnavailable: there is no such device here.
    """

    def __init__(self, **options: Unpack[RunOptions]) -> None:
        super().__init__(RunSettings(**options))

    @overload
    def prepare(self, one: T, /) -> T: ...
    @overload
    def prepare(self, *objects: Any) -> tuple[Any, ...]: ...
    def prepare(self, *objects: Any) -> Any:
        """Put modules on the device and make the run responsible for what is given.

        Modules are moved in place (their parameters stay the same objects, so an optimizer made
        before holds them still), compiled and stored as the settings say, and compute at the
        run's precision; optimizers' states follow; all of these and schedulers are part of each
        checkpoint.

        Args:
            objects: modules, optimizers, schedulers; other things are moved to the device.

        Returns:
            The same objects, in the same order; one object for one argument.

        Raises:
            UsageError: an optimizer holds parameters of no module prepared with it.
        """
        for item in objects:
            if isinstance(item, nn.Module):
                self.adopt(item)
                run_at(item, lambda: self.precision, self.device)
        given = []
        for item in objects:
            if isinstance(item, Optimizer):
                states.move_optimizer(item, self.device)
                states.check_parameters(item, self.modules)
                self.optimizers.append(item)
            elif isinstance(item, (LRScheduler, ReduceLROnPlateau)):
                self.schedulers.append(item)
            elif not isinstance(item, nn.Module):
                item = devices.move(item, self.device)
            given.append(item)
        return given[0] if len(given) == 1 else tuple(given)

    def adopt(self, module: nn.Module) -> None:
        """Move a module to the device, store and compile it as the settings say, and keep it in
        checkpoints; its precision is left to :meth:`autocast`."""
        devices.move(module, self.device)
        if self.precision.channels_last:
            precision.set_layout(module, True)
        if self.settings.compile and not self.modules:
            module.compile()
        self.modules.append(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which forward passes compute at the run's precision; for models that did
        not go through :meth:`prepare`."""
        return self.precision.autocast(self.device)

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs from 0 (or from where the run is resumed) to ``total`` - 1.

        Between them it prints the epoch's line and saves. Ctrl-C and SIGTERM let the step finish.

        Raises:
            UsageError: ``total`` is below 1, or the folder holds a run and ``resume`` is not set.
            Interrupted: a signal stopped the run; what was done is saved if there is a folder.
            NonFiniteLoss: the loss became NaN or infinite.
            HastenError: the folder cannot be written, or nothing in it can be resumed.
        """
        if total < 1:
            raise UsageError(f"epochs={total}: at least 1")
        with self.session(total):
            for epoch in range(self.epoch, total):
                self.begin_epoch()
                yield epoch
                self.end_epoch(total)

    def batches(self, loader: Iterable[Any], *, training: bool | None = None) -> Iterator[Any]:
        """The loader's batches, each on the device.

        Args:
            loader: a :class:`hasten.Loader`, a ``DataLoader``, or any iterable of batches.
            training: whether steps are taken on them; by default where gradients are enabled,
                so a validation loop under ``torch.no_grad()`` counts nothing.
        """
        if not (torch.is_grad_enabled() if training is None else training):
            yield from self._batches_to_read(loader)
            return
        start, step_done = self.timeline.start, self.timeline.step_done
        log_every, clock = self.settings.log_every, self.settings.clock
        with self._started(loader) as (source, batches):
            start(phases.WAIT)
            for batch in batches:
                start(phases.COPY)
                batch = source.onto_device(batch)
                self.last_batch = batch
                samples = count(batch)
                if samples != self._samples:
                    self._batch_size_changed(batch, samples)
                self._pending += 1
                start(phases.FORWARD)
                yield batch
                source.batches_done += 1
                if self._stepped:
                    self._step_taken()
                step_done(samples)
                if source.batches_done % log_every == 0:
                    self._log_point(source)
                if (
                    clock() >= self._next_look_s
                    or self._signals.received is not None
                    or self.global_step >= self._save_at_step
                ):
                    self._look(source, samples)
                start(phases.WAIT)
            start(phases.OTHER)
            self._step_what_is_owed()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a loss (a scalar, the mean over the batch).

        It is added to the epoch's mean, divided for accumulation, and scaled for float16.

        Raises:
            NonFiniteLoss: it is NaN or infinite: at once on the host, at the next log point on
                an accelerator (which is not made to wait for it).
        """
        self.timeline.start(phases.BACKWARD)
        bad = self.meter.add(loss, self._samples)
        if bad is not None:
            raise self._bad_loss(bad)
        if self.settings.accumulate > 1:
            loss = loss / self.settings.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> bool:
        """Step the optimizer and clear its gradients, when enough batches are accumulated.

        Args:
            optimizer: one that was prepared.
            scheduler: stepped after it; prepare it too, so that checkpoints hold it.

        Returns:
            Whether the optimizer stepped.
        """
        if self._pending < self.settings.accumulate and not self._is_last_batch():
            self._owed[optimizer] = scheduler
            return False
        self._owed.pop(optimizer, None)
        self.timeline.start(phases.OPTIMIZER)
        if self.settings.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm)
        if self.scaler is not None:
            self.scaler.step(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        self._stepped = True
        self.timeline.start(phases.OTHER)
        return True

    def _step_taken(self) -> None:
        self._stepped, self._pending = False, 0
        self.global_step += 1
        if self.scaler is not None:
            self.scaler.update()  # once for all optimizers of the step

    def _step_what_is_owed(self) -> None:
        """At the end of a loader of unknown length: the last batches were too few for a step."""
        if not self._pending:
            return
        self._pending = self.settings.accumulate
        for optimizer, scheduler in list(self._owed.items()):
            self.step(optimizer, scheduler)
        if self._stepped:
            self._step_taken()
        self._pending = 0

    def peek(self, loader: Iterable[Any]) -> Any:
        """The batch that :meth:`batches` will give first, on the device; None where it has none."""
        source = self._source_of(loader)
        batches = source.start(self.epoch)
        first = next(batches, None)
        self._peeked = chain([] if first is None else [first], batches)
        return None if first is None else source.onto_device(first)

    @contextmanager
    def _started(self, loader: Iterable[Any]) -> Iterator[tuple[Source, Iterator[Any]]]:
        source = self._source = self._source_of(loader)
        batches, self._peeked = self._peeked or source.start(self.epoch), None
        done = source.batches_done
        self.progress.epoch(self.epoch + 1, self.planned_epochs, source.batches, done=done)
        self._looked = (done, 0.0, 0.0)
        self._mark = self.timeline.mark()
        try:
            yield source, batches
            runtime.synchronize(self.device)  # once an epoch: its time is then the device's too
            self.spent = self._spent_by_now()
            self.progress.epoch_done()
        finally:
            self._mark = self._source = None
            close(batches)

    def _batches_to_read(self, loader: Iterable[Any]) -> Iterator[Any]:
        source = Source(loader, self.device)
        batches = source.start(0)
        try:
            for batch in batches:
                if self._signals.received is not None:
                    self._stop()
                yield source.onto_device(batch)
        finally:
            close(batches)

    def _source_of(self, loader: Iterable[Any]) -> Source:
        for source in self.sources:
            if source.loader is loader:
                return source
        source = Source(loader, self.device)
        place = len(self.sources)
        self.sources.append(source)
        if self._resumed_sources and place < len(self._resumed_sources):
            source.restore(self._resumed_sources[place])
        return source

    def _batch_size_changed(self, batch: Any, samples: int) -> None:
        self._samples = samples
        if self.full_batch is None or samples >= count(self.full_batch):
            self.full_batch = batch
            if self.global_step:
                self.largest_batch = samples

    def _is_last_batch(self) -> bool:
        source = self._source
        return source is not None and source.batches_done + 1 == source.batches

    def _look(self, source: Source, samples: int) -> None:
        """What is not needed at every step: progress, a checkpoint that is due, a signal."""
        now = self.settings.clock()
        self._next_look_s = now + _LOOK_EVERY_S
        totals = self.timeline.totals()
        batches, waited, spent = self._looked
        self._looked = (source.batches_done, totals[phases.WAIT], sum(totals))
        done = source.batches_done - batches
        share = (totals[phases.WAIT] - waited) / max(sum(totals) - spent, 1e-9)
        loss = None if math.isnan(self.meter.mean) else self.meter.mean
        self.progress.advance(done, done * samples, loss, share)
        if self._pending:
            return  # gradients are half accumulated: not a place to stop at
        if self._signals.received is not None:
            self._stop()
        steps, seconds = self.global_step - self._saved_step, now - self._saved_s
        if self._every.due(steps=steps, seconds=seconds):
            self.save()
