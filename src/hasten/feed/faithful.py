"""Which plans keep the results of a DataLoader that was taken over, and which of them is best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed.asgiven import AsGiven, Gathering
from hasten.feed.choose import Planner
from hasten.feed.foresight import tried
from hasten.feed.harmless import DRAW, doubt
from hasten.feed.options import Options
from hasten.feed.originals import plan_of
from hasten.feed.placing import to_place
from hasten.feed.plan import Plan
from hasten.feed.recognise import recognise, unread
from hasten.feed.tables import Table
from hasten.feed.taken import TakenOrder, left_as_it_is
from hasten.observe.remedies import Remedy

_WHEN_ASKED = "a batch is made when the loop asks for it, to keep the results"
_TRACELESS = (
    "what is written to NumPy's memory, or to what was made under torch.inference_mode(), leaves "
    "no trace"
)
_UNSEEN = "its workers would not see what the loop writes to the data set's whole tensors"
_IN_PLACE = "Loader.from_dataloader in its place"


class Faithful:
    """Chooses a plan for a DataLoader.

    Attributes:
        left: why it is iterated as it is; '' where it need not be.
        table: the whole tensors behind its data set, once a plan was chosen that indexes them.
        ahead: whether what its data set holds may be looked at before the loop asks for it.
    """

    def __init__(
        self, loader: Any, options: Options, maker: AsGiven, order: TakenOrder, *, ahead: bool
    ) -> None:
        self._loader = loader
        self._options = options
        self._maker = maker
        self._order = order
        self.ahead = ahead
        self.left = left_as_it_is(loader)
        self.table: Table | None = None
        self._check()

    def _check(self) -> None:
        asked = self._options.plan
        if self.ahead or asked not in ("processes", "resident"):
            return
        if asked == "resident" or not self._loader.num_workers:
            raise UsageError(
                f"plan={asked!r} with ahead=False: it takes what the data set holds before the "
                "loop asks for it; leave one of the two out"
            )

    @property
    def maker(self) -> AsGiven:
        """Makes the batches of worker processes."""
        return self._maker if self.table is None else Gathering(self._maker, self.table)

    def plan(self, device: torch.device | None) -> Plan:
        """The plan for batches on this device (None: they stay on the host).

        Raises:
            UsageError: one was asked for that cannot keep the results.
        """
        plan = self._of_host(device)
        if self.table is None and self._options.plan == "auto" and not self.left:
            plan = replace(plan, remedy="source") if unread(self._options) else plan
        plan = to_place(plan, self._options, device)
        if not plan.ahead_batches:
            return plan
        most = self._most_ahead(plan)
        return replace(plan, ahead_batches=most, blocked=plan.blocked if most else _WHEN_ASKED)

    def _most_ahead(self, plan: Plan) -> int:
        """How many batches' copies may be queued, the one asked for among them."""
        drawn = self._order.ahead
        if drawn and not self.left:
            return min(2, drawn)
        traceless = plan.name == "gather" and self.table is not None and self.table.traceless
        if self.ahead and plan.name in ("processes", "gather") and not traceless:
            return 2
        # From memory that is no one else's: a copy under way sees nothing that is written later.
        return 1 if plan.pinned else 0

    def without(self, plan: Plan, trouble: str) -> Plan:
        """The plan for the rest, after this one turned out not to suit: as DataLoader does it."""
        beside = min(1, plan.ahead_batches) if plan.pinned else 0
        copied = plan.copied or plan.name == "resident"
        return replace(
            plan,
            name="inline",
            reason=trouble,
            remedy="own loader",
            workers=0,
            prefetch_batches=0,
            ahead_batches=beside,
            copied=copied,
            blocked=plan.blocked or ("" if beside else _WHEN_ASKED),
        )

    def _of_host(self, device: torch.device | None) -> Plan:
        loader, asked = self._loader, self._options.plan
        if self.left:
            if asked not in ("auto", "inline"):
                raise UsageError(f"plan={asked!r} cannot keep its results: {self.left}")
            remedy: Remedy = "stream" if self._options.iterable else "as given"
            return Plan(
                name="inline", reason=f"the DataLoader as it is: {self.left}", remedy=remedy
            )
        if self._options.iterable:
            if asked not in ("auto", "processes"):
                raise UsageError(f"plan={asked!r} is not for a stream that worker processes share")
            return self._of_workers()
        if asked in ("auto", "gather", "resident"):
            found = self._of_table(device)
            if found is not None:
                return replace(found, pinned=False, ahead_batches=0, blocked="")
        if asked == "inline":
            return Plan(name="inline", reason="asked for", remedy="own loader")
        if loader.num_workers:
            return self._of_workers()
        if asked == "processes":
            count = max(1, runtime.cores() - 1)
            return Plan(name="processes", reason="asked for", workers=count,
                        prefetch_batches=2 * count, remedy="own loader")  # fmt: skip
        if not self.ahead:
            why = "as the DataLoader makes them"
            unharmless = doubt(loader.dataset, loader.collate_fn)
            if unharmless.startswith(DRAW):
                return Plan(name="inline", reason=f"{why}; {unharmless}", remedy="own loader")
            why = f"{why}; {_IN_PLACE} may make them ahead of the loop"
            return Plan(name="inline", reason=why, remedy="take over")
        return tried(self._maker, self._options, self._order)

    def _of_workers(self) -> Plan:
        """As many processes as the DataLoader has."""
        loader, workers = self._loader, self._loader.num_workers
        named, more = f"num_workers={workers} of the DataLoader", workers < runtime.cores()
        if self._options.iterable:
            why = f"{named}, each of which reads the stream by a copy of its own"
            return plan_of(loader, why, "stream" if more else "cheaper")
        unharmless = doubt(loader.dataset, loader.collate_fn)
        why = f"kept, as {unharmless}"
        if unharmless.startswith(DRAW):
            why = f"{why}, and what they draw depends on their worker"
        if loader.worker_init_fn is not None:
            why = "kept, as its worker_init_fn may set up the data set in each"
        elif not unharmless:
            why = (
                "kept, though samples are seen to draw nothing: a hasten.Loader of the data set "
                "chooses by what they cost"
            )
        return plan_of(loader, f"{named}, {why}", "workers" if more else "cores")

    def _of_table(self, device: torch.device | None) -> Plan | None:
        loader, options = self._loader, self._options
        workers, asked = loader.num_workers, options.plan
        told = loader.worker_init_fn is not None and workers > 0
        if self.table is None and loader.batch_sampler is not None and not told:
            self.table = recognise(loader.dataset, loader.collate_fn)
        if asked != "auto" and told:
            raise UsageError(
                f"plan={asked!r}: worker_init_fn may set up the data set in each worker, so "
                "only worker processes keep the results"
            )
        if self.table is None and asked == "auto":
            return None
        traceless = self.table is not None and self.table.traceless
        if asked != "auto" or (self.ahead and not traceless):
            return Planner(options, self._maker, self.table).plan(device)
        if workers:
            # Its workers have copies of the tensors, which do not see what the loop writes to them.
            why = f"num_workers={workers} of the DataLoader, kept, as {_UNSEEN}"
            if not _forks(loader):
                self.table = None
            if traceless:
                why = f"{why}, and {_TRACELESS}; quicker without them: num_workers=0"
                return plan_of(loader, why, "num_workers=0")
            why = f"{why}; quicker without them: num_workers=0, or {_IN_PLACE}"
            return plan_of(loader, why, "no workers")
        gather = Planner(replace(options, plan="gather"), self._maker, self.table).plan(device)
        if device is None or runtime.is_host(device):
            return gather
        if traceless:
            return replace(gather, reason=f"{gather.reason}; not ahead, as {_TRACELESS}")
        more = f"{_IN_PLACE} may copy ahead of the loop, or keep them on {device}"
        return replace(gather, reason=f"{gather.reason}; {more}", remedy="take over")


def _forks(loader: Any) -> bool:
    """Whether its workers begin with the loop's tensors, without a copy of their own being sent."""
    context = loader.multiprocessing_context or torch.multiprocessing
    method = context.get_start_method(allow_none=True)
    return (method or torch.multiprocessing.get_all_start_methods()[0]) == "fork"
