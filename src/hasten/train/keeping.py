"""What a run keeps: its state, its record, its checks; :class:`hasten.Run` is made on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten.devices import runtime
from hasten.errors import NonFiniteLoss
from hasten.observe.progress import Progress
from hasten.observe.records import EpochRecord, EventRecord, StepRecord
from hasten.observe.timeline import Mark, StepSummary, Timeline
from hasten.observe.verdict import Verdict
from hasten.train import atomic, broken, precision, strategies
from hasten.train import world as worlds
from hasten.train.agreement import Agreement, RankLog
from hasten.train.folder import RunFolder
from hasten.train.kept import FOLDER, name_of
from hasten.train.loops import Loops
from hasten.train.meter import BadLoss, LossMeter
from hasten.train.parts import Helper
from hasten.train.schedule import Every
from hasten.train.seed import seed_everything
from hasten.train.settings import RunSettings
from hasten.train.signals import StopSignals
from hasten.train.source import Source, close
from hasten.train.spent import Spent
from hasten.train.watchdog import Watchdog
from hasten.train.window import Window
from hasten.train.world import World

_TELLING_STEPS = 50


def device_line(device: torch.device) -> str:
    """What is said first: ``Using device: cuda:0 (NVIDIA H200)``."""
    return f"Using device: {device} ({runtime.name(device)})"


class Keeper:
    """The state of a run and all that happens around its loop's body.

    It is apart from :class:`hasten.Run` so that the loop itself can be read on a screen.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.device = worlds.device_for(settings.device)
        precision.check(settings.precision, self.device)
        self.precision = precision.by_rule(
            settings.precision, self.device, channels_last=settings.channels_last is True
        )
        self.world = worlds.join(self.device, alone=settings.strategy in strategies.GROUPED)
        """The processes that train together; one alone, mostly."""
        self.strategy = strategies.make(
            settings.strategy,
            self.world,
            self.device,
            self.precision,
            sync_batchnorm=settings.sync_batchnorm,
        )
        self.strategy.say = self.say
        self._rank_log = None if self.world.is_main else RankLog(self.world.rank)
        self.progress = (
            Progress(settings.stream or sys.stdout, settings.progress)  # type: ignore[arg-type]
            if self._rank_log is None
            else Progress(
                self._rank_log,  # type: ignore[arg-type]
                "off" if settings.progress == "off" else "plain",
            )
        )
        if settings.announce:
            self.say(device_line(self.device))
        for words in (self.strategy.words(), worlds.advice() if self.world.size > 1 else None):
            if words:
                self.say(words)
        if settings.seed is not None:
            seed_everything(settings.seed, self.device)
        self.folder = Path(settings.folder) if settings.folder is not None else None
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler | ReduceLROnPlateau] = []
        self.scaler = self.precision.scaler(self.device)
        self.timeline = Timeline(self.device, settings.clock)
        self.meter = LossMeter(self.device, settings.log_every, self.world.sum)
        self.epoch = 0
        """Epochs finished."""
        self.global_step = 0
        """Optimizer steps done."""
        self.history: list[EpochRecord] = []
        self.best: tuple[float, int] | None = None
        """The best value of what is watched, larger is better, and its step."""
        self._best_before: tuple[float, int] | None = None
        self._best_lost = False
        self._last_good: Path | None = None
        self.resumed_from: Path | None = None
        self.last_batch: Any = None
        """The batch being trained on, or the last one that was."""
        self.largest_batch = 0
        """Samples of the largest batch that went through a whole step."""
        self.spent = Spent()
        """What the present epoch has taken so far."""
        self.loops = Loops(self.device, self.world, self._how_to_begin_anew)
        """The loops that train, and their loaders."""
        self._read: list[Source] = []  # the loaders that were only read, the last few
        self._left_out: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # said, by loader
        self._in_session = False
        self._source: Source | None = None
        self._mark: Mark | None = None
        self._peeked: tuple[Source, Any, Iterator[Any]] | None = None
        self.place: tuple[int, Source, int] | None = None
        """The batch under way: its step, counted from 1, its loader and its number from 0."""
        self._samples = self._mine = 0  # of the batch: of all processes, and of this one
        self._bad: BadLoss | None = None  # found here, and not told to the other processes yet
        self._agreement = Agreement(self.world, settings.clock)
        self.counted = 0
        """Samples of the batch read last, by a loop that does not train, that are this process's:
        0 where it repeats one of another's."""
        self.counted_of_all = 0
        """Samples of that batch that all processes have."""
        self._saving = False
        self._window = Window(settings.accumulate)
        self._owed: dict[Optimizer, LRScheduler | None] = {}  # they wait for more batches
        self._stepped = False  # and not counted yet
        self._replaced: dict[torch.Tensor, torch.Tensor] = {}  # parameters that moving made anew
        self._stepped_before: list[Optimizer] = []  # of several, those that took the last step
        self._in_body = False
        self._backwards = 0  # losses so far
        self._open = ExitStack()
        self._learning_rate: float | None = None
        self._signals = StopSignals()
        self._watchdog = Watchdog(
            after_s=settings.hang_after_s,
            exits=settings.hang_exits,
            where=lambda: f"in epoch {self.epoch + 1}, after step {self.global_step}",
            rank=self.world.rank,
            size=self.world.size,
            folder=self.folder,
            progress=atomic.written_bytes,
        )
        self._every = Every.parse(settings.checkpoint_every)
        self._writer: RunFolder | None = None
        self._locked: RunFolder | None = None  # also when nothing of the loop is written any more
        self._holding = False
        self._apart: World | None = None  # where checkpoints in parts are agreed on
        self._helper: Helper | None = None
        self._metrics: dict[str, float] = {}
        self._in_restored_epoch = False
        self._began_s = self._saved_s = settings.clock()
        self._saved_step = 0
        self._save_at_step: float = self._every.steps or math.inf
        self.planned_epochs = 0
        self.last_summary: StepSummary | None = None
        """Where the time of the last stretch of steps went."""
        self.verdict: Verdict | None = None
        """What bounds a loop of one's own, when it has ended: its last epoch tells."""
        self.full_batch: Any = None
        """The first batch of the last epoch: one of full size."""
        self._next_look_s = 0.0
        self._looked = (0, 0.0, 0.0)  # batches done, seconds waited and in all, at the last look

    def say(self, text: str) -> None:
        """Print a line for people, above the progress bar where there is one."""
        self.progress.say(text)

    def set_precision(self, chosen: precision.Precision) -> None:
        """Compute at this precision from now on.

        Raises:
            UsageError: the device cannot.
        """
        precision.check(chosen.name, self.device)
        if chosen.channels_last != self.precision.channels_last:
            for module in self.modules:
                precision.set_layout(module, chosen.channels_last)
        self.precision = chosen
        self.scaler = chosen.scaler(self.device)

    def log(self, **values: float) -> None:
        """Give the present epoch's record and line figures of one's own.

        ``val_loss`` and ``val_accuracy`` (0 to 1) have their places; the best checkpoint is the
        one with the highest ``val_accuracy``, or else the lowest ``val_loss``, or else the lowest
        training loss.
        """
        self._metrics.update({name: float(value) for name, value in values.items()})

    @property
    def samples(self) -> int:
        """Of the batch under way, those of all processes."""
        return self._samples

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint that this run made or was resumed from; one that is being written
        is waited for."""
        if self._writer is not None:
            self._writer.settle()
            self._last_good = self._writer.last_saved
        return self._last_good

    @property
    def began(self) -> bool:
        """Whether training has begun: whether there is something to report."""
        return bool(self.global_step or self.history)

    @property
    def feed(self) -> str:
        """How samples became batches in the loader trained on first, in one line."""
        first = self.loops.first
        return "none" if first is None else first.planned

    def watched(self) -> float:
        """What tells whether an epoch did well, lower is better: its validation loss if logged."""
        return self._metrics.get("val_loss", self.meter.mean)

    @property
    def learning_rate(self) -> float | None:
        """Of the first optimizer's first parameter group; None without an optimizer."""
        if not self.optimizers:
            return None
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, without those between a stop and its resume."""
        return self.settings.clock() - self._began_s

    @elapsed_s.setter
    def elapsed_s(self, seconds: float) -> None:
        self._began_s = self.settings.clock() - seconds

    def close(self) -> None:
        """Close the folder, end the progress display and give the signals back; again is harmless.

        :meth:`epochs` does so at its end. After an error in a loop of your own it does when the
        error's traceback is gone; this is for who wants it earlier.
        """
        self._open.close()
        self._close_sources()

    def _close_sources(self) -> None:
        self.loops.close()
        for source in self._read:
            source.close()

    def _how_to_begin_anew(self) -> str:
        """What to do where the epoch that was stopped in cannot be gone on with."""
        if not self.history:
            return f"It is the first: begin the run anew, in another folder than {self.folder}"
        newest = name_of(self.history[-1].step)
        return (
            f"For epoch {self.epoch + 1} anew, remove what is newer than {newest} from"
            f" {self.folder}/{FOLDER}, if that one is there, and resume"
        )

    def begin_epoch(self) -> None:
        """Begin the epoch, or the rest of one that was resumed in its middle."""
        self._metrics = {}
        if not self._in_restored_epoch:
            self.spent = Spent()
            self.meter.reset()
        self._in_restored_epoch = False
        runtime.reset_peak(self.device)

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which it is told where the run hangs; while it trains it is in one."""
        return self._watchdog

    @property
    def _between_steps(self) -> bool:
        return not self._owed and (self._window.closed or not self._in_body)

    def _count_step(self) -> None:
        self._stepped = False
        self.global_step += 1
        if self._samples > self.largest_batch:
            self.largest_batch = self._samples
        if self.scaler is not None:
            self.scaler.update()  # once for all optimizers of the step

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
                seconds=self.elapsed_s,
                phases={name: phase.median_s for name, phase in summary.phases.items()},
            )
        )

    def _emit_event(self, name: str, message: str) -> None:
        self._emit(
            EventRecord(
                name=name,
                message=message,
                epoch=self.epoch,
                step=self.global_step,
                seconds=self.elapsed_s,
            )
        )

    def _emit(self, record: StepRecord | EpochRecord | EventRecord) -> None:
        if self._writer is not None:
            self._writer.record(record)
        for sink in self.settings.sinks if self.world.is_main else ():
            sink.write(record)

    def _check_loss(self) -> None:
        bad = self.meter.flush() or self._bad
        self._fail_together(None if bad is None else self._bad_loss(bad))

    def _bad_loss(self, bad: BadLoss) -> NonFiniteLoss:
        error = broken.by_loss(self, bad)
        self.close()
        return error

    def _check_weights(self) -> None:
        error = broken.by_weights(self)
        if error is not None:
            self.close()
        self._fail_together(error)

    def _fail_together(self, error: NonFiniteLoss | None) -> None:
        if self.world.size > 1 and self.world.any(error is not None):
            # What came of the first one, in weights that all share, is no news.
            steps = self.world.gather(math.inf if error is None else error.step)
            if self.world.rank != steps.index(min(steps)):
                error = None
        try:
            self.world.heed(error)
        except worlds.ElsewhereError:
            self.close()
            raise
        if error is not None:
            raise error

    def _spent_by_now(self) -> Spent:
        if self._mark is None:
            return self.spent
        summary = self.timeline.summary(self._mark)
        before = self.last_summary
        # Epochs of few steps tell only together.
        together = before is not None and summary.steps < _TELLING_STEPS
        self.last_summary = before.plus(summary) if before is not None and together else summary
        self._mark = self.timeline.mark()
        return self.spent.plus(summary)

    def _release(self) -> None:
        _ = self.last_good  # it is asked for after the end, too
        if self._peeked is not None:
            close(self._peeked[2])
        self._in_session = False
        self._close_sources()
        if self._helper is not None:
            self._helper.close()
        self._peeked = self._writer = self._helper = None
        self._saving = False
        if self._rank_log is not None:
            self._rank_log.shut()
        for sink in self.settings.sinks if self.world.is_main else ():
            sink.close()
