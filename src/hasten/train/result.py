"""What a training run came to, and what it leaves in its folder."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import hasten
from hasten.devices import runtime
from hasten.errors import HastenError
from hasten.observe import log
from hasten.observe.records import EpochRecord, StepRecord
from hasten.observe.report import ReportData, write_report
from hasten.observe.verdict import Verdict, why_unlikely
from hasten.train import checkpoint, probe, weights
from hasten.train.evaluation import Evaluation
from hasten.train.precision import Precision, undisturbed
from hasten.train.seed import rng_kept

if TYPE_CHECKING:
    from hasten.train.run import Run
    from hasten.train.trainer import Trainer

WEIGHTS = "model.safetensors"
Page = Callable[[ReportData], ReportData]
"""Gives what the report shows from what the run knows: names of classes, say, are its to add."""

_STEPS_TO_TIME = 20
_FEWEST_TO_TIME = 5
_SHARE_TO_TIME = 0.05  # of the run's steps that may be taken again to measure the saturation


@dataclass(frozen=True, kw_only=True)
class Result:
    """What :meth:`hasten.Trainer.fit` gives."""

    history: tuple[EpochRecord, ...]
    """A record for each epoch of the run, those before a resume included."""
    saturation: float | None
    """Throughput over that of the same step with its batch on the device already, 0 to 1; None
    where too few steps were taken to tell, or the verdict says why it is not to be told."""
    verdict: Verdict | None
    """What bounds the run; None where no step was taken."""
    seconds: float
    """Of training, over all epochs, without validation."""
    device: torch.device
    precision: Precision
    feed: str
    """How samples became batches, and why."""
    folder: Path | None
    checkpoint: Path | None
    """The newest checkpoint; None for a run without a folder."""
    best_checkpoint: Path | None
    weights: Path | None
    """The final weights as safetensors."""
    report: Path | None
    resumed_from: Path | None
    evaluation: Evaluation | None
    """The last validation."""
    report_data: ReportData = field(repr=False)

    @property
    def val_accuracy(self) -> float | None:
        """Of the last epoch; None without validation or class labels."""
        return self.history[-1].val_accuracy if self.history else None


def finish(
    run: Run, trainer: Trainer, val: Iterable[Any] | None, page: Page | None = None
) -> Result:
    """Measure the saturation, judge, export the weights, write the report.

    The run's folder is still locked; what is said first tells a person what is being done.
    """
    _say_what_is_left(run)
    saturation = measure_saturation(run, trainer)
    verdict = run.judged(saturation=saturation)
    if saturation is not None and run.last_summary is not None:
        saturation = None if why_unlikely(run.last_summary, saturation) else saturation
    if trainer.last_evaluation is None and val is not None:
        trainer.evaluate(val)  # a run that was finished already when it was resumed
    data = report_data(run, trainer, saturation=saturation, verdict=verdict)
    report = exported = newest = best = None
    final = {}
    if run.folder is not None:
        if page is not None and (run.world.is_main or run.strategy.in_step):
            data = page(data)
        with run.watching():
            final = run.strategy.whole(weights.state_of(trainer.model))
    if run.folder is not None and run.world.is_main:
        exported = run.folder / WEIGHTS
        run.be_there()
        weights.export(final, exported, {"run": run.folder.name})
        report = write_report(run.folder, data)
        newest = run.last_good  # it was written or checked by this run: not read once more
        newest = newest if newest is not None and newest.exists() else None
        best = checkpoint.best(run.folder / checkpoint.FOLDER)
    return Result(
        history=tuple(run.history),
        saturation=saturation,
        verdict=verdict,
        seconds=sum(record.seconds for record in run.history),
        device=run.device,
        precision=run.precision,
        feed=run.feed,
        folder=run.folder,
        checkpoint=newest,
        best_checkpoint=best,
        weights=exported,
        report=report,
        resumed_from=run.resumed_from,
        evaluation=trainer.last_evaluation,
        report_data=data,
    )


def measure_saturation(run: Run, trainer: Trainer) -> float | None:
    """The run's throughput over that of the same step with its batch on the device already.

    Forward and backward are timed anew on the last full batch, with no feed beside them; the
    optimizer's time is the median of the run's own. Nothing is stepped: the model stays as it is.
    """
    summary, limit = run.last_summary, _steps_to_time(run)
    if summary is None or not limit:
        return None
    try:
        with rng_kept(run.device), undisturbed(*run.modules):
            # The first is not counted: the batch is out of the caches, compilers may look again.
            times = [
                probe.time_step(run, trainer, run.full_batch, run.precision)
                for _ in range(limit + 1)
            ][1:]
    except (RuntimeError, MemoryError) as error:
        # The others are in the same step, and would wait in it for this process.
        if run.world.size > 1 or not runtime.is_out_of_memory(error):
            raise
        return None  # the training is done: that there is no memory left to measure is no failure
    ready_s = statistics.median(times) + optimizer_s(run)
    return min(1.0, ready_s / summary.step_s)


def _steps_to_time(run: Run) -> int:
    """How many steps tell the saturation; 0 where too few were taken to compare them with."""
    if run.last_summary is None or run.last_summary.steps < 3 or run.full_batch is None:
        return 0
    return max(_FEWEST_TO_TIME, min(_STEPS_TO_TIME, int(_SHARE_TO_TIME * run.global_step)))


def _say_what_is_left(run: Run) -> None:
    steps = _steps_to_time(run)
    left = [f"{steps} steps are timed for the saturation"] if steps else []
    if run.folder is not None:
        left.append(f"{WEIGHTS} and report.html are written")
    if left:
        run.say(f"Finishing: {', '.join(left)}")


def optimizer_s(run: Run) -> float:
    """Median seconds of an optimizer step's share of a batch, in the last epoch."""
    summary = run.last_summary
    if summary is None:
        return 0.0
    if summary.device is not None:
        return summary.device["optimizer"]
    return summary.phases["optimizer"].median_s


def report_data(
    run: Run,
    trainer: Trainer,
    *,
    saturation: float | None = None,
    verdict: Verdict | None = None,
    stopped: str = "",
) -> ReportData:
    """What the report shows of a run; class names and sample images are the caller's to add."""
    evaluation = trainer.last_evaluation
    table = evaluation.confusion if evaluation else None
    seconds = sum(record.seconds for record in run.history)
    images = sum(record.seconds * record.images_per_s for record in run.history)
    config = run.settings.config
    steps = []
    if run.folder is not None:
        records = log.read(run.folder, run.say)
        steps = [record for record in records if isinstance(record, StepRecord)]
    return ReportData(
        run=run.folder.name if run.folder is not None else type(trainer.model).__name__,
        model=str(config.get("model", type(trainer.model).__name__)),
        dataset=str(config.get("data", "")),
        device=f"{run.device} ({runtime.name(run.device)})",
        epochs=run.history,
        steps=steps,
        planned_epochs=run.planned_epochs,
        seconds=seconds,
        images_per_s=images / seconds if seconds else math.nan,
        saturation=saturation,
        val_accuracy=evaluation.accuracy if evaluation else None,
        val_loss=evaluation.loss if evaluation else None,
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        classes=[str(i) for i in range(len(table))] if table else (),
        confusion=table,
        verdict=verdict,
        feed=run.feed,
        precision=str(run.precision),
        stopped=stopped,
        settings=config.get("settings", config),
        versions={
            "hasten": hasten.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        command=str(config.get("command", " ".join(sys.argv))),
        resume_command=run.settings.resume_hint or "",
        finished=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def write_stopped_report(run: Run, trainer: Trainer, error: HastenError) -> None:
    """The report of a run that ended early; the error goes on to the caller after it."""
    if run.folder is not None and run.began:
        stopped = str(error).splitlines()[0]
        run.be_there()
        write_report(run.folder, report_data(run, trainer, stopped=stopped))
