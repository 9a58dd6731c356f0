"""What a run does beside its steps: it shows how far it is, saves when that is due, heeds signals,
and reads the loaders that it does not train on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from hasten.devices import runtime
from hasten.feed import Plan
from hasten.feed.foresight import ahead_of
from hasten.observe import timeline as phases
from hasten.observe.remedies import Remedy
from hasten.observe.timeline import StepSummary
from hasten.observe.verdict import Verdict, judge, render
from hasten.train.agreement import Agreement
from hasten.train.saving import Saver
from hasten.train.seed import rng_state, set_rng_state
from hasten.train.source import Source, close, count, let_go

_MOST_READ = 4  # DataLoaders whose plans and lasting workers are kept
_LOOK_EVERY_S = 0.1  # between looks at progress, time-based checkpoints and the like


class Lookout(Saver):
    """Looks up from the loop now and then."""

    def peek(self, loader: Iterable[Any]) -> Any:
        """The batch that :meth:`batches` will give first, on the device; None where it has none."""
        source, batches = self.loops.start(loader, self.epoch)
        first = next(batches, None)
        self._peeked = (source, first, batches)
        if first is not None:
            self.last_batch = first = source.onto_device(first)
        return first

    def judged(self, *, saturation: float | None = None, bounded: bool = False) -> Verdict | None:
        """What bounds the run, by its last epoch; None where no step was taken.

        Args:
            saturation: see :func:`hasten.observe.verdict.judge`.
            bounded: see there.
        """
        if self.last_summary is None:
            return None
        plan = None if self.loops.first is None else self.loops.first.plan
        return judge(
            self.last_summary,
            saturation=saturation,
            bounded=bounded,
            plan=self.feed,
            feed_workers=0 if plan is None else plan.workers,
            remedy=self._remedy(self.last_summary, plan),
            device=runtime.name(self.device),
            batch_size=self.largest_batch or None,
            precision=self.precision.name,
            precision_measured=self.settings.precision == "auto"
            or not runtime.fast_dtypes(self.device),
            command=(self.settings.resume_hint or "").startswith("hasten train "),
        )

    @staticmethod
    def _remedy(summary: StepSummary, plan: Plan | None) -> Remedy:
        """What its plan says, but to make ahead what would not be, by what was waited for."""
        if plan is None:
            return "as given"
        if plan.remedy != "take over" or plan.name != "inline":
            return plan.remedy
        waited_s = summary.phases["wait"].total_s
        return ahead_of(waited_s / max(1, summary.steps), waited_s) or plan.remedy

    def _say_verdict(self) -> None:
        """What bounds a loop of one's own. Its step is not known and cannot be taken again without
        a feed beside it, so that the saturation is bounded by what was waited for."""
        verdict = None if self._holding else self.judged(bounded=True)
        if verdict is not None and verdict.bound_by != "too short to tell":
            self.verdict = verdict
            self.say(render(verdict))

    def _batches_to_read(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader that is not trained on."""
        source = self._source_to_read(loader)
        self.strategy.settle(self.modules)
        # What reading draws is no part of training, unless a plain loop's numbers are wanted; a
        # stop in the middle must not leave it there.
        before = rng_state(self.device)
        batches = source.start(0)
        shown = bool(self.planned_epochs) and not self._in_body
        # Counts this loop's batches alone: all processes begin it together.
        agreement = Agreement(self.world, self.settings.clock) if self.world.size > 1 else None
        if shown:
            epoch = min(self.epoch + 1, self.planned_epochs)
            self.progress.epoch(epoch, self.planned_epochs, source.batches, label="Validate")
        try:
            for batch in batches:
                if self._is_to_stop(agreement):
                    set_rng_state(before, self.device)
                    self._stop()
                self._watchdog.beats += 1
                self.last_batch = batch = source.onto_device(batch)
                self.counted, self.counted_of_all = source.share(batch)
                source.batches_done += 1
                if self.counted or self.strategy.in_step:
                    yield batch
                if shown:
                    self.progress.advance(1, count(batch))
        finally:
            if shown:
                self.progress.epoch_done()
            self._tell_left_out(source)
            close(batches)
            if not self._in_session:
                source.close()
            if self.settings.seed is not None or self.world.size > 1:
                set_rng_state(before, self.device)

    def _tell_left_out(self, source: Source) -> None:
        """Of a loop that is over: once, while that stays the same from loop to loop."""
        said = source.left_out
        if said and said != self._left_out.get(source.loader):
            self._left_out[source.loader] = said
            self.say(said)

    def _is_to_stop(self, agreement: Agreement | None) -> bool:
        """Whether a signal ends a loop that only reads, before its next batch."""
        if not self._between_steps:
            return False
        if agreement is not None and agreement.due():
            agreed = agreement.reach(signal=self._signals.received or 0)
            if agreed.signal:  # not by assignment alone: one may come between
                self._signals.received = agreed.signal
            return bool(agreed.signal)
        return agreement is None and self._signals.received is not None

    def _source_to_read(self, loader: Iterable[Any]) -> Source:
        """The same for the same DataLoader, so that its plan and lasting workers serve again."""
        self._read = let_go(self._read)
        for source in self._read:
            if source.loader is loader:
                return source
        source = Source(loader, self.device, self.world)
        if isinstance(loader, DataLoader):
            self._read.append(source)
        if len(self._read) > _MOST_READ:
            self._read.pop(0).close()
        return source

    def _look(self, source: Source, samples: int) -> None:
        """What is not needed at every step: progress, a checkpoint that is due, a signal."""
        now = self.settings.clock()
        self._show(source, samples, now)
        if self._owed:
            return  # gradients are half accumulated: not a place to stop at
        if self._signals.received is not None:
            self._stop()
        if not self._can_begin_saving and self._every.steps is None:
            return
        self._tell_failed_save(wait=False)
        steps, seconds = self.global_step - self._saved_step, now - self._saved_s
        if self._every.due(steps=steps, seconds=seconds):
            self.save(wait=False)

    def _look_together(self, source: Source, samples: int) -> None:
        """The same where other processes have to do it at the same step."""
        now = self.settings.clock()
        if now >= self._next_look_s:
            self._show(source, samples, now)
        if self._agreement.due():
            seconds = now - self._saved_s
            agreed = self._agreement.reach(
                signal=self._signals.received or 0,
                save=self._can_begin_saving and self._every.due(steps=0, seconds=seconds),
                bad=self._bad is not None,
            )
            if agreed.bad:
                self._check_loss()
        if self._owed:
            return
        agreed = self._agreement.take()
        if agreed.signal:
            self._signals.received = agreed.signal
            self._stop()
        if agreed.save or self.global_step >= self._save_at_step:
            self.save(wait=False)

    @property
    def _can_begin_saving(self) -> bool:
        """Minutes may become a few more, where a checkpoint is still being written: training does
        not wait for the disk."""
        return self._writer is not None and not self._writer.busy

    def _show(self, source: Source, samples: int, now: float) -> None:
        self._next_look_s = now + _LOOK_EVERY_S
        totals = self.timeline.totals()
        batches, waited, spent = self._looked
        self._looked = (source.batches_done, totals[phases.WAIT], sum(totals))
        done = source.batches_done - batches
        share = (totals[phases.WAIT] - waited) / max(sum(totals) - spent, 1e-9)
        loss = None if math.isnan(self.meter.own_mean) else self.meter.own_mean
        self.progress.advance(done, done * samples, loss, share)
