"""Scripts for several processes, rehearsed as a world of one: this process is rank 0 of 1.

The process group is PyTorch's fake one whatever backend is asked for, `mp.spawn` runs its first
process here, and `DistributedDataParallel` passes through to its module after its own checks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from hasten.script.rehearsal.places import Territory

# What a launcher such as torchrun sets; given to scripts that read it without asking.
_LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


class _Done:
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        """It is."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class World:
    """Stands in for the launcher and the other processes.

    Attributes:
        used: whether the script made a process group, asked for a rank or spawned processes.
    """

    def __init__(self, territory: Territory) -> None:
        self._territory = territory
        self._backend = "nccl"
        self.used = False

    def install(self) -> None:
        """Stand in for the life of this process."""
        self._install_environment()
        self._install_spawn()
        if dist.is_available():
            self._install_group()
            self._install_collectives()
            self._install_parallel()

    def _install_environment(self) -> None:
        kind: Any = type(os.environ)
        plain = kind.__getitem__

        def getitem(this: Any, key: Any) -> str:
            try:
                return str(plain(this, key))
            except KeyError:
                # `os.environ.get` and `in` are honest: they are asked by scripts that can do
                # without a launcher. Only the script's own `os.environ["RANK"]` is answered.
                file = sys._getframe(1).f_code.co_filename
                if this is os.environ and key in _LAUNCHED and self._territory.holds(file):
                    self.used = True
                    return _LAUNCHED[key]
                raise

        kind.__getitem__ = getitem

    def _install_spawn(self) -> None:
        def spawn(fn: Callable[..., Any], args: Any = (), *rest: Any, **kwargs: Any) -> None:
            self.used = True
            fn(0, *args)

        setattr(torch.multiprocessing, "spawn", spawn)  # noqa: B010
        setattr(torch.multiprocessing, "start_processes", spawn)  # noqa: B010

    def _install_group(self) -> None:
        plain, plain_backend = dist.init_process_group, dist.get_backend

        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            self.used = True
            self._backend = str(backend or "nccl").lower()
            plain("fake", store=FakeStore(), rank=0, world_size=1)

        def get_backend(group: Any = None) -> Any:
            known = plain_backend(group)
            return self._backend if known == "fake" else known

        self._replace("init_process_group", init_process_group)
        self._replace("get_backend", get_backend)
        self._replace("is_nccl_available", lambda: True)

    def _install_collectives(self) -> None:
        def nothing(*args: Any, **kwargs: Any) -> Any:
            _joined()
            return _Done() if kwargs.get("async_op") else None

        def first(targets: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            if targets:
                _copy(targets[0], source)
            return nothing(**kwargs)

        def whole(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                target.copy_(source.reshape(target.shape))
            return nothing(**kwargs)

        def from_list(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            if sources:
                _copy(target, sources[0])
            return nothing(**kwargs)

        def to_list(source: Any, targets: Any = None, *args: Any, **kwargs: Any) -> Any:
            return first(targets, source, **kwargs)

        def objects(targets: Any, source: Any, *args: Any, **kwargs: Any) -> None:
            targets[0] = source

        def gathered(source: Any, targets: Any = None, *args: Any, **kwargs: Any) -> None:
            if targets:
                targets[0] = source

        for name in ("all_reduce", "reduce", "broadcast", "barrier", "broadcast_object_list"):
            self._replace(name, nothing)
        self._replace("monitored_barrier", nothing)
        self._replace("all_gather", first)
        self._replace("all_gather_into_tensor", whole)
        self._replace("reduce_scatter_tensor", whole)
        self._replace("reduce_scatter", from_list)
        self._replace("scatter", from_list)
        self._replace("gather", to_list)
        self._replace("all_gather_object", objects)
        self._replace("gather_object", gathered)

    def _replace(self, name: str, function: Any) -> None:
        for module in (dist, dist.distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, function)

    def _install_parallel(self) -> None:
        kind: Any = nn.parallel.DistributedDataParallel

        def init(
            this: Any, module: nn.Module, device_ids: Any = None, *args: Any, **kw: Any
        ) -> None:
            _joined()
            nn.Module.__init__(this)
            parameters = [p for p in module.parameters() if p.requires_grad]
            if not parameters:
                raise RuntimeError(
                    "DistributedDataParallel is not needed when a module doesn't have any "
                    "parameters that require a gradient."
                )
            devices = {p.device for p in module.parameters()}
            if device_ids and {device.type for device in devices} == {"cpu"}:
                raise ValueError(
                    "DistributedDataParallel device_ids and output_device arguments only work "
                    "with single-device/multiple-device GPU modules or CPU modules, but got "
                    f"device_ids {device_ids}, output_device {kw.get('output_device')}, and module "
                    f"parameters {devices}."
                )
            this.module, this.device_ids = module, device_ids
            this.device = next(iter(devices))
            this.output_device = kw.get("output_device")
            this.require_backward_grad_sync = this.require_forward_param_sync = True
            this.find_unused_parameters = kw.get("find_unused_parameters", False)
            this.static_graph = kw.get("static_graph", False)

        def forward(this: Any, *inputs: Any, **named: Any) -> Any:
            if this.device_ids:  # it moves its inputs, as the real one does
                inputs, named = _moved(inputs, this.device), _moved(named, this.device)
            return this.module(*inputs, **named)

        kind.__init__, kind.forward = init, forward
        kind.join = lambda *args, **kwargs: contextlib.nullcontext()
        kind.register_comm_hook = kind._set_static_graph = lambda *args, **kwargs: None


def _joined() -> None:
    """Ask, as each collective does, whether there is a process group."""
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
