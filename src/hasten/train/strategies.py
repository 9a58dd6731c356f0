"""Strategies: how several devices share out a step's work, and agree on its gradients."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hasten.errors import HastenError, UsageError
from hasten.train import norms
from hasten.train.precision import Precision
from hasten.train.world import World

_SHOWN = 3
NAMES = ("auto", "single", "ddp", "fsdp", "dp")
GROUPED = ("ddp", "fsdp")
"""Those that need a process group, also of one process."""

_SYNC_BUFFERS = next(  # its name since PyTorch 2.13, and before
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
_UNUSED = (
    "{0} of {1} get{2} no gradient: DDP looks for such parameters at each step. If they are not to"
    " be trained, say so before: parameter.requires_grad_(False)"
)
_CHANGING = (
    "{0} got no gradient in this step, and did in the first one: DDP needs the same parameters in"
    " each step. Give every parameter a part in the loss (add 0 * parameter.sum()), or train with"
    " one process"
)


class Strategy:
    """One process on one device: nothing to share out. The others build on it."""

    name = "single"
    in_step = False
    """Whether every forward pass needs all processes, also one without gradients."""
    in_parts = False
    """Whether weights lie in parts over the processes, and are saved so."""
    fixed: Precision | None = None
    """The one precision that modules compute at from when they are adopted, if it is so."""

    def __init__(self) -> None:
        self.counts = True
        """Whether this process's samples of the batch count: not where they repeat another's."""
        self.say: Callable[[str], None] = lambda text: None
        """Tells a person."""

    def words(self) -> str:
        """What a person should know of it at the start; mostly nothing."""
        return ""

    def adopt(self, module: nn.Module, device: torch.device) -> None:
        """Take care of a module that is on its device."""

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Make all processes begin with the same weights."""

    def expect(self, *, last: bool, counts: bool) -> None:
        """Say before a forward pass whether its backward pass is the last before the step, and
        whether this process's samples count."""
        self.counts = counts

    def finish(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before an optimizer steps: its gradients are those of all processes from here on."""

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a value on the device over all processes."""
        return value

    def step_failed(self, optimizer: Optimizer, error: RuntimeError) -> HastenError | None:
        """What it means that an optimizer cannot step, if it comes of the strategy."""
        return None

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """Before evaluation: what the processes hold besides weights is the same from here on."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, this process computes for itself alone."""
        yield

    def compile(self, module: nn.Module, compiled: Callable[[nn.Module], None]) -> None:
        """Compile the module's call in place by the function given."""
        compiled(module)

    def whole(self, nest: Any) -> Any:
        """A nest of tensors as one process would have them; called by all processes."""
        return nest

    def part(self, target: Any, value: Any) -> Any:
        """Of a whole tensor what this process holds where it holds ``target``."""
        return value


class DDP(Strategy):
    """A copy of the model in each process; gradients are averaged while they are computed.

    A module keeps being itself, with its names: its forward pass goes through PyTorch's
    DistributedDataParallel where gradients are wanted. The first step is taken without it, and
    its gradients are averaged afterwards: that tells which parameters get none.
    """

    name = "ddp"

    def __init__(self, world: World, *, sync_batchnorm: bool = False) -> None:
        super().__init__()
        self._world = world
        self._sync_batchnorm = sync_batchnorm
        self._routes: list[Route] = []
        self.last = True
        self.alone = False

    def adopt(self, module: nn.Module, device: torch.device) -> None:
        """See `Strategy`."""
        if self._sync_batchnorm:
            norms.synchronise(module, lambda: self.counts, lambda: self.alone)
        if any(p.requires_grad for p in module.parameters()):
            self._routes.append(Route.of(module, self, device))

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """See `Strategy`."""
        with torch.no_grad():
            for module in modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    from_first(tensor)

    def expect(self, *, last: bool, counts: bool) -> None:
        """See `Strategy`."""
        super().expect(last=last, counts=counts)
        self.last = last

    def finish(self, parameters: Sequence[torch.Tensor]) -> None:
        """See `Strategy`."""
        held = set(map(id, parameters))
        for route in self._routes:
            mine = [p for p in route.trained if id(p) in held]
            if mine:
                route.finish(mine)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """See `Strategy`."""
        return total(value)

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """See `Strategy`. Those of the first process hold, as in each of DDP's own steps."""
        with torch.no_grad():
            for module in modules:
                for buffer in module.buffers():
                    from_first(buffer)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `Strategy`."""
        self.alone = True
        try:
            yield
        finally:
            self.alone = False

    def compile(self, module: nn.Module, compiled: Callable[[nn.Module], None]) -> None:
        """See `Strategy`. What DDP wraps is compiled, not what goes through it."""
        for route in self._routes:
            if route.module is module:
                compiled(route.body)
                return
        compiled(module)

    @property
    def world(self) -> World:
        """Whose gradients are averaged."""
        return self._world


class Route:
    """A module's forward pass, by way of DistributedDataParallel where gradients are wanted."""

    def __init__(self, module: nn.Module, strategy: DDP, device: torch.device) -> None:
        self.module, self.strategy, self.device = module, strategy, device
        self.forward = module.forward
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.body = Body(self)
        self.wrapped: DistributedDataParallel | None = None
        self._first = True
        self._unused = False
        self._whole = False  # the gradients of the last backward pass are those of all processes
        self._went = False

    @classmethod
    def of(cls, module: nn.Module, strategy: DDP, device: torch.device) -> Route:
        """The route that the module has from a run before, or a new one."""
        before = module.__dict__.get("forward")
        if isinstance(before, Route):
            trained = [p for p in module.parameters() if p.requires_grad]
            same = len(trained) == len(before.trained) and all(
                one is other for one, other in zip(trained, before.trained, strict=True)
            )
            if same and before.device == device and before.strategy.world is strategy.world:
                before.strategy = strategy
                return before
            module.__dict__["forward"] = before.forward
        route = cls(module, strategy, device)
        module.__dict__["forward"] = route
        return route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        if self.strategy.alone or not torch.is_grad_enabled():
            return self.body(*args, **kwargs)
        self._went = True
        if self._first:
            self._whole = False
            return self.body(*args, **kwargs)
        if self.wrapped is None:
            self.wrapped = self._wrap()
        self.wrapped.require_backward_grad_sync = self._whole = self.strategy.last
        return self.wrapped(*args, **kwargs)

    def finish(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients where no backward pass has done it."""
        if not self._went:  # by another method of the module's, or of a part of it, or not at all
            average(parameters, self.strategy.world)
            return
        self._went = False
        if self._whole:
            if not self._unused:
                self._refuse_missing(parameters)
            return
        missing = average(parameters, self.strategy.world)
        if missing and not self._unused:
            self._unused = True
            names, kind = self._names(missing), type(self.module).__name__
            self.strategy.say(_UNUSED.format(names, kind, "s" if len(missing) == 1 else ""))
        self._first = False

    def _wrap(self) -> DistributedDataParallel:
        buffers: dict[str, Any] = {_SYNC_BUFFERS: reads_buffers(self.module)}
        index = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(
            self.body,
            device_ids=index,
            init_sync=False,  # the strategy began with the same weights everywhere
            find_unused_parameters=self._unused,
            gradient_as_bucket_view=True,
            **buffers,
        )

    def _refuse_missing(self, parameters: Sequence[torch.Tensor]) -> None:
        if not any(parameter.grad is None for parameter in parameters):
            return
        missing = [parameter for parameter in parameters if parameter.grad is None]
        raise HastenError(_CHANGING.format(self._names(missing)))

    def _names(self, parameters: Sequence[torch.Tensor]) -> str:
        """The first of some parameters' names, and how many more there are."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        shown = ", ".join(names.get(id(p), "?") for p in parameters[:_SHOWN])
        more = len(parameters) - _SHOWN
        return f"{shown} and {more} more" if more > 0 else shown

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is one that no process shares."""
        copied = memo[id(self.module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return types.MethodType, (type(self.module).forward, self.module)


class Body(nn.Module):
    """What DistributedDataParallel calls: the module's own forward pass, without its hooks, which
    have been run already."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.module = route.module
        self._own: Callable[..., Any] = route.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass."""
        return self._own(*args, **kwargs)


def average(parameters: Sequence[torch.Tensor], world: World) -> list[torch.Tensor]:
    """Average gradients over the processes, all at once; one that some process lacks is 0 there.

    Returns:
        The parameters that have none in some process.
    """
    have = world.gather([p.grad is not None for p in parameters])
    anywhere = [any(flags) for flags in zip(*have, strict=True)]
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, wanted in zip(parameters, anywhere, strict=True):
        if not wanted:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
    for gradients in groups.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(world.size)
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    everywhere = [all(flags) for flags in zip(*have, strict=True)]
    return [p for p, there in zip(parameters, everywhere, strict=True) if not there]


def reads_buffers(module: nn.Module) -> bool:
    """Whether a training step may depend on the module's buffers.

    It does not on the running statistics of batch norms, which only evaluation reads.
    """
    return any(
        buffer is not None
        for part in module.modules()
        if not (isinstance(part, _NormBase) and part.training)
        for buffer in part._buffers.values()
    )


def total(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes."""
    summed = value.clone()
    dist.all_reduce(summed)
    return summed


def from_first(tensor: torch.Tensor) -> None:
    """Give the tensor the values that it has in the first process."""
    dense = tensor.detach().contiguous()  # collectives take no other layout
    dist.broadcast(dense, src=0)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def check(name: str, processes: int) -> None:
    """Refuse a strategy of one process for several.

    Raises:
        UsageError: it is that.
    """
    if processes > 1 and name in ("single", "dp"):
        raise UsageError(
            f"strategy={name!r} is for one process, and there are {processes}: give 'ddp' or 'fsdp'"
        )


def make(
    name: str,
    world: World,
    device: torch.device,
    precision: Precision,
    *,
    sync_batchnorm: bool = False,
) -> Strategy:
    """The strategy of a name.

    Raises:
        UsageError: it does not go with the number of processes, the devices or the precision.
    """
    from hasten.train.replicas import DP
    from hasten.train.sharded import FSDP

    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name == "fsdp":
        return FSDP(world, precision, sync_batchnorm=sync_batchnorm)
    if name == "ddp":
        return DDP(world, sync_batchnorm=sync_batchnorm)
    check(name, world.size)
    if sync_batchnorm:
        raise UsageError("sync_batchnorm is for several processes, and there is one")
    return DP(device) if name == "dp" else Strategy()
