"""Trainer: the plain training loop, with nothing hidden."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Unpack, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten import devices
from hasten.errors import DataError, UsageError
from hasten.train import explain, probe
from hasten.train.batch_size import BatchPlan, fitting
from hasten.train.evaluation import Evaluation, evaluate
from hasten.train.result import Result, finish
from hasten.train.run import Run
from hasten.train.settings import RunOptions, RunSettings
from hasten.train.source import split

MakeOptimizer = type[Optimizer] | Callable[..., Optimizer] | Optimizer
MakeScheduler = (
    Callable[..., LRScheduler | ReduceLROnPlateau] | LRScheduler | ReduceLROnPlateau | None
)


class Trainer:
    """Trains a model with the plain loop of :meth:`fit`, on whatever device there is.

    ::

        trainer = hasten.Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW)
        result = trainer.fit(train, val, epochs=10)

    Args:
        model: called with a batch's data; moved to the device when training starts.
        loss: ``loss(outputs, labels)``, a scalar: the mean over the batch. A module's own tensors
            (class weights) go to the device too.
        optimizer: a class (``torch.optim.SGD``), a function of the parameters, or an optimizer
            of the model's parameters.
        lr: learning rate for a class or function; None leaves its default.
        scheduler: a function of the optimizer, or of it and the number of optimizer steps in all
            (``lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps)``), or a
            scheduler.
        schedule_per: when the scheduler steps: after each optimizer ``step`` or each ``epoch``.
        metrics: figures of each validation beside loss and, for class labels, accuracy:
            torchmetrics objects by name.
        options: of the run: see :class:`hasten.train.settings.RunSettings`.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: MakeOptimizer = torch.optim.AdamW,
        lr: float | None = None,
        scheduler: MakeScheduler = None,
        schedule_per: Literal["step", "epoch"] = "epoch",
        metrics: Mapping[str, Any] | None = None,
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
        self._settings = RunSettings(**options)
        self._options = options
        self._make_optimizer, self._lr = optimizer, lr
        self._make_scheduler, self._per_step = scheduler, schedule_per == "step"
        self._metrics = dict(metrics or {})

    def fit(self, train: Iterable[Any], val: Iterable[Any] | None = None, *, epochs: int) -> Result:
        """Train for ``epochs`` epochs in all.

        Args:
            train: batches of ``(data, labels)``, best from a :class:`hasten.Loader`. ``data`` is
                what the model takes; a tuple or dict becomes its arguments. A batch may also be a
                dict with ``labels`` in it.
            val: the same, to validate on after each epoch.
            epochs: counted from the beginning of the run, also when it is resumed.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the step was finished and saved.
            NonFiniteLoss: the loss became NaN or infinite.
            OutOfDeviceMemory: a batch does not fit on the device.
            DeviceMismatch: the model's own code mixes devices; names the tensors.
            DataError: ``train`` gives no batch.
        """
        run = self._start(train, epochs)
        optimizer, per_step = run.optimizers[0], run.schedulers[0] if self._per_step else None
        with explain.errors(run, self):
            for _ in run.epochs(epochs):
                self._settle(run, train)
                self.model.train()
                for data, labels in map(split, run.batches(train)):
                    with run.autocast():
                        loss = self.loss(call(self.model, data), labels)
                    run.backward(loss)
                    run.step(optimizer, per_step)
                self._validate(run, val)
            return finish(run, self, train, val)

    def evaluate(self, loader: Iterable[Any]) -> Evaluation:
        """Mean loss, accuracy and confusion matrix (for class labels) and metrics over a loader.

        Raises:
            DataError: the loader gives no batch.
        """
        run = self.run or self._own_run()
        with explain.errors(run, self):
            return self._evaluate(run, loader)

    def fitting_batch(self, dataset: Any, wanted: int) -> BatchPlan:
        """The largest share of ``wanted`` samples that a whole step fits the device with.

        A copy of the model takes the steps; this one is left as it is.

        Raises:
            OutOfDeviceMemory: not even one sample fits.
        """
        device = devices.device(self._settings.device)
        return fitting(wanted, probe.attempt_with(self, dataset, device), device)

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """The optimizer of a model, made as this trainer makes its own."""
        make = self._make_optimizer
        if isinstance(make, Optimizer):
            return make
        options: dict[str, Any] = {} if self._lr is None else {"lr": self._lr}
        try:
            optimizer = fused(make, model, options) or make(model.parameters(), **options)
        except ValueError as error:
            raise UsageError(f"cannot make the optimizer: {error}") from error
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer gave a {type(optimizer).__name__}, not an Optimizer")
        return optimizer

    # --- inside --------------------------------------------------------------------------------

    def _own_run(self) -> Run:
        run = Run(**self._options)
        run.adopt(self.model)
        if isinstance(self.loss, nn.Module):
            run.adopt(self.loss)
        self.run = run
        return run

    def _start(self, train: Iterable[Any], epochs: int) -> Run:
        run = self._own_run()
        # The optimizer is made after the model is on its device and holds the tensors it steps.
        optimizer = run.prepare(self.optimizer_for(self.model))
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
        if make is None or isinstance(make, (LRScheduler, ReduceLROnPlateau)):
            return make
        if len(inspect.signature(make).parameters) < 2:
            return make(optimizer)
        try:
            batches = len(train)  # type: ignore[arg-type]
        except TypeError as error:
            raise UsageError(
                "a scheduler that asks for the number of steps needs a loader with a length"
            ) from error
        return make(optimizer, -(-batches // self._settings.accumulate) * epochs)

    def _settle(self, run: Run, train: Iterable[Any]) -> None:
        """Once, at the start of a fresh run: which precision and layout are fastest here."""
        if run.global_step or run.resumed_from is not None or run.epoch:
            return
        batch = run.peek(train)
        if batch is None:
            raise DataError("the training data gives no batch: is it empty, or drop_last too much?")
        chosen = probe.choose(run, self, batch)
        run.set_precision(chosen)
        run.say(f"Precision: {chosen}")

    def _evaluate(self, run: Run, loader: Iterable[Any]) -> Evaluation:
        evaluation = evaluate(run, self.model, self.loss, loader, self._metrics)
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
    """``model(data)``; a tuple or list becomes its arguments, a dict its keyword arguments."""
    if isinstance(data, torch.Tensor):
        return model(data)
    if isinstance(data, (tuple, list)):
        return model(*data)
    return model(**data) if isinstance(data, dict) else model(data)


def fused(make: MakeOptimizer, model: nn.Module, options: Mapping[str, Any]) -> Optimizer | None:
    """The optimizer with one kernel for all parameters; None where class or device has none."""
    if not inspect.isclass(make) or "fused" not in inspect.signature(make).parameters:
        return None
    try:
        made: Optimizer = cast(Any, make)(model.parameters(), fused=True, **options)
        return made
    except RuntimeError:  # how the class says that it has none for these parameters
        return None
