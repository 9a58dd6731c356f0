"""Run: one's own training loop, made fast on any device and safe against being stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hasten import devices
from hasten.devices import runtime
from hasten.errors import DataError, UsageError
from hasten.feed import Loader
from hasten.observe import timeline as phases
from hasten.train import loss_over, precision
from hasten.train import options as run_options
from hasten.train import state as states
from hasten.train.half import compile_in_place, run_at
from hasten.train.lookout import Lookout
from hasten.train.loss_over import Over
from hasten.train.settings import RunOptions
from hasten.train.source import Source, close, count

T = TypeVar("T")

_TWO_LOOPS = (
    "two loops over run.batches are under way at once, and which samples a step is of could not be"
    " told, as several processes and accumulate need: give one loader of pairs, of"
    " torch.utils.data.StackDataset(one, other)"
)
_NO_BACKWARD = (
    "no loss of these batches came to run.backward, and without it and run.step each process trains"
    " for itself: call run.backward(loss) and run.step(optimizer) in place of loss.backward() and"
    " optimizer.step(); for a loop that trains nothing, torch.no_grad() or training=False"
)


@run_options.shown
class Run(Lookout):
    """What surrounds the body of a training loop.

    ::

        run = hasten.Run(device="auto", precision="auto")
        model, optimizer = run.prepare(model, optimizer)
        for epoch in run.epochs(10):
            for data, labels in run.batches(loader):
                run.backward(criterion(model(data), labels))
                run.step(optimizer)

    Says ``Using device: …`` when made; prints a line an epoch; with ``folder`` also logs, saves
    checkpoints and resumes.

    Args:
        options: those of :class:`hasten.train.settings.RunSettings`.

    Raises:
        UsageError: an option is wrong; one that there is not is a TypeError, too.
        DeviceUnavailable: there is no such device here.
    """

    def __init__(self, **options: Unpack[RunOptions]) -> None:
        super().__init__(run_options.settings_of(self, options))

    @overload
    def prepare(self, one: T, /) -> T: ...
    @overload
    def prepare(self, *objects: Any) -> tuple[Any, ...]: ...
    def prepare(self, *objects: Any) -> Any:
        """Put modules on the device and make the run responsible for what is given.

        Modules are moved in place (an optimizer made before steps the moved parameters), compiled
        and stored as the settings say, and compute at the run's precision when they are called
        (``model(x)``; around a method of another name put :meth:`autocast`); optimizers' states
        follow; all of these and schedulers are part of each checkpoint. A loader comes back as it
        is: :meth:`batches` brings its batches.

        Args:
            objects: modules, optimizers, schedulers, loaders; other things are moved to the device.

        Returns:
            The same objects, in the same order; one object for one argument.

        Raises:
            UsageError: an optimizer holds parameters of no module prepared with it, or needs a
                closure.
        """
        for item in objects:
            if isinstance(item, nn.Module):
                self.adopt(item)
                run_at(item, self)
        given = []
        for item in objects:
            if isinstance(item, Optimizer):
                states.rebind(item, self._replaced, self.strategy.part)
                states.check_optimizer(item, self.modules)
                devices.move(item, self.device)
                self.optimizers.append(item)
            elif isinstance(item, (LRScheduler, ReduceLROnPlateau)):
                self.schedulers.append(item)
            elif not isinstance(item, (nn.Module, Loader, DataLoader)):
                item = devices.move(item, self.device)
            given.append(item)
        return given[0] if len(given) == 1 else tuple(given)

    def adopt(self, module: nn.Module, *, compiled: bool = True) -> None:
        """Move a module to the device, store it as the settings say and keep it in checkpoints;
        its precision is left to :meth:`autocast`.

        Args:
            module: changed in place.
            compiled: False leaves it as it is even if the run compiles its modules.

        Raises:
            UsageError: it has parameters without a shape yet.
        """
        states.check_module(module)
        before = dict(module.named_parameters(remove_duplicate=False))
        devices.move(module, self.device)
        self.strategy.adopt(module, self.device)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                self._replaced[before[name]] = parameter
        if self.precision.channels_last:
            precision.set_layout(module, True)
        if self.settings.compile and compiled:
            self.strategy.compile(module, compile_in_place)
        self.modules.append(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which forward passes compute at the run's precision; for models that did
        not go through :meth:`prepare`."""
        return self.precision.autocast(self.device)

    def epochs(self, total: int) -> Iterator[int]:
        """Count epochs from 0 (or from where the run is resumed) to ``total`` - 1, or until
        ``patience`` is at its end.

        Between them it prints the epoch's line and saves; after the last one it says what bounds
        the run (:attr:`verdict`), where there were steps enough to tell. Ctrl-C and SIGTERM let
        the step finish.

        Raises:
            UsageError: ``total`` is below 1, or the folder holds a run and ``resume`` is not set.
            Interrupted: a signal stopped the run; what was done is saved if there is a folder.
            NonFiniteLoss: the loss became NaN or infinite.
            HastenError: the folder cannot be written, or nothing in it can be resumed.
        """
        if total < 1:
            raise UsageError(f"epochs={total}: at least 1")
        with self.session(total):
            while self.epoch < total and not self._impatient:
                self.begin_epoch()
                yield self.epoch
                self._step_what_is_owed()
                self.end_epoch(total)
            self._say_why_ended(total)
            self._say_verdict()

    def batches(self, loader: Iterable[Any], *, training: bool | None = None) -> Iterator[Any]:
        """The loader's batches, each on the device.

        Leaving the loop early (``break``) is fine: the rest of the epoch is then left out.

        Args:
            loader: a :class:`hasten.Loader`, a ``DataLoader``, which the feed takes over with the
                same results, or any iterable of batches.
            training: whether steps are taken on them; by default where gradients are enabled,
                so a validation loop under ``torch.no_grad()`` counts nothing and leaves the
                random generators as they were (with ``seed=None`` as a plain loop does).

        Raises:
            DataError: a loader to train on gives no batch.
            Interrupted, NonFiniteLoss: see :meth:`epochs`.
        """
        if not (torch.is_grad_enabled() if training is None else training):
            if not self._in_body:
                self._step_what_is_owed()
            yield from self._batches_to_read(loader)
            return
        start, step_done, window = self.timeline.start, self.timeline.step_done, self._window
        log_every, clock = self.settings.log_every, self.settings.clock
        watchdog = self._watchdog
        strategy, several = self.strategy, self.world.size > 1
        with self._started(loader) as (source, batches):
            start(phases.WAIT)
            for batch in batches:
                start(phases.COPY)
                batch = source.onto_device(batch)
                self.last_batch = batch
                self._mine, samples = source.share(batch)
                if samples != self._samples:
                    self._batch_size_changed(batch, samples)
                window.add(samples)
                if self._stepped_before:
                    self._clear_leftovers()
                self.place = (self.global_step + 1, source, source.batches_done)
                source.batches_done += 1
                if several:
                    last = window.full or self._is_last_batch()
                    strategy.expect(last=last, counts=self._mine > 0)
                self._in_body = True
                watchdog.beats += 1
                start(phases.FORWARD)
                yield batch
                self._in_body = False
                if self._stepped:
                    self._count_step()
                step_done(samples)
                if source.batches_done % log_every == 0:
                    self._log_point(source)
                if several:
                    self._look_together(source, samples)
                elif (
                    clock() >= self._next_look_s
                    or self._signals.received is not None
                    or self.global_step >= self._save_at_step
                ):
                    self._look(source, samples)
                start(phases.WAIT)
            start(phases.OTHER)

    def backward(self, loss: torch.Tensor, over: Over = "samples") -> None:
        """Compute gradients of a loss (one number, the mean over the batch).

        It is added to the epoch's mean, weighted for accumulation and over the processes, and
        scaled for float16.

        Args:
            loss: of what this process has of the batch.
            over: what it is a mean over. Give a number (or a tensor of one element) where that is
                not the batch's samples: tokens that are not padding, say. ``nothing`` is for a
                sum over the samples.

        Raises:
            NonFiniteLoss: it is NaN or infinite: at once on the host, at the next log point on
                an accelerator (which is not made to wait for it).
            UsageError: the loss is not one number, or ``over`` says nothing.
        """
        self.timeline.start(phases.BACKWARD)
        self._backwards += 1
        samples, several = self._mine, self.world.size
        counted = loss_over.counted(over, samples, self.device)
        if counted is None and over == "nothing" and several > 1:
            loss = loss * (self._samples / max(samples, 1))  # as a mean over samples, of them all
        bad = self.meter.add(loss, samples if counted is None else counted, self.place)
        if bad is not None:
            if self.world.size == 1:
                raise self._bad_loss(bad)
            self._bad = self._bad or bad  # told when the processes agree: they wait for this one
        if counted is not None and (self.settings.accumulate > 1 or several > 1):
            total = self.strategy.total(counted)
            loss = self._window.share_of(loss, counted, total, several)
        elif self.settings.accumulate > 1 or several > 1:
            loss = self._window.share(loss, samples, several)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> bool:
        """Step the optimizer and clear its gradients, when enough batches are accumulated.

        Of several optimizers each is stepped for itself. What a later loss of the same batch
        leaves in the gradients of one that has stepped (a generator's in those of its critic) is
        cleared before the next batch; what an earlier one leaves, clear with
        ``optimizer.zero_grad()``.

        Args:
            optimizer: one that was prepared.
            scheduler: stepped after it, unless float16 overflowed and the step was left out;
                prepare it too, so that checkpoints hold it.

        Returns:
            Whether the optimizer stepped.

        Raises:
            UsageError: not within a loop over :meth:`batches`.
        """
        window = self._window
        if not window.full and not self._is_last_batch():
            self._owed[optimizer] = scheduler
            return False
        self._owed.pop(optimizer, None)
        self.timeline.start(phases.OPTIMIZER)
        self.strategy.finish(_parameters(optimizer))
        if window.size > 1:
            window.correct(_parameters(optimizer))
        if self.settings.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(_parameters(optimizer), self.settings.clip_norm)
        stepped = True
        if self.scaler is not None:
            self.scaler.step(optimizer)
            stepped = scheduler is None or precision.has_stepped(self.scaler, optimizer)
        else:
            try:
                optimizer.step()
            except RuntimeError as error:
                told = self.strategy.step_failed(optimizer, error)
                if told is None:
                    raise
                raise told from error
        optimizer.zero_grad()
        if scheduler is not None and stepped:
            scheduler.step()
        self._stepped = window.closed = True
        if len(self.optimizers) > 1:
            self._stepped_before.append(optimizer)
        self.timeline.start(phases.OTHER)
        return True

    @contextmanager
    def _started(self, loader: Iterable[Any]) -> Iterator[tuple[Source, Iterator[Any]]]:
        if self._source is not None and (self.world.size > 1 or self.settings.accumulate > 1):
            raise UsageError(_TWO_LOOPS)
        backwards = self._backwards
        self._step_what_is_owed()
        peeked, self._peeked = self._peeked, None
        source, first, batches = peeked or (None, None, iter(()))
        if source is None:
            source, batches = self.loops.start(loader, self.epoch)
        self._source = source
        done = source.batches_done
        self.progress.epoch(self.epoch + 1, self.planned_epochs, source.batches, done=done)
        self._looked = (done, 0.0, 0.0)
        self.timeline.summary()  # what came between, validation say, is of no step's time
        self._mark = self.timeline.mark()
        try:
            yield source, batches if first is None else chain([first], batches)
            if not source.batches_done:
                raise DataError(
                    f"the {type(loader).__name__} gives no batch in epoch {self.epoch + 1}: is it"
                    " empty, drop_last too much, or an iterator, which can be read only once?"
                )
            went_on = source.batches_done > done
            if self.world.size > 1 and went_on and self._backwards == backwards:
                raise UsageError(_NO_BACKWARD)
            self._step_what_is_owed()
            runtime.synchronize(self.device)  # once an epoch: its time is then the device's too
            self._check_loss()
            self.loops.ended(source, left=False)
        except GeneratorExit:  # the loop was left early; the batch that was out counts
            self.loops.ended(source, left=True)
            if self._stepped:
                self._count_step()
            self.timeline.step_done(self._samples)
            raise
        except (RuntimeError, DataError):
            # A signal to the whole group of processes ends the loader's workers too, and the
            # batches that would fill the window do not come. Of several ranks none can save alone.
            if self._signals.received is not None and self.world.size == 1:
                self._step_what_is_owed()
                self._stop()
            raise
        finally:
            self._in_body = False
            self.spent = self._spent_by_now()
            self._learning_rate = self.learning_rate
            self.progress.epoch_done()
            self._mark = self._source = None
            self._tell_left_out(source)
            close(batches)

    def _step_what_is_owed(self) -> None:
        """Step with what a window holds when no batch follows, though it is not full: at the end
        of a loader of unknown length, or when the loop was left early."""
        self._window.ended = True
        for optimizer, scheduler in list(self._owed.items()):
            self.step(optimizer, scheduler)
        if self._stepped:
            self._count_step()
        self._window.drop()

    def _batch_size_changed(self, batch: Any, samples: int) -> None:
        self._samples = samples
        if self.full_batch is None or samples >= count(self.full_batch):
            self.full_batch = batch

    def _clear_leftovers(self) -> None:
        for optimizer in self._stepped_before:
            optimizer.zero_grad()
        self._stepped_before.clear()

    def _is_last_batch(self) -> bool:
        source = self._source
        if source is None:
            raise UsageError(
                "run.step belongs into a loop over run.batches(loader), which counts the batches"
            )
        return source.batches_done == source.batches


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
