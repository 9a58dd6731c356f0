"""A DataLoader taken over: what it asks for, which plans keep its results, and its position."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from hasten.errors import UsageError
from hasten.feed import randomness
from hasten.feed.draws import Drawn, Draws, Foreseen, LateOrder
from hasten.feed.options import Options
from hasten.feed.order import Shard
from hasten.feed.position import check_reached

_KEY = "dataloader"


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
    own = (kind.__iter__, getattr(kind, "_get_iterator", None))
    if own != (DataLoader.__iter__, DataLoader._get_iterator):
        return f"{kind.__name__} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        return "a stream, which may draw between the loop's own draws"
    return ""


@dataclass
class Epoch:
    """An iteration of a DataLoader that was taken over.

    Attributes:
        start: the states of the generators as it began, and whether the workers of the epoch
            before went on.
        seen: of the indices given, where others may be given next time.
        base: of the seeds of its workers.
        after: of each worker that has drawn, its generators after the last batch given.
    """

    start: dict[str, Any]
    seen: Any
    base: int = 0
    after: dict[int, dict[str, Any]] = field(default_factory=dict)

    def note(self, indices: Any) -> None:
        """A batch of these indices was given: kept in mind where they may be others next time."""
        if self.seen is not None:
            self.seen.update(repr(indices).encode())

    @property
    def digest(self) -> str:
        """Of all that was noted."""
        return "" if self.seen is None else self.seen.hexdigest()

    @property
    def workers(self) -> dict[str, Any]:
        """Where the workers are, for a checkpoint."""
        return {"base": self.base, "after": _kept(self.after)}


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
        self._latest: Epoch | None = None
        self._ended = True
        self._resume: dict[str, Any] | None = None
        self._lasts = bool(loader.persistent_workers)
        self._told = self._drawn.known or isinstance(loader.dataset, IterableDataset)
        self.refuses = ""

    def __len__(self) -> int:
        return len(self.original)

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
            for number in range(first):
                indices = self._skipped(draws)
                if indices is None:
                    check_reached(first, number, self._drawn.sampler)
                epoch.note(indices)
            if foreseen is not None:
                foreseen.skip(first)
        if resume is not None and epoch.digest != resume.get("digest", epoch.digest):
            raise UsageError(
                f"the {type(self._drawn.sampler).__name__} does not give the first {first} batches "
                "again that it gave (what it gives depends on more than the generators as the "
                "epoch begins), so the epoch cannot be gone on with; begin it anew"
            )
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
        begun = resume is not None and "global" in resume
        if first and not begun:
            raise UsageError("a position within an epoch comes from state_dict()")
        outside = randomness.save() if begun else None
        latest, again = self._latest, self._latest is not None and self._lasts
        if resume is not None:
            for generator, state in zip(self._own, resume["own"], strict=True):
                generator.set_state(state)
            again = resume.get("again", False)
        if begun and resume is not None:
            randomness.restore(randomness.unpacked(resume["global"]))
        start = {
            "global": randomness.packed(randomness.save()),
            "own": [generator.get_state() for generator in self._own],
            "again": again,
        }
        epoch = Epoch(start, None if self._told else hashlib.blake2b(digest_size=16))
        if again and latest is not None:
            epoch.base, epoch.after = latest.base, dict(latest.after)
        self._latest, self._ended = epoch, False
        try:
            yield epoch, resume if begun or again else None
        finally:
            if outside is not None:
                randomness.restore(outside)

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
            self._ended = True

    def state(self) -> dict[str, Any]:
        """See `Order`."""
        latest = self._latest
        if self._ended or latest is None:
            own = [generator.get_state() for generator in self._own]
            stream = isinstance(self.original.dataset, IterableDataset)
            goes_on = latest is not None and self._lasts and not stream
            workers = latest.workers if goes_on and latest is not None else {}
            return {_KEY: {"own": own, "refuses": "", "again": goes_on, **workers}}
        if self.refuses:
            return {_KEY: {"refuses": self.refuses}}
        return {
            _KEY: {
                **latest.start,
                "global": _kept(latest.start["global"]),
                **latest.workers,
                "digest": latest.digest,
                "refuses": "",
            }
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`.

        Raises:
            UsageError: the position is of another kind of loader, or one that cannot be gone to.
        """
        if _KEY not in state:
            raise UsageError(
                "this position is not one of a DataLoader that was taken over: its order is another"
            )
        resume = state[_KEY]
        if resume["refuses"] and state["batch"]:
            raise UsageError(
                f"the epoch cannot be gone on with from batch {state['batch']}: "
                f"{resume['refuses']}; begin the epoch anew, or use hasten.Loader for its data set"
            )
        if resume["refuses"]:
            self._resume = None
            return
        states = {name: _back(resume[name]) for name in ("global", "after") if name in resume}
        self._resume = {**resume, **states}

    def set_epoch(self, epoch: int, *, anew: bool) -> None:
        """Tell the samplers that want to know. `anew`: no position within an epoch is kept."""
        loader = self.original
        if anew and self._resume is not None:
            self._resume.pop("global", None)
        for sampler in (loader.sampler, loader.batch_sampler):
            tell = getattr(sampler, "set_epoch", None)
            if callable(tell):
                tell(epoch)


class Direct(LateOrder):
    """Of a DataLoader without workers: drawn when it is asked for."""

    def __init__(self, draws: Draws, epoch: Epoch, wanted: Any = None) -> None:
        self._draws = draws
        self._epoch = epoch
        self._wanted = wanted  # drawn already

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        if self._wanted is not None:
            self._epoch.note(self._wanted)
            yield self._wanted
        for indices in _rest(self._draws):
            self._epoch.note(indices)
            yield indices


class Known(LateOrder):
    """Of a DataLoader with workers: as far as it is drawn."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        while self._draws.known:
            yield self._draws.known.popleft()


class Now(LateOrder):
    """That of the epoch which begins now: for what lasts over epochs."""

    order: LateOrder

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        return self.order.batches(epoch, first)


def _rest(draws: Draws) -> Iterator[Any]:
    while True:
        try:
            indices = next(draws)
        except StopIteration:
            return
        yield indices


def _kept(value: Any) -> Any:
    """Packed states for a checkpoint, which takes tensors and no bytes."""
    if isinstance(value, dict):
        return {key: _kept(part) for key, part in value.items()}
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value


def _back(value: Any) -> Any:
    """What `_kept` was given."""
    if isinstance(value, dict):
        return {key: _back(part) for key, part in value.items()}
    return bytes(value.cpu().numpy()) if isinstance(value, torch.Tensor) else value


def fork_is_there() -> bool:
    """Whether processes can be started that begin as this one is, without its script run again."""
    return "fork" in torch.multiprocessing.get_all_start_methods()
