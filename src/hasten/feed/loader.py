"""Loader: a drop-in for DataLoader that plans itself, and the same on a device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from hasten.errors import DataError, UsageError
from hasten.feed.attributes import Attributes
from hasten.feed.ending import until_the_end
from hasten.feed.feeds import Feeds
from hasten.feed.keys import SampleRandom
from hasten.feed.ondevice import DeviceLoader, placed
from hasten.feed.options import Options
from hasten.feed.order import Order, Shard, order_of
from hasten.feed.place import Ahead
from hasten.feed.plan import Plan
from hasten.feed.position import (
    Cursor,
    Skips,
    checked,
    counted_by,
    described,
    tell_of_end,
    whole_epoch,
)
from hasten.feed.sources import Item
from hasten.feed.taken import TakenOrder, options_of
from hasten.feed.takeover import TakenFeeds

_STREAM = (
    "the stream {0} would give each of the {1} processes all samples, for its own code alone can"
    " share them out: give a data set with __getitem__ and __len__, or train with one process"
)


class Loader(Attributes):
    """Batches of a data set, as DataLoader gives them, by the plan that suits data and device.

    The order of samples, and the random numbers of a sample's transforms, depend on the seed, the
    epoch and the sample's index alone: never on the plan, the number of workers or the device.
    Iterating to the end moves on to the next epoch; leaving early and iterating again starts the
    same epoch anew (`set_epoch` names one; after `load_state_dict` the next iteration goes on
    from the saved batch).

    The shuffled order is hasten's own, whatever `torch.manual_seed` was given: with `generator` it
    is the one that a DataLoader takes from that generator, and `from_dataloader` keeps a
    DataLoader's in any case.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        plan: str = "auto",
        seed: int = 0,
        device_transform: Callable[[Any, SampleRandom], Any] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes what `torch.utils.data.DataLoader` takes, in the same places, and these:

        Args:
            num_workers: "auto", or a number that is kept: worker processes, 0 for none.
            pin_memory: "auto", or whether batches go through page-locked host memory.
            pin_memory_device: as in DataLoader a name of old: memory is pinned for the accelerator
                that is here, or the device of `to`.
            in_order: False allows any order, of which the usual one is given.
            plan: "auto", "resident", "gather", "threads", "processes" or "inline".
            seed: of the order and of all randomness in samples; 64 bits.
            device_transform: (batch, SampleRandom) -> batch, on the device after the copy.
            on_error: "raise", or "skip" to leave out samples that raise, counting them; not of an
                `IterableDataset`, which cannot be gone on with.
            clock: what plans are measured with, in seconds.

        Raises:
            UsageError: options that contradict each other, or a plan that cannot be.
            DataError: the data set is empty.
        """
        self._clock = clock
        options = Options(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            plan=plan,
            seed=seed,
            device_transform=device_transform,
            on_error=on_error,
        )
        skips, order = Skips(), order_of(options)
        self._begin(options, order, Feeds(options, order, skips.add, clock), skips)

    def __repr__(self) -> str:
        return described(self._options)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of: it begins where this one's next iteration would."""
        return {
            "options": self._options,
            "order": self._order,
            "original": getattr(self._feeds, "original", None),
            "ahead": getattr(self._feeds, "ahead", True),
            "clock": self._clock,
            "position": (self._epoch, self._first),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, order, skips = state["options"], state["order"], Skips()
        self._clock = state["clock"]
        feeds = (
            TakenFeeds(state["original"], options, order, skips.add, ahead=state["ahead"])
            if isinstance(order, TakenOrder)
            else Feeds(options, order, skips.add, self._clock)
        )
        self._begin(options, order, feeds, skips)
        self._epoch, self._first = state["position"]
        self._cursor = Cursor(self._epoch, self._first)

    @classmethod
    def from_dataloader(
        cls,
        loader: DataLoader[Any],
        *,
        plan: str = "auto",
        ahead: bool = True,
        device_transform: Callable[[Any, SampleRandom], Any] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> Loader:
        """Take over a DataLoader and keep its results.

        The batches, and the states of the global random generators (of torch, numpy and random)
        and of the DataLoader's own, are bit for bit those of iterating it, whatever the plan. It
        is left to hasten from here on: do not iterate it yourself at the same time. Attributes
        of it that are set later are heeded when they would be: by the next iteration, but for
        workers that are persistent.

        Args:
            loader: any DataLoader.
            plan: "auto", or one of those that keep its results: "resident" and "gather" for whole
                tensors, "processes", "inline".
            ahead: False takes nothing of the data set before the DataLoader would (its workers
                do), which keeps the results of every data set, also of one that follows from what
                cannot be seen: files, variables of libraries, what is written in large arrays.
            device_transform: see `Loader`.
            on_error: see `Loader`.

        Raises:
            UsageError: it is no DataLoader, or the plan cannot keep its results.
        """
        options = options_of(
            loader, plan=plan, on_error=on_error, device_transform=device_transform
        )
        made, skips, order = cls.__new__(cls), Skips(), TakenOrder(loader)
        made._clock = time.perf_counter
        feeds = TakenFeeds(loader, options, order, skips.add, ahead=ahead)
        made._begin(options, order, feeds, skips)
        return made

    def _begin(
        self, options: Options, order: Order | None, feeds: Feeds | TakenFeeds, skips: Skips
    ) -> None:
        self._options = options
        self._order = order
        self._feeds = feeds
        self._skips = skips
        self._told_end = False
        self._closed = 0  # times
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._epoch = 0
        self._first = 0
        self._cursor = Cursor(0, 0)

    @property
    def num_workers(self) -> int:
        """Threads or processes that make samples for the host, by the plan."""
        return self.plan.workers

    @property
    def skipped(self) -> list[tuple[Any, str]]:
        """(index, message) of samples left out, the first 1,000 of them."""
        return self._skips.first

    @property
    def skipped_count(self) -> int:
        """How often a sample was left out, over all epochs."""
        return self._skips.count

    @property
    def plan(self) -> Plan:
        """How batches on the host are made (`to(device).plan` for a device)."""
        return self._feeds.plan(None)

    def explain(self, device: torch.device | str | None = None) -> str:
        """The plan in a paragraph, for a device or the host, and how it changed on the way."""
        return self._feeds.explain(None if device is None else placed(device))

    def __len__(self) -> int:
        """Batches an epoch.

        Raises:
            TypeError: the data set or sampler has no length.
        """
        if self._order is not None:
            return len(self._order)
        size, count = self._options.batch_size, len(self._options.dataset)
        if size is None:
            return count
        return count // size if self._options.drop_last else -(-count // size)

    def to(self, device: torch.device | str | int) -> DeviceLoader:
        """The same batches on a device, copied there ahead of the loop where that is possible.

        Args:
            device: what `hasten.device` takes, "auto" too.

        Raises:
            DeviceUnavailable: there is no such device here.
            UsageError: it names no device.
        """
        return DeviceLoader(self, placed(device))

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(None, None)

    def shard(self, rank: int, of: int) -> None:
        """From the next iteration on, give one process's part of each batch alone.

        Batches are those of one process, each cut into `of` slices that are as even as can be.
        A process that no sample of a batch is left for gets its first one: see `share`.

        Args:
            rank: of this process, from 0.
            of: processes.

        Raises:
            UsageError: the data set or the options give nothing that can be cut.
        """
        if of > 1 and self._order is None:
            raise UsageError(_STREAM.format(type(self.dataset).__name__, of))
        if of > 1:
            self._options.check_cut()
        if of > 1 and isinstance(self._order, TakenOrder):
            raise UsageError(
                "a DataLoader that was taken over gives what it gives; give the run the DataLoader"
                " itself, whose batches it shares out, or a hasten.Loader of the data set"
            )
        if self._order is not None:
            self._order.shard = Shard(rank, of)

    @property
    def share(self) -> tuple[int, int]:
        """Of the batch given last: samples that are this process's, and those of all processes."""
        assert self._order is not None
        whole = self._order.whole(self._cursor.batch - 1)
        start, end = self._order.shard.bounds(whole)
        return end - start, whole

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration gives, from its first batch.

        A position taken from `load_state_dict` in that very epoch is kept.

        Raises:
            UsageError: it is no whole number from 0 on.
        """
        epoch = whole_epoch(epoch)
        anew = epoch != self._epoch
        if anew:
            self._first = 0
            if self._order is not None:
                self._order.ended()
        self._epoch = epoch
        self._cursor = Cursor(epoch, self._first)
        if isinstance(self._order, TakenOrder):
            self._order.set_epoch(epoch, anew=anew)

    def state_dict(self) -> dict[str, Any]:
        """The position: {"epoch", "batch", "seed"}, batch = batches given in this epoch so far.

        Within an epoch also what that number goes by: "batch_size", "shuffle", and of a stream its
        "workers".
        With a generator of the user's, "generator" holds its state at the start of the epoch, and
        "samplers" what samplers of his have in a `state_dict` of their own.
        """
        cursor = self._cursor
        state = {"epoch": cursor.epoch, "batch": cursor.batch, "seed": self.seed}
        if cursor.batch:
            state.update(counted_by(self._options))
        if self._order is not None:
            state.update(self._order.state(cursor.batch))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on from a position, without touching the samples before it.

        A stream (IterableDataset) has to be read up to it.

        Raises:
            UsageError: it is no position of this Loader: it belongs to another seed, or to
                another data set.
        """
        self._heed()
        epoch, batch = checked(state, self._options)
        if self._order is not None:
            self._order.load_state({**state, "epoch": epoch, "batch": batch})
        self._epoch, self._first = epoch, batch
        self._cursor = Cursor(epoch, batch)

    def close(self) -> None:
        """End iterations under way, worker threads and processes; give up memory on devices."""
        self._closed += 1
        for iterator in list(self._live):
            if not iterator.gi_running:  # in another thread: it ends there, at its next batch
                iterator.close()
        self._feeds.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _iterate(self, device: torch.device | None, ahead: Ahead | None) -> Iterator[Any]:
        self._heed()
        cursor = self._cursor = Cursor(self._epoch, self._first)
        self._first = 0
        items = self._feeds.items(device, ahead, cursor.epoch, cursor.batch)
        iterator = self._run(items, cursor)
        self._live.add(iterator)
        return iterator

    def _heed(self) -> None:
        """Stand for a DataLoader as it is by now."""
        feeds = self._feeds
        anew = feeds.renewed(self._first) if isinstance(feeds, TakenFeeds) else None
        if anew is not None:
            self._options, self._order, self._feeds = anew

    def _run(self, items: Generator[Item, None, None], cursor: Cursor) -> Iterator[Any]:
        left_out, empty, closed = self._skips.count, True, self._closed
        try:
            for number, batch, _ in until_the_end(items):
                if self._closed != closed:
                    raise DataError("the Loader was closed by another thread than the loop's")
                cursor.batch, empty = number + 1, False
                yield batch
            if self._skips.count > left_out:
                self._skips.tell(left_out, empty=empty, silent=self._feeds.silent)
            elif not self._told_end and not self._skips.count:  # batches left out are no lie
                self._told_end = tell_of_end(self, self._options, cursor)
            if self._cursor is cursor:
                self._epoch = cursor.epoch + 1
                self._cursor = Cursor(self._epoch, 0)
                if self._order is not None:
                    self._order.ended()
        finally:
            items.close()
