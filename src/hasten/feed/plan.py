"""The plan: how samples become batches, as data that can be printed, compared and overridden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hasten.errors import UsageError

PlanName = Literal["resident", "gather", "threads", "processes", "inline"]
NAMES: tuple[str, ...] = get_args(PlanName)

_MEANING = {
    "resident": "the whole data set lies on the device; a batch is an indexed copy there",
    "gather": "the data set is tensors in host memory; a batch is one indexed copy of each",
    "threads": "a pool of threads makes samples, whose work releases the interpreter lock",
    "processes": "worker processes make batches and pass them in shared memory",
    "inline": "batches are made sample by sample when the loop asks for them",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a Loader makes its batches. ``str(plan)`` is one line for a person.

    Attributes:
        name: resident, gather, threads, processes or inline.
        reason: why this one, in a few words.
        workers: threads or processes that make samples; 0 where the loop's own thread does.
        prefetch_batches: finished or being made ahead of the loop, all workers together.
        prefetch_bytes: bound on the bytes of those, where the plan can keep to one.
        pinned: batches are put into page-locked host memory on their way to the device.
        ahead_batches: copied to the device ahead of the loop; 0 on the host.
    """

    name: PlanName
    reason: str
    workers: int = 0
    prefetch_batches: int = 0
    prefetch_bytes: int = 1 << 30
    pinned: bool = False
    ahead_batches: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"no plan {self.name!r}; there are {', '.join(NAMES)}")
        for field in ("workers", "prefetch_batches", "ahead_batches"):
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

    def __str__(self) -> str:
        count = ""
        if self.workers:
            kind = {"threads": "thread", "processes": "process"}[self.name]
            plural = "" if self.workers == 1 else "es" if kind == "process" else "s"
            count = f", {self.workers} {kind}{plural}"
        return f"{self.name}{count} - {self.reason}"

    def explain(self) -> str:
        """A paragraph: what the plan does, why, and its figures."""
        lines = [str(self), f"  {_MEANING[self.name]}"]
        if self.workers:
            lines.append(
                f"  up to {self.prefetch_batches} batches, or {self.prefetch_bytes >> 20} MiB, "
                "are made ahead of the loop"
            )
        if self.ahead_batches:
            memory = "page-locked" if self.pinned else "ordinary"
            lines.append(
                f"  up to {self.ahead_batches} batches are copied to the device ahead of the "
                f"loop, from {memory} memory"
            )
        return "\n".join(lines)
