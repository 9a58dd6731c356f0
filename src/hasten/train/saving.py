"""A run's saving: its folder opened, checkpoints written, resumed from and told of."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from hasten.devices import runtime
from hasten.errors import CheckpointError, Interrupted, UsageError
from hasten.observe.progress import epoch_line
from hasten.observe.records import EpochRecord
from hasten.train import checkpoint, pieces
from hasten.train import state as states
from hasten.train.folder import RunFolder
from hasten.train.keeping import Keeper
from hasten.train.parts import Helper, Parts
from hasten.train.seed import fork_generators


class Saver(Keeper):
    """Opens and closes a run, ends its epochs, and saves and resumes it."""

    @contextmanager
    def session(self, total: int) -> Iterator[None]:
        """Open the folder, resume, show progress and heed signals; :meth:`epochs` enters it."""
        again, self.planned_epochs = self.planned_epochs > 0, total
        self._open = ExitStack()
        with self._open as stack:
            if self.folder is not None:
                folder, settings = self.folder, self.settings
                stack.callback(self._free)
                self._writer = self._locked = self.world.by_main(
                    lambda: stack.enter_context(RunFolder(folder, settings, self.say, ours=again))
                )
                stack.callback(self._release)
                self._saving = True
                if self.strategy.in_parts:
                    self._apart = self._apart or self.world.apart()
                    if not self.world.is_main:
                        self._helper = Helper(folder / checkpoint.FOLDER)
                if self._rank_log is not None:
                    self._rank_log.open(folder)
                if not again:
                    self._resume()
                self.write_config()
            else:
                stack.callback(self._release)
            self.strategy.begin(self.modules)
            if self.resumed_from is None and not again and not self.world.is_main:
                fork_generators(self.world.rank, self.device)
            stack.enter_context(self.progress)
            stack.enter_context(self._signals)
            stack.enter_context(self._watchdog)
            self._saved_s = self.settings.clock()
            self._in_session = True
            yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the folder stays locked when the loop has ended: for what is written last."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self.close()
            self._free()

    def _free(self) -> None:
        if self._locked is not None and not self._holding:
            locked, self._locked = self._locked, None
            locked.free()

    def be_there(self) -> None:
        """Make the folder again if it was removed since the last save.

        Raises:
            CheckpointError: that cannot be done.
            UsageError: another run has taken the folder.
        """
        if self._locked is not None:
            self._locked.be_there()

    def write_config(self) -> None:
        """Write what is settled of the run into its folder's ``config.json``."""
        if self._writer is not None:
            self._writer.write_config(states.describe(self, self.planned_epochs))

    def end_epoch(self, total: int) -> None:
        """Record the epoch, print its line, save."""
        self._check_loss()
        self._check_weights()
        metrics = self._metrics = self.world.first(dict(self._metrics))
        metrics = dict(metrics)
        record = EpochRecord(
            epoch=self.epoch + 1,
            step=self.global_step,
            loss=self.meter.mean,
            val_loss=metrics.pop("val_loss", None),
            val_accuracy=metrics.pop("val_accuracy", None),
            seconds=self.spent.seconds,
            images_per_s=self.spent.samples / self.spent.seconds if self.spent.seconds else 0.0,
            phases=dict(self.spent.phases),
            learning_rate=self._learning_rate or 0.0,
            peak_memory_bytes=runtime.peak_bytes(self.device),
            metrics=metrics,
        )
        self.epoch += 1
        self.history.append(record)
        self._emit(record)
        self.say(epoch_line(record, total))
        self.loops.end_epoch()
        self._settle()  # whether the best so far is on the disk decides what the best is now
        best = self._note_best(record)
        every, ended = self._every.epochs or 1, self.epoch == total or self._impatient
        if best or self.epoch % every == 0 or ended:
            self._write_checkpoint(best=best, wait=ended)
        number = self.world.most([self._signals.received or 0])[0]
        if number and not ended:
            self._signals.received = number
            self._stop()

    @property
    def _impatient(self) -> bool:
        """Whether the best epoch is further back than patience goes. The history tells, which all
        processes have alike and each checkpoint holds."""
        patience = self.settings.patience
        return patience is not None and len(since_best(self.history)) >= patience

    def _say_why_ended(self, total: int) -> None:
        if self.epoch < total and self._impatient:
            best, worse = best_epoch(self.history), len(since_best(self.history))
            all_of_them = worse == self.epoch - best
            self.say(
                f"Ended after epoch {self.epoch} of {total}: none of the"
                f" {f'last {worse}' if all_of_them else f'{worse} validated since'} was"
                f" better than epoch {best} (patience {self.settings.patience})"
            )

    def save(self, *, wait: bool = True) -> Path | None:
        """Save a checkpoint now; between steps, or in a loop's body after its step.

        Args:
            wait: False copies what is to be saved and writes it in the background: whether that
                failed is said at a later step.

        Returns:
            Its folder; None for a run without one.

        Raises:
            NonFiniteLoss: the loss or a weight became NaN or infinite; nothing is saved.
            CheckpointError: it cannot be written; earlier ones are as they were.
            UsageError: a step is half done.
        """
        if not self._saving:
            return None
        if not self._between_steps:
            raise UsageError(
                "run.save() in the middle of a step: its gradients are no part of a checkpoint;"
                " call it where run.step(optimizer) gave True"
            )
        if self._stepped:
            self._count_step()
        self._check_loss()
        self._check_weights()
        self.spent = self._spent_by_now()
        return self._write_checkpoint(wait=wait)

    def _write_checkpoint(self, *, best: bool = False, wait: bool) -> Path | None:
        if not self._saving:
            return None
        self._settle()
        *content, tensors = states.gather(self)
        parts = None if self._apart is None else Parts(self._apart, tensors)
        if self._helper is not None and parts is not None:
            self._helper.save(parts, wait=wait)
        writer = self._writer
        path = self.world.first(
            self.world.by_main(
                lambda: (
                    writer.save(*content, best=best, wait=wait, in_parts=parts) if writer else None
                )
            )
        )
        self._saved_step, self._saved_s = self.global_step, self.settings.clock()
        self._save_at_step = self.global_step + (self._every.steps or math.inf)
        return path

    def _settle(self) -> None:
        """Wait for the checkpoint under way; all processes come here."""
        if not self._saving:
            return
        self.world.by_main(self._tell_failed_save)
        if self._helper is not None:
            self._helper.settle()
        if self.world.any(self._best_lost):
            self.best = self._best_before  # no checkpoint holds the other
        self._best_lost = False

    def _tell_failed_save(self, *, wait: bool = True) -> None:
        if self._writer is None:
            return
        if wait:
            self._writer.settle()
        failure = self._writer.take_failure()
        if failure is not None:
            error, self._best_lost = failure
            self.say(f"{error}. Training goes on, and the next checkpoint is tried when it is due")
            self._emit_event("checkpoint-failed", str(error))

    def _stop(self) -> NoReturn:
        number = self._signals.received or signal.SIGINT
        path = self.save()
        text = f"stopped by {signal.Signals(number).name} after step {self.global_step}"
        if path is None:
            text += "; nothing was saved, for the run has no folder"
        else:
            text += f"; saved {path}\n{self.how_to_resume}"
        self.close()
        raise Interrupted(text, number, resumable=path is not None)

    @property
    def how_to_resume(self) -> str:
        """What to do to go on, in a line or two."""
        hint = self.settings.resume_hint or (
            f"the same script with folder={str(self.folder)!r}, resume=True"
        )
        job = os.environ.get("SLURM_JOB_ID")
        again = f"\nOr let SLURM run the job again: scontrol requeue {job}" if job else ""
        return f"Resume with: {hint}{again}"

    def _resume(self) -> None:
        writer, in_parts = self._writer, self.strategy.in_parts
        path = self._newest() if self.settings.resume else None
        if path is None:
            if self.settings.resume and writer is not None:
                writer.log.truncate_after(0, epochs=0, batches=0)
            return
        # To the host first: the device is given what is its own, tensor by tensor.
        saved = self.world.by_all(
            lambda: checkpoint.load(path, map_location="cpu", read_parts=not in_parts)
        )
        batches = self.loops.resume(self.world.by_all(lambda: states.apply(self, saved)))
        self._in_restored_epoch = batches > 0
        self.resumed_from = saved.path
        self._saved_step = self.global_step
        self._save_at_step = self.global_step + (self._every.steps or math.inf)
        if writer is not None:
            writer.last_saved = saved.path
            if self.best is not None and self.best[1] == self.global_step and not batches:
                writer.mark_best(saved.path)  # a kill may have come between saving and marking
            damaged = writer.log.truncate_after(
                self.global_step, epochs=self.epoch, batches=batches
            )
            if damaged:
                self.say(f"{writer.log.path} has {damaged} damaged lines: they are left out")
        where = f"epoch {self.epoch + 1}, step {self.global_step}"
        if self.epoch >= self.planned_epochs:
            where = f"all {self.epoch} epochs done, step {self.global_step}; to go on, ask for more"
        self.say(f"Resumed from {saved.path} ({where})")
        self._emit_event("resumed", str(saved.path))

    def _newest(self) -> Path | None:
        """The newest checkpoint that all processes find whole: each has checked what it will load.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        assert self.folder is not None
        rank, size = self.world.rank, self.world.size
        found, passed_over = checkpoint.newest(
            self.folder / checkpoint.FOLDER,
            self.world,
            reads=(lambda one: pieces.files_for(one, rank, size))
            if self.strategy.in_parts
            else None,
        )
        for path, why in passed_over:
            self.say(f"Passed over {path}: {why}")
        if found is None and passed_over:
            raise CheckpointError(f"{self.folder} holds no whole checkpoint to resume from")
        return found

    def _note_best(self, record: EpochRecord) -> bool:
        step = self.best[1] if self.best is not None else None
        before = [worth(one) for one in self.history[:-1] if one.step == step]
        if math.isnan(worth(record).value) or (before and not worth(record) > before[-1]):
            return False
        self.best, self._best_before = (worth(record).value, self.global_step), self.best
        return True


class Worth(NamedTuple):
    """How well an epoch did, larger is better. What tells more of it goes before."""

    kind: int
    """2 for an accuracy in validation, 1 for a loss there, 0 for the loss in training."""
    value: float
    """The accuracy, or a loss times -1."""


def worth(record: EpochRecord) -> Worth:
    """How well an epoch did: its accuracy in validation, or else the loss."""
    if record.val_accuracy is not None:
        return Worth(2, record.val_accuracy)
    if record.val_loss is not None:
        return Worth(1, -record.val_loss)
    return Worth(0, -record.loss)


def best_epoch(history: Sequence[EpochRecord]) -> int:
    """The first of the best epochs, counted from 1; 0 where none counts.

    An accuracy is compared with accuracies alone: an epoch without one, where others have it, is
    not in the comparison.
    """
    best, top = 0, Worth(-1, 0.0)
    for record in history:
        if not math.isnan(worth(record).value) and worth(record) > top:
            best, top = record.epoch, worth(record)
    return best


def since_best(history: Sequence[EpochRecord]) -> list[int]:
    """The epochs after the best one that were compared with it."""
    kind = max((worth(record).kind for record in history), default=0)
    best = best_epoch(history)
    return [r.epoch for r in history if r.epoch > best and worth(r).kind == kind]
