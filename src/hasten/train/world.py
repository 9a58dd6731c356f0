"""The processes that train together: who they are, and how they come to agree.

A launcher (torchrun, SLURM's srun) starts them and says by environment variables which of them
each is; nothing here starts any. Agreements are made on the host, beside the device's own work.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hasten import devices
from hasten.devices import runtime
from hasten.errors import HastenError, UsageError
from hasten.train import failing, launch, slurm
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


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place, as torchrun or SLURM's srun tells it; alone where none does.

    Raises:
        UsageError: what they tell contradicts itself.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = _number(environment, "WORLD_SIZE", 1)
        rank = _number(environment, "RANK", 0)
        if size > 1 and "MASTER_ADDR" not in environment:
            raise UsageError(
                "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT, where the"
                " processes meet: start with torchrun, which sets all of them"
            )
        # A launcher that counts no machines: one process on each.
        local_size = _number(environment, "LOCAL_WORLD_SIZE", 1)
        local_rank = _number(environment, "LOCAL_RANK", 0)
        return Place(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=max(local_size, local_rank + 1),
            launched=True,
        )
    step = slurm.step(environment)
    if step is None:
        return Place()
    return Place(
        rank=step.rank,
        size=step.size,
        local_rank=step.local_rank,
        local_size=step.local_size,
        launched=True,
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r} in the environment: a whole number") from None


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started the processes anew, because one of them had failed."""
    return _starts(environment) not in ("", "0")


def _starts(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


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
        return self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.SUM)

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the processes."""
        if self.size == 1:
            return list(values)
        return self._reduced(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MAX)

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
_joined: World | None = None
_end_watch: Callable[[], None] = lambda: None  # noqa: E731


def join(device: torch.device, *, alone: bool = False) -> World:
    """The world of this process: the group is made when it is first asked for, and once.

    A process group that is there already is used as it is, and left at the end.

    Args:
        device: where the process computes: it decides on the backend beside the host's gloo.
        alone: make a group of one, where no launcher tells of several.

    Raises:
        UsageError: two processes of a machine would share a device, or the group cannot be made.
    """
    global _joined, _end_watch  # a process has one process group, and so one world
    if _joined is not None and dist.is_initialized() and (alone or _joined.size > 1):
        return _joined
    here = place()
    if dist.is_available() and dist.is_initialized():
        return _adopted(here)
    if here.size == 1 and not alone:
        return ALONE
    if not dist.is_available():
        raise UsageError("this build of PyTorch has no torch.distributed: train with one process")
    own = runtime.collectives(device)
    backend = "gloo" if own is None else f"cpu:gloo,{device.type}:{own}"
    options: dict[str, Any] = {"backend": backend, "rank": here.rank, "world_size": here.size}
    if own is not None:
        runtime.make_current(device)
        options["device_id"] = device
    if here.size == 1:
        options["store"] = torch._C._distributed_c10d.HashStore()
    elif launch.STORE in os.environ:  # each start of the processes meets anew
        options["store"] = torch._C._distributed_c10d.FileStore(
            f"{os.environ[launch.STORE]}-{_starts()}", here.size
        )
    elif restarted() and here.local_size == here.size:
        options["store"] = _fresh_store(here)
    else:
        slurm.tell_where_to_meet()
    try:
        if "store" not in options and here.local_size == here.size and restarted():
            from torch.distributed.rendezvous import rendezvous as meet

            # torchrun lets them meet where they met before, and find the addresses of the dead.
            # Not so between machines: their launchers count the starts differently.
            store, _, _ = next(meet("env://", here.rank, here.size))
            options["store"] = torch._C._distributed_c10d.PrefixStore(f"hasten/{_starts()}", store)
        dist.init_process_group(**options)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the {here.size} processes did not find each other: {error}") from error
    atexit.register(leave)
    _joined = World(here)
    if here.size > 1:
        _end_watch = failing.watch(here.rank, here.size)
    if own is not None:
        _refuse_shared(_joined, device)
    return _joined


def _fresh_store(here: Place) -> Any:
    """Where processes that torchrun has started anew meet.

    Its store outlives them (PyTorch 2.13), and holds the addresses of those that are gone: by them
    the new ones would look for each other in vain. On one machine all know the count of starts;
    launchers of several count each for itself.
    """
    stores: Any = torch._C._distributed_c10d
    found = stores.TCPStore(
        os.environ["MASTER_ADDR"],
        _number(os.environ, "MASTER_PORT", 0),
        here.size,
        is_master=here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        multi_tenant=True,
    )
    return stores.PrefixStore(f"hasten-{os.environ['TORCHELASTIC_RESTART_COUNT']}", found)


def _adopted(here: Place) -> World:
    """The world of a process group that the script has made itself."""
    global _joined, _end_watch
    size = dist.get_world_size()
    seen = Place(
        rank=dist.get_rank(),
        size=size,
        local_rank=here.local_rank,
        local_size=min(here.local_size, size),
    )
    on_host = "gloo" in dist.get_backend_config()
    _joined = World(seen, None if on_host else dist.new_group(backend="gloo"))
    if size > 1:
        _end_watch = failing.watch(seen.rank, size)
    return _joined


def leave() -> None:
    """Give up the process group that :func:`join` made; again is harmless."""
    global _joined
    _end_watch()
    if _joined is not None and dist.is_initialized():
        with suppress(RuntimeError):  # the others may have gone
            dist.destroy_process_group()
    _joined = None


def tell_failure(error: BaseException) -> bool:
    """Tell the other processes, if there are any, of an error that is going to end this one.

    Returns:
        Whether there is nothing to say here, for the first process says the same.
    """
    if _joined is None or _joined.size == 1:
        return bool(getattr(error, "silent", False))
    return failing.tell(_joined.rank, _joined.size, error)


def device_for(spec: str | torch.device | int | None) -> torch.device:
    """The device that is meant, one for each process of a machine.

    Raises:
        DeviceUnavailable: there is no such device.
        UsageError: there are more processes than devices, or all are told to use the same one.
    """
    device, here = devices.device(spec), place()
    if here.local_size == 1 or runtime.is_host(device):
        return device
    count = runtime.count(device.type)
    if count == 1:
        return device  # a launcher may have given each process one to see
    if isinstance(spec, int) or (spec is not None and ":" in str(spec)):
        raise UsageError(
            f"{here.local_size} processes cannot all use {device}: give device={device.type!r},"
            " and each takes one of its own"
        )
    if here.local_size > count:
        raise UsageError(
            f"{here.local_size} processes on a machine with {count} {device.type} devices: start"
            f" at most {count} there"
        )
    return torch.device(device.type, here.local_rank)


def _refuse_shared(world: World, device: torch.device) -> None:
    """Refuse that two processes compute on one device, which NCCL would do by an obscure error."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "") or os.environ.get("HIP_VISIBLE_DEVICES", "")
    all_of_them = world.gather((socket.gethostname(), seen, str(device)))
    if len(set(all_of_them)) < world.size:
        raise UsageError(
            f"two processes of a machine have the same device ({device}): start at most as many"
            " as there are devices"
        )
