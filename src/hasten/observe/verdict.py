"""The verdict: from a run's timings, the one thing that bounds it and the change to make.

A record in, a record out; :func:`render` is the only place with layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from hasten.observe.remedies import ADVICE, COMMANDS, Remedy
from hasten.observe.timeline import StepSummary

BoundBy = Literal[
    "waiting for data",
    "copying",
    "compute",
    "the host (launching work)",
    "logging/other",
    "too short to tell",
]

# Below this share a cost that could go is not what bounds the run: the rest of the step is.
_MATTERS = 0.10
_FEWEST_STEPS = 3
# So many times slower in the training than after it, computing was slowed down by something else.
_UNLIKELY = 2.0
# A step this short is mostly the interpreter and the kernels' launches, whatever the device.
_TINY_STEP_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What bounds a run."""

    bound_by: BoundBy
    share: float
    """Share of the run's time that it takes, 0 to 1."""
    evidence: tuple[str, ...]
    """Figures, each a phrase that stands alone."""
    advice: str
    """One change."""
    expected_gain: float
    """How many times faster the run can become at most: by Amdahl's law, if a cost that could go
    goes, or if work that must be done (compute, launching) takes half its time."""

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dumps``."""
        return {
            "bound_by": self.bound_by,
            "share": self.share,
            "evidence": list(self.evidence),
            "advice": self.advice,
            "expected_gain": self.expected_gain,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The verdict that :meth:`to_json` wrote.

        Raises:
            ValueError: ``bound_by`` is none of the known bounds, or a field is missing.
        """
        if data.get("bound_by") not in get_args(BoundBy):
            raise ValueError(f"a verdict cannot be bound by {data.get('bound_by')!r}")
        try:
            return cls(
                bound_by=data["bound_by"],
                share=data["share"],
                evidence=tuple(data["evidence"]),
                advice=data["advice"],
                expected_gain=data["expected_gain"],
            )
        except KeyError as error:
            raise ValueError(f"a verdict lacks the field {error}") from error


def judge(
    summary: StepSummary,
    *,
    saturation: float | None = None,
    bounded: bool = False,
    plan: str | None = None,
    feed_workers: int = 0,
    remedy: Remedy = "as given",
    device: str | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    precision_measured: bool = False,
    command: bool = False,
) -> Verdict:
    """Name what bounds the steps of a summary.

    Args:
        summary: of a stretch without warm-up, such as the last epoch.
        saturation: throughput over that of the same step on a batch already on the device; where
            it is unlikely (:func:`why_unlikely`), the evidence has the reason in its place.
        bounded: whether it was not measured: then it is said to be no more than what waiting and
            copying leave, for the step alone may be faster than beside a feed.
        plan: the feed's one line, ``threads, 4 threads - ...``.
        feed_workers: threads or processes that make batches beside the loop.
        remedy: what the feed would be quicker by, as its plan says.
        device: its name for people.
        batch_size: samples a step.
        precision: as the run uses it, such as ``float32``.
        precision_measured: whether it was found by measuring (``auto``), or the device has no
            quicker one, so that asking for ``auto`` is no advice.
        command: whether it is a run of ``hasten train``, whose options are named then; else those
            of a script are: the arguments of ``Run`` and ``Trainer``.
    """
    spent = summary.seconds_by_phase
    whole = sum(spent.values())
    if summary.steps < _FEWEST_STEPS or whole <= 0:
        return _too_short(summary)
    share = {name: seconds / whole for name, seconds in spent.items()}
    saturated = "" if saturation is None else f"saturation {saturation:.0%}"
    if saturation is not None and (doubt := why_unlikely(summary, saturation, feed_workers)):
        saturated = f"saturation: not to be told, for {doubt}"
    if bounded:
        lost = share["wait"] + share["copy"]
        saturated = f"saturation at most {1 - lost:.0%}: {lost:.0%} of a step was waiting, copying"
    removable: dict[BoundBy, float] = {
        "waiting for data": share["wait"],
        "copying": share["copy"],
        "logging/other": share["other"],
    }
    compute = share["forward"] + share["backward"] + share["optimizer"]
    bound_by: BoundBy = max(removable, key=removable.__getitem__)
    if removable[bound_by] >= _MATTERS:
        cost = removable[bound_by]
        gain = 1 / max(1 - cost, 0.01)
    else:
        bound_by, cost = "compute", compute
        if _host_sets_pace(summary):
            bound_by, cost = "the host (launching work)", _launching_share(summary)
        gain = 1 / (1 - cost / 2)
    return Verdict(
        bound_by=bound_by,
        share=cost,
        evidence=_evidence(summary, share, saturated, plan, device),
        advice=_advice(
            bound_by,
            summary,
            remedy,
            batch_size,
            None if precision_measured else precision,
            command=command,
        ),
        expected_gain=gain,
    )


def why_unlikely(summary: StepSummary, saturation: float, feed_workers: int = 0) -> str:
    """Why a measured saturation says nothing of a run; empty where it is to be believed.

    On the host, what is measured after the training is far quicker than the same in the training
    where something slowed that down which the step itself does not: other programs on the cores,
    or the first steps. An accelerator is not shared so.

    Args:
        summary: of the run, at least one step.
        saturation: what was measured.
        feed_workers: see :func:`judge`.
    """
    phases = [summary.phases[name] for name in ("forward", "backward", "optimizer")]
    computing_s = sum(phase.total_s for phase in phases) / summary.steps
    alone_s = saturation * summary.step_s
    if summary.device is not None or computing_s <= _UNLIKELY * alone_s:
        return ""
    took = f"computing took {1000 * computing_s:,.2f} ms a step, and {1000 * alone_s:,.2f} ms alone"
    if sum(phase.median_s for phase in phases) <= _UNLIKELY * alone_s:
        return f"{took}: a few steps, as the first ones, took most of the time"
    who = "other programs, or the feed's workers," if feed_workers else "other programs"
    return f"{took} after the training: {who} had the cores"


def _too_short(summary: StepSummary) -> Verdict:
    return Verdict(
        bound_by="too short to tell",
        share=0.0,
        evidence=(f"{summary.steps} steps were timed",),
        advice=f"run at least {_FEWEST_STEPS} steps, better an epoch",
        expected_gain=1.0,
    )


def _launching_share(summary: StepSummary) -> float:
    launching = sum(summary.phases[name].total_s for name in ("forward", "backward", "optimizer"))
    return min(launching / summary.seconds, 1.0)


def _host_sets_pace(summary: StepSummary) -> bool:
    """Whether the device keeps catching up with a host that is busy launching."""
    behind = summary.device_behind
    return behind is not None and behind < 0.5 and _launching_share(summary) > 0.5


def _evidence(
    summary: StepSummary,
    share: Mapping[str, float],
    saturated: str,
    plan: str | None,
    device: str | None,
) -> tuple[str, ...]:
    seen_by = "on the device's clock" if summary.device is not None else "on the host's clock"
    split = ", ".join(f"{name} {part:.0%}" for name, part in share.items() if part >= 0.005)
    evidence = [f"a step takes {1000 * summary.step_s:,.2f} ms: {split} ({seen_by})"]
    if summary.device_behind is not None:
        evidence.append(
            f"at the end of {summary.device_behind:.0%} of {summary.device_steps} sampled steps "
            "the device still had work queued"
        )
    if saturated:
        evidence.append(saturated)
    if plan:
        evidence.append(f"feed: {plan}")
    if device:
        evidence.append(f"device: {device}")
    return tuple(evidence)


def _advice(
    bound_by: BoundBy,
    summary: StepSummary,
    remedy: Remedy,
    batch_size: int | None,
    precision: str | None,
    *,
    command: bool,
) -> str:
    compiled = f"torch.compile ({'--compile' if command else 'compile=True'})"
    larger = _larger(batch_size, command)
    match bound_by:
        case "waiting for data":
            return COMMANDS.get(remedy, ADVICE[remedy]) if command else ADVICE[remedy]
        case "copying":
            return (
                "copy less: send images as uint8 and normalise them on the device, or keep the "
                "data set there (plan 'resident')"
            )
        case "logging/other":
            return (
                "look at what the loop does between steps: read the loss (.item(), print, a log "
                "line) every 50 steps or less often"
            )
        case "the host (launching work)":
            return f"give each launch more work: {larger}, or {compiled}"
    if summary.step_s < _TINY_STEP_S:
        return f"the step is too small to fill the device: {larger}"
    if precision == "float32":
        automatic = "--precision auto" if command else 'precision="auto"'
        return f"make the step cheaper: {automatic}"
    return f"make the step cheaper: {compiled}, a smaller model or smaller images"


def _larger(batch_size: int | None, command: bool) -> str:
    if not batch_size:
        return "a larger batch size"
    return f"{'--batch-size' if command else 'batch size'} {2 * batch_size}"


def render(verdict: Verdict) -> str:
    """The verdict as lines of plain text."""
    if verdict.bound_by == "too short to tell":
        return f"Verdict: too short to tell ({verdict.evidence[0]}); {verdict.advice}."
    lines = [f"Verdict: bound by {verdict.bound_by}, {verdict.share:.0%} of the time."]
    lines += [f"  {line}" for line in verdict.evidence]
    lines.append(f"  To change: {verdict.advice} (at most {verdict.expected_gain:.2f}x).")
    return "\n".join(lines)
