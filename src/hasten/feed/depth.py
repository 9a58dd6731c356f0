"""How many batches threads may have made ahead of the loop: within a plan's number and bytes."""

from __future__ import annotations

from typing import Any

from hasten.devices.holding import held
from hasten.feed.plan import Plan


class Depth:
    """By the largest batch that was seen; one for each thread while nothing is known of any."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._batch_bytes = plan.batch_bytes

    def saw(self, batch: Any) -> None:
        """A batch that was made."""
        self._batch_bytes = max(self._batch_bytes, held(batch).bytes, 1)

    @property
    def batches(self) -> int:
        """Ahead of the one that the loop asks for."""
        plan = self._plan
        most = plan.prefetch_bytes // self._batch_bytes if self._batch_bytes else plan.workers
        return max(1, min(plan.prefetch_batches, most))
