"""The plan: how samples become batches, as data that can be printed, compared and overridden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hasten.errors import UsageError
from hasten.observe.remedies import Remedy

PlanName = Literal["resident", "gather", "threads", "processes", "inline"]
NAMES: tuple[str, ...] = get_args(PlanName)

StageName = Literal["index", "make", "collate", "pin", "copy", "transform"]
By = Literal["loop", "thread", "process", "device"]

_MEANING = {
    "resident": "the whole data set lies on the device; a batch is an indexed copy there",
    "gather": "the data set is tensors in host memory; a batch is one indexed copy of each",
    "threads": "threads make samples, whose work releases the interpreter lock",
    "processes": "worker processes make batches and pass them in shared memory",
    "inline": "batches are made sample by sample when the loop asks for them",
}
_DOING = {
    "index": "the rows of a batch, by one indexed copy of each tensor",
    "make": "samples, one by one",
    "collate": "samples into a batch",
    "pin": "into page-locked memory",
    "copy": "to the device",
    "transform": "the batch, by device_transform",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step on a batch's way to the loop.

    Attributes:
        name: index, make, collate, pin, copy or transform.
        by: who does it: the loop's thread, other threads, processes, or the device.
        workers: how many threads or processes; 0 for the loop's thread and the device.
        ahead_batches: batches that may be past this stage, or in it, before the loop asks.
    """

    name: StageName
    by: By
    workers: int = 0
    ahead_batches: int = 0

    def __str__(self) -> str:
        who = {"loop": "the loop's thread", "device": "the device"}.get(self.by)
        who = who or _counted(self.workers, self.by)
        ahead = f", up to {self.ahead_batches} batches ahead" if self.ahead_batches else ""
        return f"{self.name:<9} {_DOING[self.name]}: {who}{ahead}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a Loader makes its batches. ``str(plan)`` is one line for a person.

    Attributes:
        name: resident, gather, threads, processes or inline.
        reason: why this one, in a few words.
        remedy: what would be quicker where the loop waits for its batches, for the verdict.
        workers: threads or processes that make samples; 0 where the loop's own thread does.
        prefetch_batches: finished or being made ahead of the loop, all workers together.
        prefetch_bytes: bound on the bytes of those; 0 where somebody asked for a number of batches.
        batch_bytes: of a batch, where that was measured; else 0, until the first one came.
        head_batches: made by the loop's own thread while worker processes start on what follows;
            one in later epochs, if they are `kept`.
        niceness: what worker processes add to theirs: the training step comes first where both
            want the same cores.
        kept: worker processes live on from epoch to epoch, while the data set stays the same.
        pinned: batches are put into page-locked host memory on their way to the device.
        copied: they go to a device that does not compute in host memory.
        ahead_batches: whose copies to the device are queued, the one that the loop asks for among
            them: with 1 it is made and queued then, and the host does not wait. 0: it waits.
        ahead_bytes: bound on the bytes of those.
        blocked: why copies to the device cannot run beside its computation; "" if they can.
        transformed: a device_transform is run on each batch.
        step_s: the loop's own work between two batches in seconds, once it has been seen.
    """

    name: PlanName
    reason: str
    remedy: Remedy = "cheaper"
    workers: int = 0
    prefetch_batches: int = 0
    prefetch_bytes: int = 1 << 30
    batch_bytes: int = 0
    head_batches: int = 0
    niceness: int = 0
    kept: bool = False
    pinned: bool = False
    copied: bool = False
    ahead_batches: int = 0
    ahead_bytes: int = 1 << 30
    blocked: str = ""
    transformed: bool = False
    step_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"no plan {self.name!r}; there are {', '.join(NAMES)}")
        for field in ("workers", "prefetch_batches", "head_batches", "ahead_batches"):
            if getattr(self, field) < 0:
                raise UsageError(f"{field} of a plan cannot be {getattr(self, field)}")
        has_workers = self.name in ("threads", "processes")
        if has_workers != (self.workers > 0):
            raise UsageError(
                f"plan {self.name} with {self.workers} workers: "
                + ("it needs at least one" if has_workers else "it has none")
            )
        if has_workers and not self.prefetch_batches:
            raise UsageError(f"plan {self.name} needs prefetch_batches of at least 1")

    @property
    def pins_beside(self) -> bool:
        """A thread of its own pins batches and queues their copies: those of processes come in
        ordinary memory, where threads and indexed copies write into pinned memory at once."""
        return self.pinned and self.ahead_batches > 0 and self.name == "processes"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What a batch goes through, in order; what is run is exactly this."""
        found: list[Stage]
        if self.name == "resident":
            found = [Stage(name="index", by="device")]
        elif self.name == "gather":
            found = [Stage(name="index", by="loop")]
        elif self.name == "inline":
            found = [Stage(name="make", by="loop"), Stage(name="collate", by="loop")]
        else:
            by: By = "thread" if self.name == "threads" else "process"
            workers, ahead = self.workers, self.prefetch_batches
            found = [
                Stage(name="make", by=by, workers=workers, ahead_batches=ahead),
                Stage(name="collate", by=by, workers=workers, ahead_batches=ahead),
            ]
        if self.pins_beside:
            found.append(
                Stage(name="pin", by="thread", workers=1, ahead_batches=self.ahead_batches)
            )
        elif self.pinned and self.name != "resident":
            found.append(Stage(name="pin", by="loop"))
        if self.copied and self.name != "resident":
            by = "device" if self.ahead_batches else "loop"
            before = self.ahead_batches if self.ahead_batches > 1 else 0
            found.append(Stage(name="copy", by=by, ahead_batches=before))
        if self.transformed:
            found.append(Stage(name="transform", by="device"))
        return tuple(found)

    def __str__(self) -> str:
        count = ""
        if self.workers:
            count = ", " + _counted(self.workers, "thread" if self.name == "threads" else "process")
        elif self.name == "gather":
            count = ", 1 thread"
        step = "" if self.step_s is None else f"; step {duration(self.step_s)}"
        return f"{self.name}{count} - {self.reason}{step}"

    def explain(self, timeout_s: float = 0) -> str:
        """A paragraph: what the plan does, why, its figures, and the stages.

        Args:
            timeout_s: longest wait for a batch that was asked for; 0 for none.
        """
        lines = [str(self), f"  {_MEANING[self.name]}"]
        if self.remedy == "source":
            lines.append(
                "  it could not be seen whether the data set is whole tensors, as the source of "
                "its class cannot be read: move the class to a file"
            )
        if self.workers:
            most = f", or {self.prefetch_bytes >> 20} MiB," if self.prefetch_bytes else ""
            lines.append(
                f"  up to {self.prefetch_batches} batches{most} are made ahead of the loop"
            )
        if self.head_batches:
            lines.append(
                f"  the loop's thread makes the first {self.head_batches} itself, while the "
                "workers start on what follows"
                + (", and one where they are there already" if self.kept else "")
            )
        if self.niceness:
            lines.append(
                f"  the workers run at niceness +{self.niceness}: they take the cores that the "
                "training step leaves"
            )
        if self.kept:
            lines.append(
                "  they live on from epoch to epoch, as long as the data set, pickled, and the "
                "variables that its code names stay the same; close() ends them"
            )
        if self.ahead_batches == 1:
            lines.append(
                "  a batch is copied to the device when the loop asks for it, on a queue of its own"
            )
        elif self.ahead_batches:
            memory = "page-locked" if self.pinned else "ordinary"
            lines.append(
                f"  up to {self.ahead_batches} batches, or {self.ahead_bytes >> 20} MiB, are "
                f"copied to the device ahead of the loop, from {memory} memory"
            )
        if timeout_s and self.workers:
            lines.append(
                f"  a batch that is waited for longer than timeout={timeout_s:g} s is an error"
            )
        elif timeout_s:
            lines.append(
                f"  timeout={timeout_s:g} limits nothing: the loop's own thread makes the batches, "
                "and nobody can stop it"
            )
        if self.blocked:
            what = "copies do not run beside the computation: " if self.copied else ""
            lines.append(f"  {what}{self.blocked}")
        lines += [f"  {number}. {stage}" for number, stage in enumerate(self.stages, 1)]
        return "\n".join(lines)


def duration(seconds: float) -> str:
    """``0.4 µs``, ``12 ms``, ``1.3 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.2g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    micros = seconds * 1e6
    return f"{micros:.2g} µs" if micros < 100 else f"{micros:.0f} µs"


def _counted(count: int, kind: str) -> str:
    plural = "" if count == 1 else "es" if kind == "process" else "s"
    return f"{count} {kind}{plural}"
