"""Which indices make which batch: hasten's own order, or the one of a sampler given by the user."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from hasten.errors import DataError, UsageError
from hasten.feed import randomness
from hasten.feed.foreseeable import KNOWN
from hasten.feed.keys import SAMPLER, mix, permutation
from hasten.feed.options import Options
from hasten.feed.position import check_reached
from hasten.feed.stateful import KEY as STATES
from hasten.feed.stateful import Stateful

_SEEN_KEPT = 4096  # far more than are drawn ahead of the loop


class Shard(NamedTuple):
    """One process's part of each batch: a slice of it, as even as can be; the first take more."""

    rank: int = 0
    of: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Where the part of a batch of `size` samples begins and ends."""
        least, more = divmod(size, self.of)
        start = self.rank * least + min(self.rank, more)
        return start, start + least + (self.rank < more)

    def part(self, batch: Any) -> Any:
        """The part of a batch's indices; the first one alone where no part is left.

        A process without samples still has to take the step with the others.
        """
        if self.of == 1:
            return batch
        start, end = self.bounds(len(batch))
        return batch[start:end] if end > start else batch[:1]


class Order(Protocol):
    """The batches of an epoch, as indices.

    Attributes:
        shard: which part of each batch is given.
    """

    shard: Shard

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """The indices of each batch from the `first` (counted from 0) on."""

    def whole(self, number: int) -> int:
        """Samples of a batch of the epoch under way, over all processes."""

    def __len__(self) -> int: ...

    def ended(self) -> None:
        """The epoch under way is over, or given up: the next begins with what is there then."""

    def state(self, batch: int) -> dict[str, Any]:
        """What is needed beside seed, epoch and batch to come to the same place.

        Args:
            batch: batches given in this epoch so far.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; it serves the next call of `batches`."""


class OwnOrder:
    """0 … n-1, or a permutation that depends on (seed, epoch) alone; int64 arrays."""

    def __init__(
        self, dataset: Sized, batch_size: int, *, shuffle: bool, drop_last: bool, seed: int
    ) -> None:
        self._dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._drop_last = drop_last
        self._seed = seed
        self.shard = Shard()

    @property
    def samples(self) -> int:
        """Of the data set."""
        return len(self._dataset)

    def indices(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The whole epoch's order: int64 [n]."""
        count = len(self._dataset)
        if count == 0:
            raise DataError("the data set is empty: len(dataset) is 0")
        if self.shuffle:
            return permutation(count, self._seed, epoch)
        return np.arange(count, dtype=np.int64)

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        indices, size = self.indices(epoch), self.batch_size
        end = len(self) * size
        for start in range(first * size, end, size):
            yield self.shard.part(indices[start : start + size])

    def whole(self, number: int) -> int:
        """See `Order`."""
        return min(self.batch_size, len(self._dataset) - number * self.batch_size)

    def __len__(self) -> int:
        full, rest = divmod(len(self._dataset), self.batch_size)
        return full + (1 if rest and not self._drop_last else 0)

    def ended(self) -> None:
        """See `Order`."""

    def state(self, batch: int) -> dict[str, Any]:
        """See `Order`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`."""
        if state["batch"] > len(self) and self.shard.of == 1:
            raise UsageError(
                f"the position is batch {state['batch']:,} of an epoch, which has {len(self):,} "
                "here: it was saved with another data set or batch_size"
            )


class OwnSampler(Sampler[int]):
    """An epoch's shuffled order, for those who ask a Loader for its sampler."""

    def __init__(self, order: OwnOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices: list[int] = self._order.indices(self._epoch).tolist()
        return iter(indices)

    def __len__(self) -> int:
        return self._order.samples


class _Seen:
    """Digests of the first so many batches of an epoch, as indices; of the latest numbers."""

    def __init__(self) -> None:
        self._last = ""
        self._count = 0
        self._digests: dict[int, str] = {}

    def note(self, batch: Any) -> None:
        """The next one."""
        text = f"{self._last} {batch!r}".encode()
        self._last = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._count += 1
        self._digests[self._count] = self._last
        self._digests.pop(self._count - _SEEN_KEPT, None)

    def of(self, count: int) -> str | None:
        """Of the first `count` batches; None where that is not known."""
        return self._digests.get(count)


class GivenOrder:
    """What the user's sampler or batch sampler gives; resumed by skipping indices, not samples.

    A sampler that draws from the global generators is given ones seeded by (seed, epoch), and
    they are put back; one with a `generator` of its own draws from that, whose state is kept
    with the position, as is what samplers keep in a `state_dict`. From the `generator` of a Loader
    one number is drawn first in each epoch, as a DataLoader draws one for its workers: so the order
    is that of a DataLoader with the same generator.
    """

    def __init__(
        self, sampler: Iterable[Any], seed: int, generator: torch.Generator | None
    ) -> None:
        self._sampler = sampler
        self._seed = seed
        self._given = generator
        self._stateful = Stateful(sampler)
        self._at_start: dict[str, Any] | None = None
        self._to_restore: dict[str, Any] | None = None
        inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        self._inner: Any = inner
        # PyTorch's own draw all that they need when they start (or keep a generator of their own
        # from then on), so the global generators need to be seeded for their first batch only.
        self._lazy = type(inner) not in KNOWN
        self._followed = type(sampler) is not BatchSampler or self._lazy
        self._seen = _Seen()
        self.shard = Shard()
        self._sizes: dict[int, int] = {}

    @property
    def sampler(self) -> Any:
        """What gives the indices one by one."""
        return self._inner

    @property
    def _generator(self) -> torch.Generator | None:
        own = getattr(self._inner, "generator", None)
        return own if isinstance(own, torch.Generator) else self._given

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """See `Order`."""
        if self._to_restore is not None:
            self._stateful.put_back(self._to_restore)
        for sampler in (self._inner, self._sampler):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
                break
        generator = self._generator
        resumed, self._to_restore = self._to_restore or {}, None
        if generator is not None and "generator" in resumed:
            generator.set_state(resumed["generator"])
        self._at_start, self._seen = self._now(), _Seen()
        expected = resumed.get("digest") if self._followed else None
        drawn = self._draw(mix(self._seed, epoch, SAMPLER), first, expected)
        if self._followed:
            drawn = self._noted(drawn)
        return drawn if self.shard.of == 1 else self._parts(drawn, first)

    def _parts(self, drawn: Iterator[Any], first: int) -> Iterator[Any]:
        self._sizes.clear()
        for number, batch in enumerate(drawn, first):
            self._sizes[number] = len(batch)
            yield self.shard.part(batch)

    def whole(self, number: int) -> int:
        """See `Order`."""
        return self._sizes[number]

    def _noted(self, drawn: Iterator[Any]) -> Iterator[Any]:
        for batch in drawn:
            self._seen.note(batch)
            yield batch

    def _draw(self, key: int, first: int, expected: str | None) -> Iterator[Any]:
        outside = randomness.save()
        randomness.seed(key)
        try:
            source = iter(self._sampler)
            if self._given is not None and self._generator is self._given:
                torch.empty((), dtype=torch.int64, device=self._given.device).random_(
                    generator=self._given
                )
            passed = 0
            for batch in islice(source, first):
                passed += 1
                if self._followed:
                    self._seen.note(batch)
            head = list(islice(source, 1))
            inside = randomness.save() if self._lazy else {}
        finally:
            randomness.restore(outside)
        check_reached(first, passed, self._inner)
        if first and expected not in (None, self._seen.of(first)):
            raise UsageError(drawn_otherwise(self._sampler, first))
        yield from head
        if not self._lazy:
            yield from source if head else ()
            return
        while head:
            outside = randomness.save()
            randomness.restore(inside)
            try:
                head = list(islice(source, 1))
                inside = randomness.save()
            finally:
                randomness.restore(outside)
            yield from head

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def ended(self) -> None:
        """See `Order`."""
        self._at_start = None

    def state(self, batch: int) -> dict[str, Any]:
        """See `Order`."""
        if self._to_restore is not None:
            return self._to_restore
        digest = self._seen.of(batch)
        return (self._at_start or self._now()) | ({} if digest is None else {"digest": digest})

    def _now(self) -> dict[str, Any]:
        generator = self._generator
        drawn = {} if generator is None else {"generator": generator.get_state()}
        return drawn | self._stateful.taken()

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Order`."""
        saved = state.get("generator")
        if saved is not None and not (
            isinstance(saved, torch.Tensor) and saved.dtype is torch.uint8
        ):
            raise UsageError(
                f"the position's generator is a {type(saved).__name__}, not the state of a "
                "torch.Generator (a tensor of bytes), as Loader.state_dict() gives it"
            )
        if saved is None and state["batch"] and self._generator is not None:
            raise UsageError(
                "the position has no state of a generator, and this Loader's order comes from "
                "one: it was saved by a Loader without, whose order is another"
            )
        self._stateful.check(state)
        names = ("generator", STATES, "digest")
        self._to_restore = {name: state[name] for name in names if name in state} or None


def drawn_otherwise(sampler: Any, batches: int) -> str:
    """Why an epoch cannot be gone on with whose first batches come out as others."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return (
        f"the {type(inner).__name__} does not give the first {batches} batches again that it "
        "gave (what it gives depends on more than the generators as the epoch begins, and what it "
        "has in a state_dict), so the epoch cannot be gone on with; begin it anew"
    )


def order_of(options: Options) -> Order | None:
    """The order that the options ask for; None for a stream."""
    if options.iterable:
        return None
    size, dataset = options.batch_size, options.dataset
    if options.own_order and size is not None:
        return OwnOrder(
            dataset,
            size,
            shuffle=bool(options.shuffle),
            drop_last=options.drop_last,
            seed=options.seed,
        )
    if options.batch_sampler is not None:
        return GivenOrder(options.batch_sampler, options.seed, options.generator)
    sampler = options.sampler
    if sampler is None:
        shuffled = bool(options.shuffle)
        sampler = (
            RandomSampler(dataset, generator=options.generator)
            if shuffled
            else SequentialSampler(dataset)
        )
    if size is not None:
        sampler = BatchSampler(sampler, size, options.drop_last)
    return GivenOrder(sampler, options.seed, options.generator)
