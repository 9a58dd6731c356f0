"""Where a run's batches come from: on its device, and from any position of an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from hasten.devices import move, runtime
from hasten.errors import CheckpointError, DataError, UsageError
from hasten.feed import Loader, Plan
from hasten.feed.order import Shard
from hasten.feed.resumable import beginning, brings_back, check_alike, keeps, lost, within_epoch
from hasten.feed.stateful import KEY as STATES
from hasten.feed.taken import original_of
from hasten.feed.telling import silence
from hasten.train.seed import rng_state, set_rng_state
from hasten.train.sharding import Slices
from hasten.train.takeover import Takeover, Told
from hasten.train.world import ALONE, World

Position = dict[str, Any]
"""Where a loop over a loader is, as plain values: see `Source.state`."""


class Source:
    """One loader of a run: any iterable of batches.

    A :class:`hasten.Loader` starts in the middle of an epoch without touching the samples before.
    A ``DataLoader`` is taken over: the same batches come at the same moments, by hasten's feed.
    Where its position does not bring all back, it is read again up to there, as any other iterable
    is, from the random states that its epoch began with: the global generators' and those of a
    ``DataLoader`` and its samplers.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, world: World = ALONE) -> None:
        """The loader is the loop's: it is not kept alive here, where that can be had."""
        given: object = loader
        if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
            raise UsageError(
                f"this {type(loader).__name__} is a data set, which gives single samples; give"
                " batches of it: hasten.Loader(dataset, batch_size=64, shuffle=True)"
            )
        self._held, self._seen = _weakly(loader)
        self.device = device
        self._own = isinstance(loader, Loader)
        self.fed: Any = None
        self._kind = type(loader).__name__
        self._plan: Plan | None = None
        if isinstance(loader, Loader):
            silence(loader)  # the run tells of the plan, where it tells of anything
            self.fed = loader.to(device)
            self.fed.loader = weakref.proxy(loader)
        self._takeover = Takeover(device)
        self._told = Told()
        self._world = world
        self._slices: Slices | None = None
        if world.size > 1:
            if isinstance(loader, Loader):
                loader.shard(world.rank, world.size)
            else:
                self._slices = Slices(loader, Shard(world.rank, world.size))
        self.batches_done = 0
        """Batches of this epoch given to the loop."""
        self._generators = [] if self._own else _generators(loader)
        self.made_with = [generator.get_state() for generator in self._generators]
        """The states in which its generators came."""
        self._rng_at_epoch: dict[str, Any] | None = None
        self._own_at_epoch: list[torch.Tensor] = []
        self._resume: dict[str, Any] | None = None
        self._left_out_before = 0

    @property
    def loader(self) -> Any:
        """What was given; None where nobody has it any more."""
        return self._held if self._held is not None else self._seen()

    def forget(self) -> None:
        """The epoch is over: what is kept alive here goes, where no other epoch would need it."""
        if self._held is not None and not self._generators:
            self._held, self._seen = None, lambda: None

    @property
    def batches(self) -> int | None:
        """Batches of an epoch; None where the loader does not know."""
        return length(self.loader)

    @property
    def plan(self) -> Plan | None:
        """How samples become batches; None where the loader is iterated as it is."""
        if not self._own:
            self._plan = self._takeover.plan or self._plan
        elif self.loader is not None:
            self._plan = self.fed.plan
        return self._plan

    @property
    def planned(self) -> str:
        """The same in one line."""
        return str(self.plan or f"{self._kind}, as given")

    @property
    def left_out(self) -> str:
        """What to say of the samples that were skipped since the start; "" where none was."""
        loader = self.loader
        skips = loader._skips if isinstance(loader, Loader) else None
        return "" if skips is None else skips.since(self._left_out_before)

    @property
    def copy_seconds(self) -> float:
        """Time the feed itself has spent copying to the device within its ``next``, so far."""
        return float(getattr(self.fed, "copy_seconds", 0.0))

    def start(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch (counted from 0), from the position it was restored to.

        Raises:
            DataError: the loader gives fewer batches than were done.
        """
        resume, self._resume = self._resume, None
        self._left_out_before = getattr(self.loader, "skipped_count", 0) if self._own else 0
        self.batches_done = resume["batches"] if resume else 0
        if not self._own:
            taken = self._takeover.of(self.loader if self._slices is None else self._slices.loader)
            self.fed = None if taken is None else taken.to(self.device)
        self._told.look(self.loader)
        self._tell(epoch)
        if resume and self._brings_back(resume):
            self._rng_at_epoch = resume["rng"] or rng_state(self.device)
            self._own_at_epoch = resume["generators"]
            return self._from_position(resume, epoch)
        if self._own:
            return iter(self.fed)
        if resume and self.fed is not None and self._slices is None:
            self._go_on_with_workers(resume, epoch)
        return self._from_beginning(resume)

    def _tell(self, epoch: int) -> None:
        if self.fed is not None:
            self.fed.set_epoch(epoch)
        fed = self.fed is not None and self._slices is None
        self._told.tell(self.loader, epoch, fed=fed)

    def _brings_back(self, resume: dict[str, Any]) -> bool:
        """Whether the feed comes to where it was by its position alone."""
        position = resume["loader"]
        if self._own and (resume["batches"] or position.keys() & {"generator", STATES}):
            return True  # or it says itself why not
        original = original_of(self.loader)
        return original is not None and self._slices is None and brings_back(position, original)

    def _from_position(self, resume: dict[str, Any], epoch: int) -> Iterator[Any]:
        """The rest of an epoch by the feed's own count: where every sample of a batch was skipped
        as unreadable, it has gone past that batch and this source was not given it."""
        position, done = resume["loader"], resume["batches"]
        if not done:  # of another epoch, perhaps: what it begins with is all that is wanted
            begins = {**position, "epoch": epoch, "batch": 0, "seed": self.fed.seed}
            self.fed.load_state_dict(begins)
            self._tell(epoch)  # samplers are told after they are as they were
            return iter(self.fed)
        over = position["epoch"] != epoch  # it was read to its end
        if over and not self._own:
            self.fed.load_state_dict(position)
            return iter(())
        batch = self.batches if over else position["batch"]
        self.fed.load_state_dict({**position, "epoch": epoch, "batch": batch or done})
        return iter(self.fed)

    def _go_on_with_workers(self, resume: dict[str, Any], epoch: int) -> None:
        begins = beginning(resume["loader"], original_of(self.loader))
        if begins is not None:
            self.fed.load_state_dict({**begins, "epoch": epoch, "seed": self.fed.seed})
            self._tell(epoch)  # samplers are told after they are as they were

    def _from_beginning(self, resume: dict[str, Any] | None) -> Iterator[Any]:
        """An epoch; where it was begun before, the batches that were done are read again."""
        now, skip = rng_state(self.device), resume["batches"] if resume else 0
        if resume and skip and resume["rng"]:
            set_rng_state(resume["rng"], self.device)
        elif self._slices is not None:  # all draw the order that the first process draws
            set_rng_state(self._world.first(now), self.device)
        self._rng_at_epoch = rng_state(self.device)
        self._own_at_epoch = [generator.get_state() for generator in self._generators]
        ways = (self.fed, self._slices, self.loader)
        batches = iter(next(way for way in ways if way is not None))
        for place in range(skip):
            if next(batches, self) is self:
                raise DataError(
                    f"the checkpoint was made after {skip} batches of an epoch, and the"
                    f" {type(self.loader).__name__} gives only {place} now: the data has changed"
                )
        if skip:
            set_rng_state(now, self.device)  # where the run itself had got to
        elif self._slices is not None and not self._world.is_main:
            first = list(islice(batches, 1))  # it is with the first batch that samplers draw
            set_rng_state(now, self.device)
            return with_first(first, batches)
        return batches

    def share(self, batch: Any) -> tuple[int, int]:
        """Samples of the batch given last: those of this process, and those of all."""
        if self._world.size == 1:
            samples = count(batch)
            return samples, samples
        if self._slices is not None:
            return self._slices.shares[self.batches_done]
        share: tuple[int, int] = self.fed.loader.share
        return share

    def onto_device(self, batch: Any) -> Any:
        """The batch on the run's device: at once where the feed has put it there already."""
        there = self.fed is not None and (self._own or not runtime.is_host(self.device))
        return batch if there else move(batch, self.device)

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint."""
        within = self.batches_done > 0
        own = self._own_at_epoch if within else [g.get_state() for g in self._generators]
        gone = self.fed is None or self.loader is None
        position = {} if gone else self.fed.state_dict()
        return {
            "batches": self.batches_done,
            "of": self.batches,
            "batch_size": _batch_size(self.loader),
            "loader": position if self._slices is None else {},
            "lost": lost(position),
            "rng": self._rng_at_epoch if within and not self._own else None,
            "generators": own,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Make the next :meth:`start` begin where ``state`` was taken.

        Raises:
            CheckpointError: it was taken in the middle of an epoch of batches of another size, or
                in another order.
        """
        before, now = state.get("batch_size"), _batch_size(self.loader)
        if state["batches"] and None not in (before, now) and before != now:
            raise CheckpointError(
                f"the checkpoint was made in an epoch of batches of {before}, and this loader's are"
                f" of {now}: go on with the batch size of the run, at least to the epoch's end"
            )
        if state["batches"]:
            check_alike(state["loader"], self.loader, original_of(self.loader))
        self._resume = state if state["batches"] or state["loader"] else None
        for generator, kept in zip(self._generators, state["generators"], strict=False):
            generator.set_state(kept)

    def check_length(self, state: Position) -> None:
        """Refuse a position in an epoch of another length, once that has begun: samplers have
        been told the epoch then, and their states put back, and the length may follow from both.

        Raises:
            CheckpointError: it is one.
        """
        if state["of"] != self.batches:
            raise CheckpointError(
                f"the checkpoint was made in an epoch of {state['of']} batches, and this loader"
                f" gives {self.batches}: go on with the data and the batch size of the run. (A"
                " sampler whose length follows from the epoch is told it by set_epoch(epoch), or"
                " keeps it by state_dict() and load_state_dict(state), if it has those)"
            )

    def read_again(self, epoch: int, batch: int) -> Any | None:
        """The batch at a position (counted from 0) of an epoch; None where it cannot be had."""
        loader = self.loader
        if self.fed is None or loader is None:
            return loader[batch] if isinstance(loader, (list, tuple)) else None
        taken = original_of(loader) is not None
        if taken and (self._slices is not None or self.fed.plan.name != "gather"):
            return None  # its samples may draw, and not from where they drew then
        kept = self.fed.state_dict()
        if taken and not within_epoch(kept):
            return None
        self.fed.load_state_dict({**kept, "epoch": epoch, "batch": batch})
        batches: Any = None
        try:
            batches = iter(self.fed)
            return next(batches, None)
        except UsageError:  # a sampler that does not give the same indices again
            return None
        finally:
            close(batches)
            self.fed.load_state_dict(kept)

    def close(self) -> None:
        """End what a DataLoader that was taken over has started; a Loader is its owner's to end."""
        self._takeover.close()


def let_go(sources: list[Source]) -> list[Source]:
    """Those whose loaders there still are; what was started for the others is ended."""
    for source in sources:
        if source.loader is None:
            source.close()
            source.fed = None
    return [source for source in sources if source.loader is not None]


def brings(position: Position) -> bool:
    """Whether a position has more of the loader than how many batches it gave."""
    own = position["loader"]
    return bool(position["generators"] or own.keys() & {"generator", STATES} or keeps(own))


def with_first(first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Batches that were taken already, and the rest."""
    try:
        yield from first
        yield from batches
    finally:
        close(batches)


def _weakly(loader: Any) -> tuple[Any, Callable[[], Any]]:
    """A loader, where it has to be held, and what gives it otherwise."""
    try:
        return None, weakref.ref(loader)
    except TypeError:  # a list, say
        return loader, lambda: loader


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if type(size) is int else None


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader was given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def length(loader: Iterable[Any]) -> int | None:
    """Batches of an epoch; None where the loader does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def close(batches: Any) -> None:
    """End an iterator or a loader that may hold threads or processes."""
    if hasattr(batches, "close"):
        batches.close()


def count(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor; 1 where there is none.

    Of a list of strings its length, and of a packed sequence the number of sequences.
    """
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 1  # a nested one has no shape
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, (tuple, list)) and batch:
        first = batch[0]
        return len(batch) if isinstance(first, (str, bytes)) else count(first)
    if isinstance(batch, Mapping):
        sizes = (item.shape[0] for item in batch.values() if _has_rows(item))
        return next(sizes, 0) or max((count(item) for item in batch.values()), default=1)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, (str, bytes)) else 1


def _has_rows(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() > 0


_LABELS = ("labels", "label", "targets", "target")


def split(batch: Any) -> tuple[Any, Any]:
    """A batch as ``(data, labels)``.

    A pair is that; of a longer tuple the last is the labels; of a dict the entry named so.

    Raises:
        DataError: there is nothing to be the labels.
    """
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return (batch[0], batch[1]) if len(batch) == 2 else (tuple(batch[:-1]), batch[-1])
    if isinstance(batch, Mapping):
        for name in _LABELS:
            if name in batch:
                return {k: v for k, v in batch.items() if k != name}, batch[name]
    raise DataError(
        f"a batch is a pair (data, labels), or a dict with 'labels'; this one is a"
        f" {type(batch).__name__}: use hasten.Run with a loop of your own for other kinds"
    )
