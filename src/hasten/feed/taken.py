"""A DataLoader taken over: what it asks for, which plans keep its results, and its position."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from hasten.errors import UsageError
from hasten.feed import randomness
from hasten.feed.changes import Attributes
from hasten.feed.draws import Drawn, Draws, Foreseen, LateOrder
from hasten.feed.inside import Inside, inside
from hasten.feed.iteration import Epoch, back, kept
from hasten.feed.options import Options
from hasten.feed.order import Shard, drawn_otherwise
from hasten.feed.parts import lasts
from hasten.feed.position import check_reached
from hasten.feed.resumable import KEY, WRITTEN
from hasten.feed.stateful import KEY as STATES
from hasten.feed.stateful import Stateful

_log = logging.getLogger("hasten.feed")

_ITERATES = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
_CHANGED = (
    "the data set had changed {0}{1}: unless it is brought there again, the batches may be others"
)
_LASTED = (
    "what a stream's persistent workers give follows from the epochs before: they begin anew, as "
    "those of a DataLoader would"
)


def options_of(loader: Any, *, plan: str, on_error: Any, device_transform: Any) -> Options:
    """The options of a Loader that stands for a DataLoader.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"from_dataloader takes a torch.utils.data.DataLoader, not a {type(loader).__name__}; "
            "for a data set use hasten.Loader(dataset, batch_size=64, shuffle=True)"
        )
    if plan == "threads":
        raise UsageError(
            'plan="threads" cannot keep the results of a DataLoader: threads share the generators '
            "that samples draw from; use hasten.Loader with a data set that has fetch(index, key)"
        )
    as_it_is = left_as_it_is(loader)
    if on_error == "skip" and as_it_is:
        raise UsageError(
            f"this DataLoader is iterated as it is ({as_it_is}), and no sample of it can be left "
            'out: leave out on_error="skip", and pass over what fails in the data set'
        )
    stream = isinstance(loader.dataset, IterableDataset)
    own_batches = loader.batch_sampler is not None and loader.batch_size is None
    return Options(
        dataset=loader.dataset,
        batch_size=1 if own_batches else loader.batch_size,
        shuffle=None,
        sampler=None if stream or own_batches else loader.sampler,
        batch_sampler=loader.batch_sampler if own_batches else None,
        num_workers="auto",
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or "auto",
        drop_last=False if own_batches else loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=None,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers if loader.num_workers else None,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
        plan=plan,
        seed=0,
        device_transform=device_transform,
        on_error=on_error,
    )


def left_as_it_is(loader: Any) -> str:
    """Why a DataLoader is iterated as it is, if it has to be; else ''."""
    kind = type(loader)
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its data pipes seed and share themselves out"
    # Some, as Accelerate's, only pass for a DataLoader, and have one.
    if any(getattr(kind, name, None) is not getattr(DataLoader, name) for name in _ITERATES):
        return f"{kind.__name__} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        return "a stream, which may draw between the loop's own draws"
    return ""


def original_of(loader: Any) -> Any | None:
    """The DataLoader that a Loader stands for, or that this is; None of another loader."""
    feeds = getattr(loader, "_feeds", None)
    return loader if isinstance(loader, DataLoader) else getattr(feeds, "original", None)


def told_epochs(loader: Any) -> dict[str, Any]:
    """A loader and its samplers, as far as they want to know which epoch begins, by their names."""
    parts = {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    return {
        name: part
        for name, part in {"loader": loader, **parts}.items()
        if callable(getattr(part, "set_epoch", None))
    }


class TakenOrder(LateOrder):
    """The order of a DataLoader, as its samplers draw it, and the position in an epoch.

    It has the place of an `Order` in a Loader; batches come by `begin`. Of iterations at the same
    time, it has the position of the one that began last.

    Attributes:
        original: the DataLoader.
        refuses: why an epoch cannot be gone on with from a position, if so.
    """

    def __init__(self, loader: Any) -> None:
        self.shard = Shard()
        self.original = loader
        self._drawn = Drawn.of(loader)
        self._own = self._drawn.generators()
        self._stateful = Stateful(self._drawn.sampler)
        self._latest: Epoch | None = None
        self._ended = True
        self._held_first: Inside = None
        self._held_begun: Inside = None  # as the latest epoch began
        self._attributes: Attributes | None = None  # as the first began
        self._changes_within = False  # an epoch that was given to its end
        self._changed_around = False  # one that was left: in it, or after it
        self._resume: dict[str, Any] | None = None
        self._lasts = lasts(loader)
        self._workers = loader.num_workers
        self._told = self._drawn.known or isinstance(loader.dataset, IterableDataset)
        self.refuses = ""

    def __len__(self) -> int:
        return len(self.original)

    def renewed(self, first: int) -> TakenOrder:
        """That of the DataLoader as it is by now, with the position that was loaded.

        Raises:
            UsageError: the position is none of it now.
        """
        made = TakenOrder(self.original)
        if self._resume is not None:
            made.load_state({KEY: {**self._resume, "lost": ""}, "batch": first})
        return made

    @property
    def ahead(self) -> int:
        """Batches whose indices are drawn before the first of an epoch is given; 0 without
        workers."""
        return self._drawn.ahead

    def begin(self, first: int, *, foresee: bool = False) -> tuple[Epoch, Draws, Foreseen | None]:
        """An epoch that begins now, at batch `first`, and its draws; also what will be drawn,
        where that is wanted and can be foreseen.

        Raises:
            UsageError: see `from_start`.
        """
        with self.from_start(first) as (epoch, resume):
            copied = self._drawn.copied() if foresee else None
            foreseen = None if copied is None else Foreseen(copied)
            draws = Draws(self._drawn, again=epoch.start["again"])
            if draws.base is not None:
                epoch.base, epoch.after = draws.base, {}
            if resume is not None:
                epoch.base, epoch.after = resume["base"], dict(resume["after"])
                epoch.before = resume.get("before", {})
            for number in range(first):
                indices = self._skipped(draws)
                if indices is None:
                    check_reached(first, number, self._drawn.sampler)
                epoch.note(indices)
            if foreseen is not None:
                foreseen.skip(first)
        if resume is not None and epoch.digest != resume.get("digest", epoch.digest):
            raise UsageError(drawn_otherwise(self._drawn.sampler, first))
        return epoch, draws, foreseen

    def foreseen(self) -> Foreseen | None:
        """What an epoch that began now would draw; nothing is drawn. None where none can tell."""
        copied = self._drawn.copied()
        return None if copied is None else Foreseen(copied)

    @contextmanager
    def from_start(self, first: int) -> Iterator[tuple[Epoch, dict[str, Any] | None]]:
        """Within, the generators are as the epoch begins with them.

        Where it is gone on with, those are the states of its beginning, and what was loaded is
        given too. Afterwards the global generators are again as they were: whoever goes on has
        put them back himself.

        Raises:
            UsageError: the epoch's position was not loaded.
        """
        resume, self._resume = self._resume, None
        if resume is not None:
            packed = [name for name in ("global", "after", "before") if name in resume]
            resume = resume | {name: back(resume[name]) for name in packed}
        begun = resume is not None and "global" in resume
        if first and not begun:
            raise UsageError("a position within an epoch comes from state_dict()")
        outside = randomness.save() if begun else None
        latest, again = self._latest, self._latest is not None and self._lasts
        if resume is not None:
            for generator, state in zip(self._own, resume["own"], strict=True):
                generator.set_state(state)
            self._stateful.put_back(resume)
            again = resume.get("again", False)
        if begun and resume is not None:
            randomness.restore(randomness.unpacked(resume["global"]))
        start = {
            "global": randomness.packed(randomness.save()),
            "own": [generator.get_state() for generator in self._own],
            **self._stateful.taken(),
            "again": again,
        }
        epoch = Epoch(start, None if self._told else hashlib.blake2b(digest_size=16))
        if again and latest is not None:
            epoch.base, epoch.after = latest.base, dict(latest.after)
        before, self._held_begun = self._held_begun, self._held()
        left = self._latest is not None and not self._ended
        self._changed_around |= left and self._held_begun != before
        if self._latest is None:
            self._held_first = self._held_begun
            loader = self.original
            if self._held_first is not None:
                self._attributes = Attributes(loader.dataset, loader.collate_fn)
        self._latest, self._ended = epoch, False
        try:
            yield epoch, resume if begun or again else None
        finally:
            if outside is not None:
                randomness.restore(outside)

    def _held(self) -> Inside:
        loader = self.original
        watched = self._lasts or not loader.num_workers
        return inside(loader.dataset, loader.collate_fn) if watched else None

    def _lost(self) -> str:
        """What a position does not bring back, in words; '' where it brings all."""
        if not self.original.num_workers:
            return self._changed() if self._written() else ""
        if not self._lasts or self._latest is None:
            return ""
        stream = isinstance(self.original.dataset, IterableDataset)
        found = _LASTED if stream and self._ended else self.refuses if self._ended else ""
        gone_on = self._ended or self._latest.start["again"]
        return found or (WRITTEN if gone_on and self._written() else "")

    def _changed(self) -> str:
        """What of it has changed, and when."""
        names = "" if self._attributes is None else self._attributes.others()
        within = not self._ended and self._held() != self._held_begun
        when = "between epochs, as the loop set it otherwise"
        if self._changed_around:
            when = "since its first epoch"
        if within or self._changes_within:
            when = "when samples were made"
        return _CHANGED.format(when, names)

    def _written(self) -> bool:
        held = self._held_first
        return held is not None and held != self._held()

    def _skipped(self, draws: Draws) -> Any:
        if not self._drawn.twice:
            return next(draws, None)
        indices = draws.known.popleft() if draws.known else None
        draws.given()
        return indices

    def check_unmoved(self, work: Callable[[], Any]) -> None:
        """Run what reads up to a position.

        Raises:
            UsageError: it drew, without workers, from generators that the loop draws from too.
        """
        before = randomness.save()
        work()
        if not self._drawn.twice and randomness.touched(before):
            raise UsageError(
                "the samples draw from the generators that the loop draws from too, so they "
                "cannot be read again as they were; begin the epoch anew, or use hasten.Loader "
                "for the data set"
            )

    def end(self, epoch: Epoch) -> None:
        """The epoch was given to its end."""
        if self._latest is epoch:
            self.ended()

    def ended(self) -> None:
        """See `Order`."""
        self._ended = True
        self._changes_within |= self._held() != self._held_begun

    def state(self, batch: int) -> dict[str, Any]:
        """See `Order`."""
        if self._resume is not None:
            return {KEY: self._resume}
        latest = self._latest
        if self._ended or latest is None:
            own = [generator.get_state() for generator in self._own]
            goes_on = latest is not None and self._lasts
            workers = latest.workers if goes_on and latest is not None else {}
            rest = {"workers": self._workers, "lost": self._lost()}
            rest |= self._stateful.taken()
            return {KEY: {"own": own, "refuses": "", "again": goes_on, **rest, **workers}}
        workers = {**latest.workers, "workers": self._workers}
        again = latest.start["again"]
        if self.refuses and batch and not again:
            return {KEY: {"refuses": self.refuses}}
        if self.refuses and batch:  # it can be begun as it was, but for what its workers had become
            begins = {name: part for name, part in latest.start.items() if name != "global"}
            workers["after"] = kept(latest.before)
            return {KEY: {**begins, **workers, "lost": self.refuses, "refuses": self.refuses}}
        return {
            KEY: {
                **latest.start,
                "global": kept(latest.start["global"]),
                **workers,
                "before": kept(latest.before),
                "digest": latest.digest,
                "lost": (again and self.refuses) or self._lost(),
                "refuses": "",
            }
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`.

        Raises:
            UsageError: the position is of another kind of loader, or one that cannot be gone to.
        """
        if KEY not in state:
            raise UsageError(
                "this position is not one of a DataLoader that was taken over: its order is another"
            )
        resume = state[KEY]
        if resume["refuses"] and state["batch"]:
            raise UsageError(
                f"the epoch cannot be gone on with from batch {state['batch']}: "
                f"{resume['refuses']}; begin the epoch anew, or use hasten.Loader for its data set"
            )
        if resume["refuses"] and not resume.get("again"):
            self._resume = None
            return
        workers = self.original.num_workers
        if ("global" in resume or resume.get("again")) and resume.get(
            "workers", workers
        ) != workers:
            raise UsageError(
                f"the position was saved with num_workers={resume['workers']} of the DataLoader, "
                f"and this one has {workers}: what is drawn depends on it. Go on with "
                f"num_workers={resume['workers']}, or begin the epoch anew"
            )
        self._stateful.check({"batch": state["batch"], **resume})
        lost = resume.get("lost")
        if resume.get("again") and callable(getattr(self.original.dataset, "set_epoch", None)):
            lost = lost or WRITTEN  # it is told the next epoch before workers begin
        if lost:
            _log.warning("a position is gone on with, and not all is as it was: %s", lost)
        self._resume = dict(resume)

    def set_epoch(self, epoch: int, *, anew: bool) -> None:
        """Tell the samplers, and a DataLoader of somebody's own, that want to know.

        `anew`: no position within an epoch is kept.
        """
        loader = self.original
        if self._resume is not None and (anew or "global" not in self._resume):
            self._resume.pop("global", None)
            self._stateful.put_back(self._resume)  # now, as they are told another epoch
            self._resume.pop(STATES, None)
        for told in told_epochs(loader).values():
            told.set_epoch(epoch)
