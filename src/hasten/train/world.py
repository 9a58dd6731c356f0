"""The processes that train together: which of them this one is, and how they meet.

A launcher (torchrun, SLURM's srun) starts them and says by environment variables which of them
each is; nothing here starts any.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hasten import devices
from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.train import failing, launch, parting, slurm
from hasten.train.together import ALONE, ElsewhereError, Place, World

__all__ = [
    "ALONE",
    "ElsewhereError",
    "Place",
    "World",
    "advice",
    "device_for",
    "join",
    "leave",
    "place",
    "restarted",
    "tell_failure",
]


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


_EARLY_S = 5.0
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


_SET = (
    "A machine that is lost cannot be replaced: torchrun's launchers share a store (PyTorch 2.13),"
    " and the one that stays does not tell a new one where to meet. Start torchrun on all machines"
    " with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
)


def advice(environment: Mapping[str, str] = os.environ) -> str | None:
    """What a person should know of how the processes were started, before it is too late."""
    here = place(environment)
    starts_anew = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") not in ("", "0")
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _SET if here.local_size < here.size and starts_anew and shared else None


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
    atexit.register(parting.settle)  # whether or not the script gives the group up
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
        parting.settle()
    _joined = None


def tell_failure(error: BaseException) -> bool:
    """Tell the other processes, if there are any, of an error that is going to end this one.

    Returns:
        Whether there is nothing to say here, for the first process says the same.
    """
    if _joined is not None and _joined.size > 1:
        return failing.tell(_joined.rank, _joined.size, error)
    here = place()
    met = here.size == 1 or not dist.is_available() or dist.is_initialized()
    store = None if met else _store_of_launcher(here)
    if store is not None:  # they have not met: all may have been called wrongly alike
        return failing.tell_early(here.rank, here.size, error, store)
    return bool(getattr(error, "silent", False))


def _store_of_launcher(here: Place) -> Any:
    """What a launcher keeps for its processes, before they have met; None where there is nothing
    yet that they could tell each other by."""
    stores: Any = torch._C._distributed_c10d
    if launch.STORE in os.environ:
        return stores.FileStore(f"{os.environ[launch.STORE]}-{_starts()}", here.size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return stores.TCPStore(
            os.environ["MASTER_ADDR"],
            _number(os.environ, "MASTER_PORT", 0),
            here.size,
            is_master=False,
            timeout=timedelta(seconds=_EARLY_S),
        )
    except (RuntimeError, KeyError):
        return None


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
