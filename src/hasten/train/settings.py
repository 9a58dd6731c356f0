"""What a run can be told: one frozen record, checked when it is made."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, TypedDict

import torch

from hasten.errors import UsageError
from hasten.train import precision as precisions
from hasten.train import strategies
from hasten.train.schedule import Every


class Sink(Protocol):
    """Something that is given each record of a run, as it is made."""

    def write(self, record: Any, /) -> None:
        """Take a record of :mod:`hasten.observe.records`."""

    def close(self) -> None:
        """No record follows."""


class RunOptions(TypedDict, total=False):
    """The options of :class:`hasten.Run` and :class:`hasten.Trainer`, for checkers of types; see
    :class:`RunSettings` for what each means."""

    device: str | torch.device | int | None
    precision: str
    channels_last: bool | str
    compile: bool
    strategy: str
    sync_batchnorm: bool
    accumulate: int
    clip_norm: float | None
    seed: int | None
    folder: str | Path | None
    resume: bool
    checkpoint_every: str | Every | None
    keep: int
    patience: int | None
    log_every: int
    progress: str
    stream: TextIO | None
    sinks: Sequence[Sink]
    config: dict[str, Any]
    resume_hint: str | None
    announce: bool
    hang_after_s: float
    hang_exits: bool
    clock: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run.

    Args:
        device: ``auto`` for the best there is, or a name such as ``cuda:1``, ``mps``, ``cpu``.
        precision: ``auto`` measures (Trainer) or goes by what the device is built for (Run);
            ``float32``, ``bfloat16`` or ``float16`` (scaled). Weights stay float32.
        channels_last: store images and 4-dimensional weights with channels last; ``auto`` measures
            (Trainer) or leaves them (Run).
        compile: compile the model with ``torch.compile``, in place: names in checkpoints do not
            change.
        strategy: how devices share out a step. Between the processes of a launcher (torchrun,
            srun): ``ddp``, a copy of the model in each, or ``fsdp``, a part of it in each. In one
            process: ``dp``, a copy on each of several devices, or ``single``. ``auto`` is ``ddp``
            or ``single``.
        sync_batchnorm: batch norms take their statistics over the batch of all processes, not of
            each its own.
        accumulate: batches whose gradients are averaged, each sample alike, before each optimizer
            step.
        clip_norm: largest 2-norm of all gradients together; ``None`` leaves them.
        seed: seeds Python's, numpy's and torch's generators when the run is made; ``None`` leaves
            them. For the initial weights of a model that is made before, seed there:
            ``torch.manual_seed``.
        folder: where log, checkpoints and report go; ``None`` writes nothing.
        resume: go on from the newest whole checkpoint in ``folder``, if there is one.
        checkpoint_every: besides the end of each epoch: ``500 steps``, ``10 min``, ``2 epochs``
            (then not at each), or ``never`` for only at the end of each epoch.
        keep: how many of the newest checkpoints are kept, beside the best.
        patience: end the run after so many epochs without a better one than the best (by
            ``val_accuracy``, or else ``val_loss``, or else the training loss); ``None`` trains all
            of them. Where only some epochs are validated, those alone count.
        log_every: batches between log points; on an accelerator the loss is read back only then.
        progress: ``auto`` (a live bar on a terminal, plain lines elsewhere), ``bar``, ``plain``,
            ``off``.
        stream: where text for people goes; standard output by default.
        sinks: each gets every record as well, for example a TensorBoard writer.
        config: JSON values, kept in ``config.json`` and in each checkpoint: what you want to find
            again.
        resume_hint: the command to resume with, shown when a signal stops the run.
        announce: say ``Using device: …`` when the run is made.
        hang_after_s: seconds without a finished batch, in training or validation, after which the
            step, the ranks that have not come and the stacks of all threads are told on standard
            error; 0 for never.
        hang_exits: end the process with status 75 when it hangs, so that a launcher starts it anew.
        clock: gives seconds, monotonic; every time is read from it.

    Raises:
        UsageError: a value is out of range, or two contradict each other.
    """

    device: str | torch.device | int | None = "auto"
    precision: str = "auto"
    channels_last: bool | str = "auto"
    compile: bool = False
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: int = 1
    clip_norm: float | None = None
    seed: int | None = 0
    folder: str | Path | None = None
    resume: bool = False
    checkpoint_every: str | Every | None = "10 min"
    keep: int = 2
    patience: int | None = None
    log_every: int = 50
    progress: str = "auto"
    stream: TextIO | None = None
    sinks: Sequence[Sink] = ()
    config: dict[str, Any] = field(default_factory=dict)
    resume_hint: str | None = None
    announce: bool = True
    hang_after_s: float = 600.0
    hang_exits: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        for name, least in (("accumulate", 1), ("keep", 1), ("log_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name}={value!r}: it is a whole number of at least {least}")
        if self.patience is not None and (type(self.patience) is not int or self.patience < 1):
            raise UsageError(
                f"patience={self.patience!r}: epochs without a better one, at least 1, or None"
            )
        if self.precision not in precisions.NAMES:
            raise UsageError(
                f"unknown precision {self.precision!r}; there are {', '.join(precisions.NAMES)}"
            )
        if self.strategy not in strategies.NAMES:
            raise UsageError(
                f"no strategy {self.strategy!r}; there are {', '.join(strategies.NAMES)}"
            )
        if self.channels_last not in (True, False, "auto"):
            raise UsageError(f"channels_last={self.channels_last!r}: True, False or 'auto'")
        if not 0 <= self.hang_after_s < math.inf:
            raise UsageError(f"hang_after_s={self.hang_after_s!r}: seconds, or 0 for never")
        if self.hang_exits and not self.hang_after_s:
            raise UsageError("hang_exits=True needs hang_after_s=…, the seconds after which")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm={self.clip_norm!r}: it is a positive number or None")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise UsageError(f"seed={self.seed!r}: a whole number or None")
        if self.progress not in ("auto", "bar", "plain", "off"):
            raise UsageError(f"progress={self.progress!r}: auto, bar, plain or off")
        if self.resume and self.folder is None:
            raise UsageError("resume=True needs folder=…, the run's folder, to resume from")
        Every.parse(self.checkpoint_every)
        try:
            json.dumps(self.config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"config is kept as JSON, and cannot be: {error}") from error
