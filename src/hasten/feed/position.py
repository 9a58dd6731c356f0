"""Where an iteration of a Loader is, what is seen on the way, and positions to go on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.errors import DataError, UsageError
from hasten.feed.options import Options

_log = logging.getLogger("hasten.feed")

_SKIPPED_KEPT = 1000
# The names of the options.
_AS = {"batch_size": "batch_size", "workers": "num_workers", "shuffle": "shuffle"}


class Skips:
    """Takes note of samples left out. Not the Loader itself: its sources would then hold it."""

    def __init__(self) -> None:
        self.first: list[tuple[Any, str]] = []
        self.count = 0
        self._told = 0

    def add(self, index: Any, message: str) -> None:
        """One was left out."""
        self.count += 1
        if len(self.first) < _SKIPPED_KEPT:
            self.first.append((index, message))

    def since(self, before: int) -> str:
        """What to say of those left out since there were so many; "" where none was."""
        count = self.count - before
        if not count:
            return ""
        known = self.first[before:] or self.first  # each names its sample
        samples = "a sample was" if count == 1 else f"{count:,} samples were"
        return f"{samples} left out, for one: {min(why for _, why in known)}"

    def tell(self, before: int, *, empty: bool, silent: bool) -> None:
        """At the end of an epoch that left some out: once, and again where their number changes.

        Args:
            before: how many were left out before it.
            empty: it gave no batch, as all were left out: no accident of a few files.
            silent: who iterates tells of the others himself.
        """
        if empty:
            _log.warning(
                "feed: every sample was left out, so the epoch gave no batch; for one: %s",
                self.first[-1][1],
            )
        elif not silent and self.count - before != self._told:
            self._told = self.count - before
            _log.warning("feed: %s", self.since(before))


@dataclass(slots=True)
class Cursor:
    """Where an iteration is: the next batch to give."""

    epoch: int
    batch: int


def whole_epoch(epoch: Any) -> int:
    """The number of an epoch.

    Raises:
        UsageError: it is none.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
        raise UsageError(f"epoch is {epoch!r}; it must be a whole number, from 0 on")
    return int(epoch)


def counted_by(options: Options) -> dict[str, int]:
    """What the number of a batch within an epoch goes by, beside the order."""
    found = {}
    if options.batch_sampler is None and options.batch_size is not None:
        found["batch_size"] = options.batch_size
    own = options.sampler is None and options.batch_sampler is None and options.generator is None
    if own and not options.iterable:
        found["shuffle"] = bool(options.shuffle)
    if options.iterable:
        workers = options.num_workers
        found["workers"] = 1 if workers == "auto" else max(1, workers)
    return found


def checked(state: Any, options: Options) -> tuple[int, int]:
    """(epoch, batch) of a position that `Loader.state_dict` gave.

    Raises:
        UsageError: it is no such position, or belongs to another seed; or it is one within an
            epoch of other batches.
    """
    seed = options.seed
    known = isinstance(state, Mapping) and {"epoch", "batch", "seed"} <= set(state)
    if not known or any(not _count(state[name]) for name in ("epoch", "batch", "seed")):
        shown = {k: state[k] for k in list(state)[:6]} if isinstance(state, Mapping) else state
        raise UsageError(
            f"the position is {shown!r}; it must be what Loader.state_dict() gave, such as "
            '{"epoch": 3, "batch": 120, "seed": 0}'
        )
    if state["seed"] != seed:
        raise UsageError(
            f"the position was saved with seed {state['seed']}, this Loader has seed "
            f"{seed}: its order is another; give seed={state['seed']}"
        )
    if state["batch"]:
        for name, here in counted_by(options).items():
            if state.get(name, here) != here:
                raise UsageError(
                    f"the position is batch {state['batch']:,} of an epoch with {name}="
                    f"{state[name]}, and this Loader has {here}, which makes other batches: go on "
                    f"with {_AS[name]}={state[name]}, or begin the epoch anew"
                )
    return int(state["epoch"]), int(state["batch"])


def _count(value: Any) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and bool(value >= 0)


def check_reached(first: int, given: int, whose: Any) -> None:
    """Refuse a position that lies beyond an epoch's end: going on there would give nothing.

    Raises:
        DataError: of the batches before `first`, only `given` came.
    """
    if given < first:
        raise DataError(
            f"the position is batch {first:,} of the epoch, and {type(whose).__name__} gave "
            f"{given:,} batches only: it was saved with another data set, sampler or batch_size"
        )


def tell_of_end(loader: Any, options: Options, cursor: Cursor) -> bool:
    """Warn where an epoch ended without a batch, or after others than the Loader's len says.

    Returns:
        Whether there was something to tell.
    """
    if cursor.batch == 0:
        _tell_of_no_batch(options, cursor.epoch)
        return True
    return _tell_of_length(loader, options, cursor.batch)


def _tell_of_length(loader: Any, options: Options, given: int) -> bool:
    """Warn where a Loader's len is not what an epoch gave; whether it was told."""
    try:
        said = len(loader)
    except TypeError:
        return False
    # Each reader of a stream has a last batch of its own, which may not be full.
    loose = max(0, loader.plan.workers - 1) if options.iterable else 0
    if abs(given - said) <= loose:
        return False
    whose = options.dataset if options.iterable else options.batch_sampler
    whose = whose or options.sampler or options.dataset
    _log.warning(
        "the len of %s says %s batches, and it gave %s: progress and schedules go by it, "
        "so correct its __len__",
        type(whose).__name__,
        said,
        given,
    )
    return True


def _tell_of_no_batch(options: Options, epoch: int) -> None:
    given = options.batch_sampler if options.batch_sampler is not None else options.sampler
    if options.iterable:
        less = f", or fewer samples than a batch has ({options.batch_size}), which drop_last drops"
        what = (
            f"the stream {type(options.dataset).__name__} gave nothing"
            f"{less if options.drop_last else ''}. Is it empty, or does its __iter__ give an "
            "iterator that is used up (made in __init__, or of a file read to its end)? Each call "
            "must give a new one"
        )
    elif options.drop_last:
        what = f"drop_last=True leaves out what is less than a batch ({options.batch_size})"
    elif given is not None:
        what = f"the sampler {type(given).__name__} gave no index"
    else:
        what = f"{type(options.dataset).__name__} is empty"
    _log.warning("feed: epoch %d gave no batch: %s", epoch, what)


def described(options: Options) -> str:
    """A Loader in a line: its data set and what it was asked for."""
    dataset, named = options.dataset, {"batch_size": options.batch_size, "seed": options.seed}
    if options.batch_sampler is not None:
        named["batch_size"] = None
    size = f" of {len(dataset):,}" if hasattr(dataset, "__len__") else ""
    given = ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)
    extra = ", shuffle=True" if options.shuffle else ""
    return f"Loader({type(dataset).__name__}{size}, {given}{extra})"
