"""The loops of an epoch that train: whose batches each gives, how far each got, and going on there.

A checkpoint names a loop by its place: the first to begin within its epoch, the second, and so on.
So it does not matter whether the loader is made once or anew in each epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from hasten.errors import CheckpointError, DataError, UsageError
from hasten.train.seed import rng_state, set_rng_state
from hasten.train.source import Position, Source, brings, close, let_go, with_first
from hasten.train.world import World

_log = logging.getLogger("hasten.train")

# DataLoaders whose plans and lasting workers are kept: some loops make one anew for each epoch.
_MOST_OPEN = 8
_LEFT, _READ = "left", "read"  # how a loop ended: by a break, or with its loader


@dataclass(eq=False)
class _Loop:
    """One place of an epoch.

    Attributes:
        source: what was iterated; None of a loop that another process ran.
        kept: where that was, if it is somewhere else by now.
        same: whether the epochs before had the same loader here; None where there were none.
        ended: how, if it did.
        trusted: it was put back to where a loader of another process was, which may be another.
    """

    source: Source | None
    kept: Position | None
    same: bool | None
    ended: str = ""
    trusted: bool = False

    def position(self) -> Position:
        if self.kept is not None:
            return self.kept
        assert self.source is not None
        same = self.same if self.source.loader is not None else False  # it was made for the epoch
        own = {"same": same, "ended": self.ended, "made_with": self.source.made_with}
        return self.source.state() | own


class Loops:
    """Of a run: the loaders that it trained on, and the loops over them.

    Attributes:
        sources: the loaders that there still are, the one used last at the end.
    """

    def __init__(self, device: torch.device, world: World, hint: Callable[[], str]) -> None:
        """`hint`: what to do where an epoch cannot be gone on with."""
        self.sources: list[Source] = []
        self._device, self._world, self._hint = device, world, hint
        self._begun: list[_Loop] = []  # in this epoch
        self._before: list[_Loop] = []  # at each place, the one of the last epoch that had it
        self._rng: dict[str, Any] | None = None
        self._within = 0  # loops of this epoch that another process has begun

    @property
    def first(self) -> Source | None:
        """The first loader of an epoch; None before there was one."""
        loop = next(iter(self._begun or self._before), None)
        return None if loop is None else loop.source

    def start(self, loader: Iterable[Any], epoch: int) -> tuple[Source, Iterator[Any]]:
        """Begin a loop, or go on with the one that a resumed run had here.

        Raises:
            CheckpointError: that one was over another loader.
            DataError, UsageError: it cannot be gone on with.
        """
        place = len(self._begun)
        before = self._before[place] if place < len(self._before) else None
        source, known = self._source_of(loader)
        self._settle(source)  # of one that is still under way, before its loader begins anew
        same = None if before is None else before.same
        if known:
            same = True
        elif before is not None and before.source is not None:
            same = False
            if before.trusted:
                _log.warning(
                    "the run makes a %s anew in each epoch, and the first one after the resume was"
                    " given the state of one of an epoch before: the order of that epoch may have"
                    " been another than that of a run that was never stopped",
                    type(loader).__name__,
                )
        loop = _Loop(source, None, same)
        self._begun.append(loop)
        position = before.kept if before is not None and before.source is None else None
        if position is None:
            return source, source.start(epoch)
        if position.get("lost") and (epoch or not position["batches"]):  # the first is read again
            _log.warning(
                "the run goes on with a %s, and not all is as it was: %s",
                type(loader).__name__,
                position["lost"],
            )
        if position["batches"]:
            return source, self._go_on(source, position, epoch, last=place + 1 == self._within)
        if not known and same is None and _made_otherwise(source, position):
            _log.warning(
                "the generator of the %s is seeded otherwise than the first epoch's was, and is"
                " left as it is: the run is taken to make a loader anew in each epoch, seeded"
                " anew. Where it is one for all, its order is another now",
                type(loader).__name__,
            )
        elif not known and same is not False:
            loop.trusted = same is None and brings(position)
            source.restore(position)
        return source, source.start(epoch)

    def _go_on(
        self, source: Source, position: Position, epoch: int, *, last: bool
    ) -> Iterator[Any]:
        try:
            source.restore(position)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self._hint()}") from error
        try:
            batches = source.start(epoch)
            if last and self._rng is not None:
                # What was drawn before the loop, in this process too, was drawn before the stop.
                set_rng_state(self._rng, self._device)
        except (UsageError, DataError) as error:
            source.check_length(position)
            raise type(error)(f"{error}. {self._hint()}") from error
        if position.get("ended") == _LEFT:
            close(batches)
            return iter(())
        try:
            first = list(islice(batches, 1))
            source.check_length(position)
        except UsageError as error:
            close(batches)
            source.check_length(position)
            raise type(error)(f"{error}. {self._hint()}") from error
        return with_first(first, batches)

    def ended(self, source: Source, *, left: bool) -> None:
        """The loop over a loader came to its end, or was left before."""
        # Now, as its loader may be gone when it is saved.
        self._settle(source, _LEFT if left else _READ)
        _ = source.plan  # as well

    def _settle(self, source: Source, ended: str = "") -> None:
        """Keep where the loop over a loader is."""
        for loop in self._begun:
            if loop.source is source and loop.kept is None:
                loop.ended = ended
                loop.kept = loop.position()

    def end_epoch(self) -> None:
        """The next loop is the first of another epoch."""
        if len(self._begun) < self._within:
            _log.warning(
                "the checkpoint was made within loop %d over run.batches of its epoch, and the"
                " resumed epoch had %d: what else it trained on then, it was not given now",
                self._within,
                len(self._begun),
            )
        for source in self.sources:
            source.batches_done = 0
            source.forget()
        for loop in self._begun:
            loop.kept, loop.ended = None, ""
        self._before = [*self._begun, *self._before[len(self._begun) :]]
        self._begun, self._within, self._rng = [], 0, None
        self._let_go()

    def state(self) -> list[Position]:
        """Positions by place, for a checkpoint."""
        self._let_go()
        begun, loops = len(self._begun), [*self._begun, *self._before[len(self._begun) :]]
        placed = {id(loop.source) for loop in loops}
        others = [s for s in self.sources if id(s) not in placed and brings(s.state())]
        found = [loop.position() | {"others": len(others)} for loop in loops]
        return found[:begun] + [one | {"batches": 0} for one in found[begun:]]

    def resume(self, positions: list[Position]) -> int:
        """Go on from a checkpoint's positions; the generators are as they were then.

        Returns:
            The batches of the epoch that were done by then, of the loop with the most.
        """
        self._before = [_Loop(None, dict(one), one.get("same")) for one in positions]
        batches = [int(one["batches"]) for one in positions]
        self._within = max((n for n, done in enumerate(batches, 1) if done), default=0)
        self._rng = rng_state(self._device)
        others = max((int(one.get("others", 0)) for one in positions), default=0)
        if others:
            _log.warning(
                "the run also trained on %d loader%s, in other epochs, that draw from generators or"
                " keep states of their own: those are not put back, and their order may be another",
                others,
                "s" * (others > 1),
            )
        return max(batches, default=0)

    def close(self) -> None:
        """End what DataLoaders that were taken over have started."""
        for source in self.sources:
            source.close()

    def _source_of(self, loader: Iterable[Any]) -> tuple[Source, bool]:
        """That of a loader, and whether it was there."""
        self._let_go()
        known = next((source for source in self.sources if source.loader is loader), None)
        source = known or Source(loader, self._device, self._world)
        if known is not None:
            self.sources.remove(known)
        self.sources.append(source)
        for old in self.sources[:-_MOST_OPEN]:
            old.close()
        return source, known is not None

    def _let_go(self) -> None:
        """End what was started for loaders that nobody has any more."""
        self.sources = let_go(self.sources)


def _made_otherwise(source: Source, position: Position) -> bool:
    """Whether a loader's generators came in other states than those of another process's did."""
    here, there = source.made_with, position.get("made_with", source.made_with)
    return len(there) != len(here) or not all(map(torch.equal, there, here))
