"""One batch made sample by sample: fetching, seeding, collating, and what is said when it fails."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hasten.errors import DataError
from hasten.feed import randomness
from hasten.feed.blame import misfit, raised
from hasten.feed.describe import describe, text_of
from hasten.feed.failure import Failure
from hasten.feed.fetching import fetch_of, many_of, takes_out
from hasten.feed.handlers import by_a_handler
from hasten.feed.keys import COLLATE, mix, sample_key, sample_keys

_T = TypeVar("_T")


@dataclass(slots=True)
class Made:
    """A batch on its way; crosses from worker processes.

    Attributes:
        number: of the batch in its epoch, from 0.
        batch: what the collate function gave; None where `empty`.
        kept: the indices in it, where some were skipped; else None.
        skipped: (index, message) of the samples left out.
        failure: set in worker processes instead of raising.
    """

    number: int
    batch: Any = None
    kept: list[Any] | None = None
    skipped: list[tuple[Any, str]] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def empty(self) -> bool:
        """Every sample was skipped."""
        return self.kept is not None and not self.kept


class Maker:
    """Makes batches of one data set, the same ones in whatever process or plan it runs.

    A data set with `fetch(index, key)` draws its randomness from the key. Others may draw from
    the global generators: the first time one is seen to move, the batch is made again with that
    generator seeded for each sample, and so from then on. Afterwards they are as they were.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        *,
        seed: int,
        skip_errors: bool,
        batched: bool,
        own_order: bool = False,
    ) -> None:
        """`own_order`: indices come as hasten's own arrays."""
        self._own_order = own_order
        self.dataset = dataset
        self.seed = seed
        self.skip_errors = skip_errors
        self.batched = batched
        self.default_collate = collate_fn is None or collate_fn is default_collate
        self.collate_fn = collate_fn or (default_collate if batched else default_convert)
        self.fetch = fetch_of(dataset)
        self._many = many_of(dataset) if batched else None
        self.writes = self.fetch is not None and takes_out(self.fetch)
        self.uses: frozenset[str] = frozenset()

    def make(self, epoch: int, number: int, indices: Any) -> Made:
        """The batch of these indices.

        Raises:
            DataError: a sample or the collate function failed; the cause is chained.
        """
        if self.fetch is not None:
            return self._make(epoch, number, indices, self.collate)
        return self._guarded(lambda: self._make(epoch, number, indices, self._collate))

    def attempt(
        self, epoch: int, number: int, indices: Any, *, stopped: Callable[[], bool]
    ) -> Made | None:
        """The batch, made in a thread that must not touch the global generators.

        For data sets without `fetch`, while none is known to draw. Nothing is seeded or put
        back, and nothing skipped: what raises is made again by `make`. None if `stopped` said so
        between two samples.
        """
        if self._many is not None:
            samples = list(self._many(self._asked(indices)))
        else:
            samples = []
            for index in self.listed(indices):
                if stopped():
                    return None
                samples.append(self.dataset[index])
        batch = self.collate_fn(samples if self.batched else samples[0])
        return Made(number, batch=batch)

    def listed(self, indices: Any) -> list[Any]:
        """The indices of a batch as a list of what the data set is given: those of hasten's own
        order, and what `fetch` is asked for, as Python's numbers, others as the sampler gave them.
        """
        asked = [indices] if not self.batched else self._asked(indices)
        return [plain(index) for index in asked] if self.fetch is not None else list(asked)

    def _asked(self, indices: Any) -> Any:
        """What a DataLoader hands to the data set for a batch."""
        own = self._own_order and isinstance(indices, np.ndarray)
        return indices.tolist() if own else indices

    def collate(self, epoch: int, number: int, samples: list[Any], indices: list[Any]) -> Any:
        """The samples as one batch; a collate_fn may draw from the global generators.

        Raises:
            DataError: they do not go together; names the first that differs.
        """
        if self.default_collate:
            return self._collate(epoch, number, samples, indices)
        return self._guarded(lambda: self._collate(epoch, number, samples, indices))

    def _guarded(self, work: Callable[[], _T]) -> _T:
        while True:
            before = randomness.save()
            moved = frozenset[str]()
            try:
                result = work()
            finally:
                moved = randomness.touched(before)
                randomness.restore(before, moved)
            if moved <= self.uses:
                return result
            self.uses |= moved

    def _make(self, epoch: int, number: int, indices: Any, collate: Callable[..., Any]) -> Made:
        made = Made(number)
        samples, kept = self._samples(epoch, indices, made)
        if made.skipped:
            made.kept = kept
        if not made.empty:
            made.batch = collate(epoch, number, samples, kept)
        return made

    def _samples(self, epoch: int, given: Any, made: Made) -> tuple[list[Any], list[Any]]:
        indices = self.listed(given)
        if self._many is not None and not self.uses and self.fetch is None:
            try:
                got = self._many(self._asked(given))
            except Exception as error:
                if by_a_handler(error):
                    raise
                got = None  # made one by one below, to name the sample
            if got is not None:
                return list(got), indices
        samples, kept = [], []
        plain = self.fetch is None and self._many is None and not self.uses
        dataset, keys = self.dataset, () if plain else self._keys(epoch, indices)
        for place, index in enumerate(indices):
            try:
                sample = dataset[index] if plain else self._sample(index, keys[place])
            except Exception as error:  # noqa: BLE001 - raised or noted, with its index
                made.skipped.append((index, self.skip(index, error)))
            else:
                samples.append(sample)
                kept.append(index)
        return samples, kept

    def skip(self, index: Any, error: Exception) -> str:
        """What to note of a sample that raised, if it is to be skipped.

        Raises:
            DataError: it is not; the message names the sample, and where it comes from.
            Exception: it was no sample that raised, but a signal handler of the program's.
        """
        if by_a_handler(error):
            raise error
        message = self._failure(index, error)
        if self.skip_errors or getattr(error, "skip", False):
            return message
        raise DataError(message) from error

    def sample(self, epoch: int, index: Any, out: list[torch.Tensor] | None = None) -> Any:
        """One sample, with its own randomness; its tensors may come as `out`, if it `writes`."""
        key = sample_key(self.seed, epoch, _number(index))
        if out is not None and self.fetch is not None:
            return self.fetch(index, key, out)
        return self._sample(index, key)

    def _keys(self, epoch: int, indices: list[Any]) -> Sequence[int]:
        if self.fetch is None and not self.uses:
            return [0] * len(indices)  # nobody draws
        numbers = np.array([_number(index) for index in indices], dtype=np.int64)
        keys: list[int] = sample_keys(self.seed, epoch, numbers).tolist()
        return keys

    def _sample(self, index: Any, key: int) -> Any:
        if self.fetch is not None:
            return self.fetch(index, key)
        if self.uses:
            randomness.seed(key, self.uses)
        if self._many is not None:
            return self._many([index])[0]
        return self.dataset[index]

    def _failure(self, index: Any, error: Exception) -> str:
        index = plain(index)
        try:
            where = describe(self.dataset, index) or str(getattr(error, "filename", None) or "")
        except Exception as second:  # noqa: BLE001 - the first error is the one to tell
            where = f"describe_sample failed too: {text_of(second)}"
        name = f"sample {index!r}" + (f" ({where})" if where else "")
        if isinstance(error, DataError):
            return f"{name}: {str(error).removeprefix(f'{where}: ')}"
        more = ""
        if isinstance(error, IndexError) and isinstance(index, int):
            count = len(self.dataset) if hasattr(self.dataset, "__len__") else None
            if count is not None and index < count:
                more = f"; its len says {count}, so it should have a sample {index}"
        return raised(name, self.dataset, type(self.dataset).__name__, error, more)

    def _collate(self, epoch: int, number: int, samples: list[Any], indices: list[Any]) -> Any:
        if self.uses:
            randomness.seed(mix(self.seed, epoch, number, COLLATE), self.uses)
        try:
            return self._batch_of(samples if self.batched else samples[0])
        except Exception as error:
            if by_a_handler(error):
                raise
            raise DataError(misfit(samples, indices, self.collate_fn, error)) from error

    def _batch_of(self, given: Any) -> Any:
        if not self.default_collate or get_worker_info() is None:
            return self.collate_fn(given)
        try:
            return self.collate_fn(given)
        except (RuntimeError, TypeError):
            # In a worker it stacks into memory that it is given, which lazily negated or
            # conjugated tensors, and those of several dtypes, do not bear. What cannot be sent
            # either, `Work.failed` tells.
            with outside_worker():
                return self.collate_fn(given)


@contextmanager
def outside_worker() -> Iterator[None]:
    """In here, `get_worker_info` gives what it gives in the loop's process."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def plain(index: Any) -> Any:
    """An index as a Python number, where it is a whole one of NumPy or a tensor; else as it is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _number(index: Any) -> int:
    """What stands for an index in a sample's key: a sampler may give names, pairs or the like."""
    index = plain(index)
    if isinstance(index, int):
        return index
    return int.from_bytes(hashlib.blake2b(repr(index).encode(), digest_size=7).digest())
