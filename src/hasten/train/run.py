"""Run: one's own training loop, made fast on any device and safe against being stopped."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten import devices
from hasten.devices import runtime
from hasten.errors import Interrupted, NonFiniteLoss, UsageError
from hasten.observe import timeline as phases
from hasten.observe.progress import Progress, epoch_line
from hasten.observe.records import EpochRecord, EventRecord, StepRecord
from hasten.observe.timeline import Mark, StepSummary, Timeline
from hasten.train import diagnose, precision
from hasten.train import state as states
from hasten.train.folder import RunFolder
from hasten.train.half import run_at
from hasten.train.meter import BadLoss, LossMeter
from hasten.train.schedule import Every
from hasten.train.seed import seed_everything
from hasten.train.settings import RunOptions, RunSettings
from hasten.train.signals import StopSignals
from hasten.train.source import Source, close, count
from hasten.train.spent import Spent

T = TypeVar("T")

_LOOK_EVERY_S = 0.1  # between looks at progress, time-based checkpoints and the like


class Run:
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
        self.settings = settings = RunSettings(**options)
        self.device = devices.device(settings.device)
        precision.check(settings.precision, self.device)
        self.precision = precision.by_rule(
            settings.precision, self.device, channels_last=settings.channels_last is True
        )
        self.progress = Progress(settings.stream or sys.stdout, settings.progress)  # type: ignore[arg-type]
        self.say(f"Using device: {self.device} ({runtime.name(self.device)})")
        if settings.seed is not None:
            seed_everything(settings.seed, self.device)
        self.folder = Path(settings.folder) if settings.folder is not None else None
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler | ReduceLROnPlateau] = []
        self.scaler = self.precision.scaler(self.device)
        self.timeline = Timeline(self.device, settings.clock)
        self.meter = LossMeter(self.device, settings.log_every)
        self.epoch = 0
        """Epochs finished."""
        self.global_step = 0
        """Optimizer steps done."""
        self.history: list[EpochRecord] = []
        self.best: tuple[float, int] | None = None
        """The best value of what is watched, larger is better, and its step."""
        self.resumed_from: Path | None = None
        self.last_batch: Any = None
        """The batch being trained on, or the last one that was."""
        self.largest_batch: int | None = None
        """Samples of the largest batch that went through a whole step."""
        self.spent = Spent()
        """What the present epoch has taken so far."""
        self.sources: list[Source] = []
        """The loaders trained on, in the order in which they were first used."""
        self._source: Source | None = None
        self._mark: Mark | None = None
        self._peeked: Iterator[Any] | None = None
        self._samples = 0
        self._pending = 0  # batches whose gradients wait for the optimizer
        self._stepped = False
        self._signals = StopSignals()
        self._every = Every.parse(settings.checkpoint_every)
        self._writer: RunFolder | None = None
        self._metrics: dict[str, float] = {}
        self._in_restored_epoch = False
        self._began_s = self._saved_s = settings.clock()
        self._saved_step = 0
        self._save_at_step: float = self._every.steps or math.inf
        self._resumed_sources: list[dict[str, Any]] = []
        self.planned_epochs = 0
        self.last_summary: StepSummary | None = None
        """Where the time of the last stretch of steps went."""
        self.full_batch: Any = None
        """The first batch of the last epoch: one of full size."""
        self._next_look_s = 0.0
        self._looked = (0, 0.0, 0.0)  # batches done, seconds waited and in all, at the last look

    # --- before the loop -----------------------------------------------------------------------

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

    def set_precision(self, chosen: precision.Precision) -> None:
        """Compute at this precision from now on."""
        if chosen.channels_last != self.precision.channels_last:
            for module in self.modules:
                precision.set_layout(module, chosen.channels_last)
        self.precision = chosen
        self.scaler = chosen.scaler(self.device)

    # --- the loop ------------------------------------------------------------------------------

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
                    self._stepped, self._pending = False, 0
                    self.global_step += 1
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
            self._pending = 0

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
            return False
        self.timeline.start(phases.OPTIMIZER)
        if self.settings.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        self._stepped = True
        self.timeline.start(phases.OTHER)
        return True

    def log(self, **values: float) -> None:
        """Give the present epoch's record and line figures of one's own.

        ``val_loss`` and ``val_accuracy`` (0 to 1) have their places; the best checkpoint is the
        one with the highest ``val_accuracy``, or else the lowest ``val_loss``, or else the lowest
        training loss.
        """
        self._metrics.update({name: float(value) for name, value in values.items()})

    def say(self, text: str) -> None:
        """Print a line for people, above the progress bar where there is one."""
        self.progress.say(text)

    # --- around the loop -----------------------------------------------------------------------

    @contextmanager
    def session(self, total: int) -> Iterator[None]:
        """Open the folder, resume, show progress and heed signals; :meth:`epochs` enters it."""
        self.planned_epochs = total
        with ExitStack() as stack:
            if self.folder is not None:
                self._writer = stack.enter_context(RunFolder(self.folder, self.settings))
                self._resume(self._writer)
                self._writer.write_config(states.describe(self, total))
            stack.callback(self._release)
            stack.enter_context(self.progress)
            stack.enter_context(self._signals)
            self._began_s = self._saved_s = self.settings.clock()
            yield

    def begin_epoch(self) -> None:
        """Begin the epoch, or the rest of one that was resumed in its middle."""
        self._metrics = {}
        if not self._in_restored_epoch:
            self.spent = Spent()
            self.meter.reset()
        self._in_restored_epoch = False
        runtime.reset_peak(self.device)

    def end_epoch(self, total: int) -> None:
        """Record the epoch, print its line, save."""
        self._check_loss()
        metrics = dict(self._metrics)
        record = EpochRecord(
            epoch=self.epoch + 1,
            step=self.global_step,
            loss=self.meter.mean,
            val_loss=metrics.pop("val_loss", None),
            val_accuracy=metrics.pop("val_accuracy", None),
            seconds=self.spent.seconds,
            images_per_s=self.spent.samples / self.spent.seconds if self.spent.seconds else 0.0,
            phases=dict(self.spent.phases),
            learning_rate=self.learning_rate or 0.0,
            peak_memory_bytes=runtime.peak_bytes(self.device),
            metrics=metrics,
        )
        self.epoch += 1
        self.history.append(record)
        self._emit(record)
        self.say(epoch_line(record, total))
        for source in self.sources:
            source.batches_done = 0
        best = self._note_best(record)
        every = self._every.epochs or 1
        if best or self.epoch % every == 0 or self.epoch == total:
            self.save(best=best)
        if self._signals.received is not None and self.epoch < total:
            self._stop()

    @property
    def began(self) -> bool:
        """Whether training has begun: whether there is something to report."""
        return bool(self.global_step or self.history)

    @property
    def feed(self) -> str:
        """How samples became batches in the loader trained on first, in one line."""
        return self.sources[0].plan if self.sources else "none"

    def watched(self) -> float:
        """What tells whether an epoch did well, lower is better: its validation loss if logged."""
        return self._metrics.get("val_loss", self.meter.mean)

    @property
    def learning_rate(self) -> float | None:
        """Of the first optimizer's first parameter group; None without an optimizer."""
        if not self.optimizers:
            return None
        return float(self.optimizers[0].param_groups[0]["lr"])

    def save(self, *, best: bool = False) -> Path | None:
        """Save a checkpoint now; call it between steps.

        Args:
            best: mark it as the best so far.

        Returns:
            Its folder; None for a run without one.

        Raises:
            NonFiniteLoss: the loss became NaN or infinite; nothing is saved.
            CheckpointError: it cannot be written; earlier ones are as they were.
        """
        if self._writer is None:
            return None
        self._check_loss()
        self.spent = self._spent_by_now()
        path = self._writer.save(*states.gather(self), best=best)
        self._saved_step, self._saved_s = self.global_step, self.settings.clock()
        self._save_at_step = self.global_step + (self._every.steps or math.inf)
        return path

    def peek(self, loader: Iterable[Any]) -> Any:
        """The batch that :meth:`batches` will give first, on the device; None where it has none."""
        source = self._source_of(loader)
        batches = source.start(self.epoch)
        first = next(batches, None)
        self._peeked = chain([] if first is None else [first], batches)
        return None if first is None else source.onto_device(first)

    # --- inside --------------------------------------------------------------------------------

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

    def _log_point(self, source: Source) -> None:
        self._check_loss()
        summary = self.timeline.summary()
        self._emit(
            StepRecord(
                epoch=self.epoch + 1,
                step=self.global_step,
                batch=source.batches_done,
                loss=self.meter.recent(),
                learning_rate=self.learning_rate or 0.0,
                images_per_s=summary.samples_per_s,
                seconds=self.settings.clock() - self._began_s,
                phases={name: phase.median_s for name, phase in summary.phases.items()},
            )
        )

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

    def _stop(self) -> None:
        number = self._signals.received or signal.SIGINT
        path = self.save()
        text = f"stopped by {signal.Signals(number).name} after step {self.global_step}"
        if path is None:
            text += "; nothing was saved, for the run has no folder"
        else:
            hint = (
                self.settings.resume_hint or f"hasten.Run(folder={str(self.folder)!r}, resume=True)"
            )
            text += f"; saved {path}\nResume with: {hint}"
        raise Interrupted(text, number)

    def _resume(self, writer: RunFolder) -> None:
        saved = writer.newest(say=self.say)
        if saved is None:
            return
        self._resumed_sources = states.apply(self, saved)
        self.resumed_from = saved.path
        self._in_restored_epoch = self.spent.samples > 0
        self._saved_step = self.global_step
        self._save_at_step = self.global_step + (self._every.steps or math.inf)
        writer.log.truncate_after(self.global_step)
        where = f"epoch {self.epoch + 1}, step {self.global_step}"
        self.say(f"Resumed from {saved.path} ({where})")
        self._emit(EventRecord(name="resumed", message=str(saved.path), step=self.global_step))

    def _emit(self, record: StepRecord | EpochRecord | EventRecord) -> None:
        if self._writer is not None:
            self._writer.log.append(record)
        for sink in self.settings.sinks:
            sink.write(record)

    def _check_loss(self) -> None:
        bad = self.meter.flush()
        if bad is not None:
            raise self._bad_loss(bad)

    def _bad_loss(self, bad: BadLoss) -> NonFiniteLoss:
        source = self._source
        batch = self.last_batch
        if bad.batches_ago and source is not None:
            batch = source.read_again(self.epoch, source.batches_done - 1 - bad.batches_ago)
        newest = self._writer.last_saved if self._writer is not None else None
        return diagnose.non_finite_loss(
            bad.value,
            epoch=self.epoch + 1,
            step=self.global_step + 1 - bad.batches_ago // self.settings.accumulate,
            learning_rate=self.learning_rate,
            batch=batch,
            last_good=str(newest) if newest else None,
        )

    def _note_best(self, record: EpochRecord) -> bool:
        if record.val_accuracy is not None:
            value = record.val_accuracy
        else:
            value = -(record.loss if record.val_loss is None else record.val_loss)
        if self.best is not None and not value > self.best[0]:
            return False
        self.best = (value, self.global_step)
        return True

    def _spent_by_now(self) -> Spent:
        if self._mark is None:
            return self.spent
        self.last_summary = summary = self.timeline.summary(self._mark)
        self._mark = self.timeline.mark()
        return self.spent.plus(summary)

    def _release(self) -> None:
        close(self._peeked)
        self._peeked = self._writer = None
        for sink in self.settings.sinks:
            sink.close()
