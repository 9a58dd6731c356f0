"""What a Loader was asked for: DataLoader's options and hasten's, checked against each other."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from hasten.errors import DataError, UsageError
from hasten.feed.plan import NAMES

_LONGEST_S = 1_000_000  # of a timeout; the system's calls take no more than 2^31 ms


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `Loader`, where they are described."""

    dataset: Any
    batch_size: int | None
    shuffle: bool | None
    sampler: Any
    batch_sampler: Any
    num_workers: int | Literal["auto"]
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool | Literal["auto"]
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool | None
    pin_memory_device: str
    in_order: bool
    plan: str
    seed: int
    device_transform: Callable[[Any, Any], Any] | None
    on_error: str

    @property
    def iterable(self) -> bool:
        """The data set is a stream, not a map from indices."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def batched(self) -> bool:
        """Samples are collated into batches (`batch_size=None` says not)."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def chosen(self) -> bool:
        """The plan is hasten's to choose, and so to change."""
        return self.plan == "auto" and self.num_workers == "auto" and not self.iterable

    @property
    def own_order(self) -> bool:
        """The order is hasten's, a function of (seed, epoch) alone."""
        given = (self.sampler, self.batch_sampler, self.generator if self.shuffle else None)
        return self.batched and all(value is None for value in given)

    def check_cut(self) -> None:
        """Refuse what gives no batches that processes could share out.

        Raises:
            UsageError: it says why.
        """
        if not self.batched:
            raise UsageError("batch_size=None makes no batches that processes could share out")
        sampler = self.sampler or getattr(self.batch_sampler, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            raise UsageError(
                "the Loader has a DistributedSampler, and hasten shares out the batches itself:"
                " leave the sampler out (shuffle=True), and give the batch size of all processes"
            )
        if self.on_error == "skip":
            raise UsageError(
                'on_error="skip" leaves out samples of one process and not of another, whose'
                ' batches would no longer match: use on_error="raise" with several processes'
            )

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_workers", "prefetch_factor", "seed"):
            value = getattr(self, name)
            if isinstance(value, np.integer):  # as numpy.arange and argument parsers give them
                object.__setattr__(self, name, int(value))
        self._check_kinds()
        self._check_values()
        self._check_dataset()
        self._check_workers()
        self._check_plan()

    def _check_kinds(self) -> None:
        for name in ("collate_fn", "worker_init_fn", "device_transform"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(f"{name} is {value!r}; it must be a function, or left out")
        if self.device_transform is not None and not _takes_two(self.device_transform):
            raise UsageError(
                f"device_transform is {self.device_transform!r}, which does not take two "
                "arguments: it is called as f(batch, rng), with the whole batch on the device and "
                "a SampleRandom for what it draws, and gives the new batch"
            )
        for name in ("shuffle", "drop_last", "persistent_workers", "in_order"):
            value = getattr(self, name)
            unset = value is None and name in ("shuffle", "persistent_workers")
            if not unset and not isinstance(value, (bool, np.bool_)) and value not in (0, 1):
                raise UsageError(f"{name} is {value!r}; it can be True or False")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise UsageError(
                f"generator is {self.generator!r}; it must be a torch.Generator. A number to "
                "start from is `seed`"
            )
        for name in ("sampler", "batch_sampler"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__iter__"):
                wanted = "indices" if name == "sampler" else "lists of indices"
                raise UsageError(f"{name} is {value!r}; it must give {wanted} when it is iterated")
        if not isinstance(self.pin_memory_device, str):
            raise UsageError(
                f"pin_memory_device is {self.pin_memory_device!r}; it can be a device's name, and "
                "is best left out: memory is pinned for the accelerator that is here"
            )
        context = self.multiprocessing_context
        if isinstance(context, str) and context not in multiprocessing.get_all_start_methods():
            raise UsageError(
                f"multiprocessing_context is {context!r}; this system has "
                f"{', '.join(multiprocessing.get_all_start_methods())}"
            )

    def _check_values(self) -> None:
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"batch_size is {size!r}; it must be a whole number of at least 1")
        if self.batch_sampler is not None and (
            size != 1 or self.shuffle or self.sampler is not None or self.drop_last
        ):
            raise UsageError(
                "batch_sampler makes the batches itself: leave out batch_size, shuffle, sampler "
                "and drop_last"
            )
        if self.sampler is not None and self.shuffle:
            raise UsageError("sampler sets the order: leave out shuffle, or the sampler")
        if size is None and self.batch_sampler is None and self.drop_last:
            raise UsageError("batch_size=None makes no batches, so drop_last has no meaning")
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise UsageError(f"seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1")
        if not isinstance(self.timeout, (int, float, np.number)) or not (
            0 <= self.timeout <= _LONGEST_S
        ):
            raise UsageError(
                f"timeout is {self.timeout!r}; it must be seconds, from 0 (wait for ever) to "
                f"{_LONGEST_S:,}"
            )
        if self.on_error not in ("raise", "skip"):
            raise UsageError(f'on_error is {self.on_error!r}; it can be "raise" or "skip"')
        if self.pin_memory not in (True, False, "auto"):
            raise UsageError(f'pin_memory is {self.pin_memory!r}; it can be True, False or "auto"')

    def _check_dataset(self) -> None:
        if not self.iterable:
            if not hasattr(self.dataset, "__getitem__") and not hasattr(self.dataset, "fetch"):
                raise UsageError(
                    f"{type(self.dataset).__name__} is no data set: it needs __getitem__ and "
                    "__len__ (map-style), or to be an IterableDataset"
                )
            ordered = self.sampler is not None or self.batch_sampler is not None
            if not ordered and hasattr(self.dataset, "__len__") and len(self.dataset) == 0:
                raise DataError(
                    f"the data set ({type(self.dataset).__name__}) is empty: its len is 0"
                )
            if not ordered and not hasattr(self.dataset, "__len__"):
                raise UsageError(
                    f"{type(self.dataset).__name__} has no __len__: add it, or give a sampler"
                )
            return
        for name in ("sampler", "batch_sampler"):
            if getattr(self, name) is not None:
                raise UsageError(f"an IterableDataset has its own order: leave out {name}")
        if self.shuffle:
            raise UsageError("an IterableDataset has its own order: leave out shuffle")
        if self.on_error == "skip":
            raise UsageError(
                "an IterableDataset that has raised cannot be asked for its next sample: leave out "
                'on_error="skip", and pass over what fails in its __iter__'
            )

    def _check_workers(self) -> None:
        workers = self.num_workers
        whole = isinstance(workers, int) and not isinstance(workers, bool)
        if workers != "auto" and (not whole or workers < 0):
            raise UsageError(f'num_workers is {workers!r}; it can be "auto", or 0 or more')
        if workers == 0 and self.prefetch_factor is not None:
            raise UsageError(
                "prefetch_factor is for worker processes: leave it out, or num_workers=0"
            )
        if workers == 0 and self.persistent_workers:
            raise UsageError(
                "persistent_workers is for worker processes: leave it out, or num_workers=0"
            )
        if workers == 0 and self.multiprocessing_context is not None:
            raise UsageError(
                "multiprocessing_context is for worker processes: leave it out, or num_workers=0"
            )
        factor = self.prefetch_factor
        if factor is not None and (
            isinstance(factor, bool) or not isinstance(factor, int) or factor < 1
        ):
            raise UsageError(
                f"prefetch_factor is {factor!r}; it must be a whole number of at least 1"
            )

    def _check_plan(self) -> None:
        if self.plan not in ("auto", *NAMES):
            raise UsageError(f"no plan {self.plan!r}; there are auto, {', '.join(NAMES)}")
        workers = self.num_workers
        if self.plan == "auto" or workers == "auto":
            return
        has_workers = self.plan in ("threads", "processes")
        if has_workers != (workers > 0):
            raise UsageError(
                f"plan={self.plan!r} with num_workers={workers}: "
                + ("it needs workers" if has_workers else "it has none")
                + '; leave one of the two out ("auto")'
            )


def _takes_two(function: Any) -> bool:
    try:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        inspect.signature(called).bind(None, None)
    except ValueError:  # one of C that does not say what it takes
        return True
    except TypeError:
        return False
    return True
