"""The workers of a DataLoader that was taken over, played in the loop's own thread."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from hasten.errors import DataError, UsageError
from hasten.feed import randomness
from hasten.feed.asgiven import AsGiven
from hasten.feed.describe import text_of
from hasten.feed.draws import Draws
from hasten.feed.inside import Mark, bulky, inside, told
from hasten.feed.iteration import Epoch
from hasten.feed.modes import one_thread
from hasten.feed.originals import Running, begun
from hasten.feed.samples import Made
from hasten.feed.sources import Report
from hasten.feed.work import Beginning


class Virtual:
    """A DataLoader's workers played in the loop's own thread, each with its generators.

    Each has a copy of the data set, as a process would have; large tensors and long lists are
    shared, as long as none of them changes them, which is watched.
    """

    def __init__(self, loader: Any, maker: AsGiven, report: Report) -> None:
        self._loader = loader
        self._maker = maker
        self._report = report
        self._lasting: list[_Player] = []
        self._left: list[tuple[int, Any]] = []

    def run(self, draws: Draws, epoch: Epoch, first: int) -> Running:
        """An epoch that begins now, at batch `first`."""
        players, self._lasting = self._lasting, []
        left, self._left = self._left, []
        if not players:
            players = self._started(epoch)
        running = Running(draws, epoch, first)
        running.items = begun(self._items(players, running, left, first))
        return running

    def _items(
        self, players: list[_Player], running: Running, left: list[tuple[int, Any]], first: int
    ) -> Generator[Any, None, None]:
        number, known = first, running.draws.known
        try:
            for before, indices in left:  # of an epoch that was left: they have made them too
                worker = before % len(players)
                states = players[worker].make(before, indices)[1]
                if states is not None:
                    running.epoch.after[worker] = states
            yield None
            while known:
                indices = known.popleft()
                worker = number % len(players)
                try:
                    made, states = players[worker].make(number, indices)
                except Exception:
                    running.failed(number)
                    raise
                running.after[number] = worker, states
                number += 1
                yield from running.finished(made, indices, self._report)
                del made
        finally:
            if self._loader.persistent_workers and not self._lasting:
                self._lasting = players
                self._left = list(enumerate(known, number))

    def _started(self, epoch: Epoch) -> list[_Player]:
        loader = self._loader
        bulk = bulky(loader.dataset, self._maker.collate_fn)
        shared = {id(item): item for item in bulk if told(item)}
        players = []
        for worker in range(loader.num_workers):
            try:
                maker = copy.deepcopy(self._maker, dict(shared))
            except Exception as error:
                raise UsageError(
                    f'plan="inline" plays {loader.num_workers} workers, each with its copy of the '
                    f"data set, and {type(loader.dataset).__name__} cannot be copied "
                    f'({text_of(error)}); leave the plan to hasten ("auto")'
                ) from error
            beginning = Beginning(
                maker.dataset, loader.num_workers, epoch.base, loader.worker_init_fn
            )
            states = epoch.after.get(worker)
            players.append(_Player(worker, maker, beginning, states, whole=self._maker))
        return players

    def close(self) -> None:
        """See `Source`."""
        self._lasting, self._left = [], []


class _Player:
    """One worker played in this process."""

    def __init__(
        self,
        worker: int,
        maker: AsGiven,
        beginning: Beginning,
        state: dict[str, Any] | None,
        *,
        whole: AsGiven,
    ) -> None:
        """`whole`: what `maker` is a copy of."""
        self._maker = maker
        self._whole = whole.dataset, whole.collate_fn
        self._beginning = beginning
        outside = randomness.save()
        info = torch_worker._worker_info
        try:
            beginning.start(worker)
            if state is not None:
                randomness.restore(randomness.unpacked(state))
            self._states = randomness.save()
        finally:
            randomness.restore(outside)
            torch_worker._worker_info = info
        self._bulk = [item for item in bulky(maker.dataset, maker.collate_fn) if told(item)]
        self._shared = inside(*self._bulk)

    def make(self, number: int, indices: Any) -> tuple[Made, dict[str, Any] | None]:
        """A batch, and the states of the generators if it drew from them."""
        if self._beginning.failure is not None:
            self._beginning.failure.throw()
        outside = randomness.save()
        info = torch_worker._worker_info
        # With classes and variables, which no copy has: a new process has them as they were.
        around = Mark(*self._whole)
        randomness.restore(self._states)
        torch_worker._worker_info = self._beginning.info  # type: ignore[assignment]
        try:
            with one_thread():
                made = self._maker.make(0, number, indices)
            moved = randomness.touched(self._states)
            if moved:
                self._states = randomness.save()
        finally:
            randomness.restore(outside)
            torch_worker._worker_info = info
        if inside(*self._bulk) != self._shared or (around.told and around.changed()):
            raise DataError(
                f"the data set {type(self._maker.dataset).__name__} changes what its workers share "
                'with plan="inline"; leave the plan to hasten ("auto")'
            )
        return made, randomness.packed(self._states) if moved else None
