"""The processes that train together, and how they come to agree.

Agreements are made on the host, beside the device's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hasten.errors import HastenError, UsageError
from hasten.train import failing
from hasten.train.failing import lost_a_peer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of the processes this one is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of this machine."""
    local_size: int = 1
    launched: bool = False
    """Whether a launcher said so."""

    def __post_init__(self) -> None:
        inside = 0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size
        if not inside or self.local_size > self.size:
            raise UsageError(
                f"rank {self.rank} of {self.size}, on its machine {self.local_rank} of"
                f" {self.local_size}, cannot be; start with torchrun, or mend RANK, WORLD_SIZE,"
                " LOCAL_RANK and LOCAL_WORLD_SIZE"
            )


class ElsewhereError(HastenError):
    """Another process of the run failed.

    Attributes:
        silent: whether there is nothing to tell: the first process tells it.
        told: the others are not told of what came of another one's error.
    """

    silent = False
    told = True


class World:
    """The processes of a run. Every method must be called by all of them, in the same order.

    Attributes:
        rank: of this process, from 0; the first one speaks and writes for all.
        size: processes.
        local_rank: among those of this machine.
        local_size: on this machine.
    """

    def __init__(self, here: Place, group: Any = None) -> None:
        self.rank, self.size = here.rank, here.size
        self.local_rank, self.local_size = here.local_rank, here.local_size
        self._group = group

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def apart(self) -> World:
        """The same processes with a group of their own: what they agree on there may happen
        beside other agreements, in another thread."""
        if self.size == 1:
            return self
        here = Place(
            rank=self.rank,
            size=self.size,
            local_rank=self.local_rank,
            local_size=self.local_size,
        )
        return World(here, dist.new_group(backend="gloo"))

    def barrier(self) -> None:
        """Wait until all processes have come here."""
        if self.size > 1:
            self.most([0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over the processes, in float64."""
        if self.size == 1:
            return list(values)
        return self._reduced(
            torch.tensor(values, dtype=torch.float64, device="cpu"), dist.ReduceOp.SUM
        )

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the processes."""
        if self.size == 1:
            return list(values)
        return self._reduced(
            torch.tensor(values, dtype=torch.int64, device="cpu"), dist.ReduceOp.MAX
        )

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of the processes."""
        return bool(self.most([int(flag)])[0])

    def all(self, flag: bool) -> bool:
        """Whether it holds for all of them."""
        return not self.any(not flag)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the host, summed over the processes, in place."""
        if self.size > 1:
            with self.reaching():
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def first(self, value: T) -> T:
        """The value that the first process has."""
        if self.size == 1:
            return value
        box = [value if self.is_main else None]
        with self.reaching():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.reaching():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def by_main(self, act: Callable[[], T]) -> T | None:
        """Let the first process do something; the others wait, and get None.

        Raises:
            ElsewhereError: in the others, where it fails.
        """
        if self.size == 1:
            return act()
        if not self.is_main:
            self.heed(None)
            return None
        return self._heeded(act)

    def by_all(self, act: Callable[[], T]) -> T:
        """Do something that all do; where one of them fails, all of them end.

        Raises:
            ElsewhereError: in those that did not fail.
        """
        return self._heeded(act)

    def _heeded(self, act: Callable[[], T]) -> T:
        """Do something that the others wait for; they hear of its error."""
        try:
            result = act()
        except BaseException as error:
            self.heed(error)
            raise
        self.heed(None)
        return result

    def heed(self, error: BaseException | None) -> None:
        """Tell the others of an error, or hear of theirs.

        Raises:
            ElsewhereError: another process has one, and this one has none.
        """
        if self.size == 1:
            return
        if not self.any(error is not None):
            return
        told = self.gather(None if error is None else _told(error))
        if error is not None:
            error.told = True  # type: ignore[attr-defined]  # the others know already
        failed = [(rank, said) for rank, said in enumerate(told) if said is not None]
        if failed and error is None:
            rank, (text, status) = failed[0]
            failure = ElsewhereError(f"rank {rank} failed: {text}" if rank else text)
            failure.exit_status = status  # type: ignore[misc]
            failure.silent = not self.is_main
            raise failure

    def local_first(self, act: Callable[[], T]) -> T:
        """Let the first process of each machine do something before the others do it too.

        What it downloads or writes to a cache is then there for them.

        Raises:
            ElsewhereError: in the others, where it fails.
        """
        if self.local_rank != 0:
            self.heed(None)
            return act()
        return self._heeded(act)

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Inside, it is told plainly when another process cannot be reached any more.

        Raises:
            ElsewhereError: instead of what gloo or NCCL raised.
        """
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not lost_a_peer(error):
                raise
            told = failing.found(self.size)
            failure = ElsewhereError(
                f"rank {told[0]} failed: {told[1]}"
                if told is not None
                else f"rank {self.rank} lost its connection to the others: one of them has ended;"
                " what it said is on its standard error, or in the run's folder ranks/"
            )
            failure.silent = not self.is_main
            raise failure from error

    def _reduced(self, tensor: torch.Tensor, operation: Any) -> list[Any]:
        with self.reaching():
            dist.all_reduce(tensor, op=operation, group=self._group)
        found: list[Any] = tensor.tolist()
        return found


def _told(error: BaseException) -> tuple[str, int]:
    return str(error) or type(error).__name__, getattr(error, "exit_status", 1)


ALONE = World(Place())
