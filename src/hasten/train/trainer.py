"""Trainer: the plain training loop, with nothing hidden."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten.errors import DataError, UsageError
from hasten.train import explain, probe, sharded
from hasten.train import loss_over as over
from hasten.train import options as run_options
from hasten.train import world as worlds
from hasten.train.batch_size import BatchPlan, batch_line, fitting
from hasten.train.evaluation import Evaluation, evaluate
from hasten.train.loss_over import LossOver
from hasten.train.result import Page, Result, finish
from hasten.train.run import Run
from hasten.train.settings import RunOptions
from hasten.train.source import length, split

Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = type[Optimizer] | Callable[..., Optimizer] | Optimizer
MakeScheduler = (
    Callable[..., LRScheduler | ReduceLROnPlateau] | LRScheduler | ReduceLROnPlateau | None
)


@run_options.shown
class Trainer:
    """Trains a model with the plain loop of :meth:`fit`, on whatever device there is.

    ::

        trainer = hasten.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW)
        result = trainer.fit(train, val, epochs=10)

    Args:
        model: called with a batch's data; moved to the device when training starts. Each epoch
            begins with ``model.train()``; evaluation puts every part's mode back.
        loss: ``loss(outputs, labels)``, one number: the mean over the batch. A module's own
            tensors (class weights) go to the device too, and are part of each checkpoint.
        optimizer: a class (``torch.optim.SGD``; its fused kernels are used where there are any),
            a function of the parameters, or an optimizer. The first two are given the parameters
            of the model and those of the loss, if it has any to train; an optimizer trains those
            that it holds.
        lr: learning rate for a class or function; None leaves its default.
        scheduler: a function of the optimizer, or of it and the number of times that it will step
            (``lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps)``), or a
            scheduler of the optimizer given.
        schedule_per: when the scheduler steps: after each optimizer ``step`` or each ``epoch``.
            A ReduceLROnPlateau is given the validation loss, or without validation the training
            loss, and so steps per epoch only.
        metrics: figures of each validation beside loss and, for class labels, accuracy:
            torchmetrics objects by name, each computing one number.
        loss_over: what the loss is a mean over, so that pieces of a batch (of several processes,
            of accumulation, of a validation) make the mean over all of it: ``samples``,
            ``nothing`` for a sum, or a function of outputs and labels that counts it, as
            ``lambda outputs, labels: (labels != pad).sum()``. ``auto`` asks PyTorch's losses for
            their class weights and ignored labels, and takes others for means over samples; with
            several processes it tries whether that is so, and says where it is not.
        options: of the run: those of :class:`hasten.train.settings.RunSettings`.

    Raises:
        UsageError: an option is wrong; one that there is not is a TypeError, too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        optimizer: MakeOptimizer = torch.optim.AdamW,
        lr: float | None = None,
        scheduler: MakeScheduler = None,
        schedule_per: Literal["step", "epoch"] = "epoch",
        metrics: Mapping[str, Any] | None = None,
        loss_over: LossOver = "auto",
        **options: Unpack[RunOptions],
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"model is a torch.nn.Module, not {type(model).__name__}")
        if schedule_per not in ("step", "epoch"):
            raise UsageError(f"schedule_per={schedule_per!r}: 'step' or 'epoch'")
        if isinstance(optimizer, Optimizer) and lr is not None:
            raise UsageError("lr is for an optimizer's class; this optimizer is made already")
        self.model, self.loss = model, loss
        self.run: Run | None = None
        """The run of the last :meth:`fit`."""
        self.last_evaluation: Evaluation | None = None
        self._settings = run_options.settings_of(self, options)
        self._options = options
        self._make_optimizer, self._lr = optimizer, lr
        self._make_scheduler, self._per_step = scheduler, schedule_per == "step"
        self._metrics = dict(metrics or {})
        over.check(loss_over)
        self._loss_over, self._tried_loss = loss_over, False
        taken = sorted({"loss", "val_loss", "val_accuracy"} & self._metrics.keys())
        if taken:
            raise UsageError(f"a metric cannot be named {taken[0]}: hasten has that figure itself")

    def fit(
        self,
        train: Iterable[Any],
        val: Iterable[Any] | None = None,
        *,
        epochs: int,
        page: Page | None = None,
    ) -> Result:
        """Train for ``epochs`` epochs in all.

        Called again it trains the same model further, in a new run; an optimizer that was given
        ready made keeps its state, others are made anew.

        Args:
            train: batches of ``(data, labels)``, best from a :class:`hasten.Loader`; a
                ``DataLoader`` is taken over by the feed, with the same results. ``data`` is what
                the model takes; a tuple or dict becomes its arguments. A batch may also be a dict
                with ``labels`` in it.
            val: the same, to validate on after each epoch.
            epochs: counted from the beginning of the run, also when it is resumed.
            page: given what the report of a run with a folder knows, a
                :class:`hasten.observe.report.ReportData`, gives what it shows: with names of
                classes, or predictions. Called when the training is done (with FSDP in each
                process, for all must call the model).

        Returns:
            What the run came to.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the step was finished and saved.
            NonFiniteLoss: the loss became NaN or infinite.
            OutOfDeviceMemory: a batch does not fit on the device.
            DeviceMismatch: the model's own code mixes devices; names the tensors.
            DataError: a loader gives no batch.
            UsageError: model, optimizer, scheduler or folder cannot be used so.
            CheckpointError: there is nothing whole to resume, or it does not fit.
        """
        run = self._start(train, val, epochs)
        optimizer, per_step = run.optimizers[0], run.schedulers[0] if self._per_step else None
        with run.holding(), explain.stopped(run, self), explain.errors(run, self):
            for _ in run.epochs(epochs):
                self._settle(run, train)
                self.model.train()
                for data, labels in map(split, run.batches(train)):
                    with run.autocast():
                        outputs = call(self.model, data)
                        loss = self.loss(outputs, labels)
                    run.backward(loss, self._over(run, loss, outputs, labels))
                    run.step(optimizer, per_step)
                self._validate(run, val)
            return finish(run, self, val, page)

    def evaluate(self, loader: Iterable[Any]) -> Evaluation:
        """Mean loss, accuracy and confusion matrix (for class labels) and metrics over a loader.

        The model is taken as it is now: no checkpoint is loaded.

        Raises:
            DataError: the loader gives no batch.
            OutOfDeviceMemory: a batch does not fit on the device.
        """
        run = self.run or self._own_run()
        with explain.errors(run, self):
            return self._evaluate(run, loader)

    def fitting_batch(self, batches: Callable[[int], Iterable[Any]], wanted: int) -> BatchPlan:
        """The largest share of ``wanted`` samples that a whole step fits each device with.

        A copy of the model takes the steps; this one is left as it is.

        Args:
            batches: makes a loader of batches of so many samples; it is closed if it can be.
            wanted: samples of an optimizer step.

        Raises:
            OutOfDeviceMemory: not even one sample fits.
        """
        device = worlds.device_for(self._settings.device)
        world = worlds.join(device)
        attempt = probe.attempt_with(self, batches, device)
        return fitting(wanted, attempt, device, world.all)

    @property
    def optimizer_given(self) -> Optimizer | None:
        """The optimizer, if it was given ready made."""
        return self._make_optimizer if isinstance(self._make_optimizer, Optimizer) else None

    def optimizer_for(
        self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]
    ) -> Optimizer:
        """The optimizer of a model and a loss, made as this trainer makes its own.

        Raises:
            UsageError: it cannot be made of these parameters.
        """
        make = self._make_optimizer
        if isinstance(make, Optimizer):
            return make
        options: dict[str, Any] = {} if self._lr is None else {"lr": self._lr}
        modules = [model, loss] if isinstance(loss, nn.Module) else [model]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        if not any(parameter.requires_grad for parameter in parameters):
            raise UsageError(
                f"{type(model).__name__} has no parameter to train"
                + (": all have requires_grad=False" if parameters else "")
            )
        try:
            optimizer = fused(make, parameters, options) or make(parameters, **options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"cannot make the optimizer: {error}") from error
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer gave a {type(optimizer).__name__}, not an Optimizer")
        return optimizer

    # --- inside --------------------------------------------------------------------------------

    def _own_run(self) -> Run:
        run = Run(**self._options)
        run.adopt(self.model)
        if isinstance(self.loss, nn.Module) and self.loss.state_dict():
            run.adopt(self.loss, compiled=False)
        self.run = run
        return run

    def _start(self, train: Iterable[Any], val: Iterable[Any] | None, epochs: int) -> Run:
        if epochs < 1:
            raise UsageError(f"epochs={epochs}: at least 1")
        if val is not None and length(val) == 0:
            raise DataError("the validation data is empty: give some, or val=None")
        self.last_evaluation, self._tried_loss = None, False
        run = self._own_run()
        # The optimizer is made after the model is on its device and holds the tensors it steps.
        optimizer = run.prepare(self.optimizer_for(self.model, self.loss))
        size = getattr(train, "batch_size", None)
        if run.world.size > 1 and self._settings.announce and isinstance(size, int):
            rate, settings = run.learning_rate or 0.0, self._settings
            run.say(batch_line(f"{size}", size, settings.accumulate, run.world.size, rate))
        scheduler = self._scheduler(optimizer, train, epochs)
        if scheduler is not None:
            run.prepare(scheduler)
        elif self._per_step:
            raise UsageError("schedule_per='step' needs a scheduler")
        return run

    def _scheduler(
        self, optimizer: Optimizer, train: Iterable[Any], epochs: int
    ) -> LRScheduler | ReduceLROnPlateau | None:
        make = self._make_scheduler
        if make is None:
            return None
        scheduler: Any = make
        if not isinstance(make, (LRScheduler, ReduceLROnPlateau)):
            arguments = [optimizer, *self._steps_if_asked(make, train, epochs)]
            try:
                scheduler = make(*arguments)
            except (TypeError, ValueError) as error:
                raise UsageError(f"cannot make the scheduler: {error}") from error
        if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise UsageError(f"scheduler gave a {type(scheduler).__name__}, not a scheduler")
        if scheduler.optimizer is not optimizer:
            raise UsageError(
                "the scheduler is of another optimizer than the trainer's: give both ready made,"
                " or scheduler= as a function of the optimizer"
            )
        if isinstance(scheduler, ReduceLROnPlateau) and self._per_step:
            raise UsageError("ReduceLROnPlateau looks at an epoch's loss: schedule_per='epoch'")
        return scheduler

    def _steps_if_asked(
        self, make: Callable[..., Any], train: Iterable[Any], epochs: int
    ) -> list[int]:
        """The number of times that a scheduler will step, for a function that takes it."""
        needed = [
            parameter.name
            for parameter in inspect.signature(make).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) < 2:
            return []
        if inspect.isclass(make) or len(needed) > 2:
            name = getattr(make, "__name__", "the scheduler")
            raise UsageError(
                f"{name} needs {', '.join(needed[1:])} too: give a function, such as"
                f" lambda optimizer: {name}(optimizer, {needed[1]}=…), or of optimizer and steps"
            )
        if not self._per_step:
            return [epochs]
        batches = length(train)
        if batches is None:
            raise UsageError(
                "a scheduler that asks for the number of steps needs a loader with a length"
            )
        return [-(-batches // self._settings.accumulate) * epochs]

    def _settle(self, run: Run, train: Iterable[Any]) -> None:
        """Once, at the start of a fresh run: which precision and layout are fastest here."""
        if run.global_step or run.resumed_from is not None or run.epoch:
            return
        batch = run.peek(train)
        if batch is None:
            raise DataError("the training data gives no batch: is it empty, or drop_last too much?")
        if run.strategy.fixed is not None:
            return
        with run.strategy.apart():
            chosen = run.world.first(run.world.by_main(lambda: probe.choose(run, self, batch)))
        assert chosen is not None
        run.set_precision(chosen)
        run.say(f"Precision: {chosen}")
        run.write_config()

    def _over(self, run: Run, loss: torch.Tensor, outputs: Any, labels: Any) -> over.Over:
        """What the loss of a batch is a mean over; at the first one it is tried whether it is."""
        found = over.of(self._loss_over, self.loss, outputs, labels)
        if not self._tried_loss:
            self._tried_loss = True
            taken = self._loss_over == "auto" and isinstance(found, str) and found == "samples"
            if taken and run.world.size > 1:
                told = over.word(run, self.loss, loss, outputs, labels)
                if told is not None:
                    run.say(told)
        return found

    def _evaluate(self, run: Run, loader: Iterable[Any]) -> Evaluation:
        evaluation = evaluate(run, self.model, self.loss, loader, self._metrics, self._loss_over)
        self.last_evaluation = evaluation
        return evaluation

    def _validate(self, run: Run, val: Iterable[Any] | None) -> None:
        if val is not None:
            run.log(**self._evaluate(run, val).figures())
        for scheduler in [] if self._per_step else run.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(run.watched())
            else:
                scheduler.step()


def call(model: nn.Module, data: Any) -> Any:
    """``model(data)``; a tuple or list becomes its arguments, a mapping its keyword arguments.

    Raises:
        UsageError: ``forward`` does not take those.
    """
    given: tuple[Any, ...] = (data,)
    named: Mapping[str, Any] = {}
    if isinstance(data, Mapping):
        given, named = (), data
    elif isinstance(data, (tuple, list)) and not isinstance(data, PackedSequence):
        given = tuple(data)
    try:
        return model(*given, **named)
    except TypeError as error:
        told = _misfit(model, given, named)
        if told:
            raise UsageError(told) from error
        raise


def _misfit(model: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """What is wrong with calling the model with these; empty where it takes them."""
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except ValueError:  # it has no signature
        return ""
    except TypeError as error:
        what = f"{len(given)} arguments"
        if named:
            what = f"the keyword arguments {', '.join(map(str, named))}, the keys of its dict"
        return (
            f"the data of a batch becomes {what}, and {type(model).__name__}.forward does not take "
            f"them ({error}): have the batch hold what it takes, or write the loop with hasten.Run"
        )
    return ""


def fused(
    make: MakeOptimizer, parameters: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Optimizer | None:
    """The optimizer with one kernel for all parameters; None where class or device has none, or
    it does not know weights in parts."""
    if not inspect.isclass(make) or "fused" not in inspect.signature(make).parameters:
        return None
    if make not in sharded.FUSED and sharded.in_parts(parameters):
        return None
    try:
        made: Optimizer = cast(Any, make)(parameters, fused=True, **options)
        return made
    except RuntimeError:  # how the class says that it has none for these parameters
        return None
