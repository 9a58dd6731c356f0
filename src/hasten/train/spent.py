"""What an epoch has taken so far: survives a resume in its middle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.observe.timeline import StepSummary


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds and samples of the training part of an epoch."""

    seconds: float = 0.0
    samples: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase."""

    def plus(self, summary: StepSummary) -> Spent:
        """With a further stretch of steps."""
        phases = dict(self.phases)
        for name, seconds in summary.seconds_by_phase.items():
            phases[name] = phases.get(name, 0.0) + seconds
        return Spent(
            seconds=self.seconds + summary.seconds,
            samples=self.samples + summary.samples,
            phases=phases,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"seconds": self.seconds, "samples": self.samples, "phases": dict(self.phases)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Spent:
        """What :meth:`to_json` gave."""
        return Spent(
            seconds=float(content["seconds"]),
            samples=int(content["samples"]),
            phases={str(k): float(v) for k, v in content["phases"].items()},
        )
