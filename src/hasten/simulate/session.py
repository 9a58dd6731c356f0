"""One simulation: its devices, what it has seen, and what the kernels ask of it."""

from __future__ import annotations

import math
import re
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current, sparse
from hasten.simulate.backend import on_device
from hasten.simulate.clock import Clock, Queue
from hasten.simulate.frames import locate, user_frame
from hasten.simulate.host import HostMemory, identity_of, version_of
from hasten.simulate.lifetimes import Lifetimes
from hasten.simulate.memory import Memory
from hasten.simulate.randomness import Randomness
from hasten.simulate.records import Copy, Event, MemoryFigures, MismatchInfo, Origin, Sync

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.simulate.plan import Plan
    from hasten.simulate.specs import DeviceSpec

_Tensor = torch.Tensor
_NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_strided = torch.strided
_raw_device = torch._C.TensorBase.device.__get__


class Session:
    """The state behind a `Simulation`."""

    def __init__(
        self,
        *,
        count: int,
        spec: DeviceSpec,
        memory_bytes: int,
        on_mismatch: Callable[[MismatchInfo], str] | None,
        track_origins: bool,
    ) -> None:
        self.count = count
        self.many = count > 1
        self.spec = spec
        self.on_mismatch = on_mismatch
        self.events: list[Event] = []
        self.clock = Clock()
        self.memories = [Memory(index, memory_bytes) for index in range(count)]
        self.random = Randomness(count)
        self.host = HostMemory(self.record)
        self.lifetimes = Lifetimes(self.record, self.clock)
        self.queues: list[list[Queue]] = [[Queue(index, 0)] for index in range(count)]
        self.track_origins = track_origins
        self.initialised = False
        self.sync_debug_mode = 0
        self.bad_fork = False
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}

    def record(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def touch(self) -> None:
        """Initialise the device for this process.

        Raises:
            RuntimeError: the process is a fork of one that had; in CUDA's words.
        """
        if self.bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
                "multiprocessing, you must use the 'spawn' start method"
            )
        self.initialised = True

    # Tensors and devices

    def adopt(self, host: torch.Tensor, index: int, *, track: bool = True) -> torch.Tensor:
        """Make a host tensor that an operator has made a tensor of a device."""
        if host.layout is not _strided:
            if host.layout not in sparse.LAYOUTS:
                raise NotImplementedError(
                    f"the simulated accelerator has no {host.layout} tensors; see docs/simulate.md"
                )
            return sparse.to_device(host, index, lambda part: self.adopt(part, index, track=track))
        if track:
            self.memories[index].take(host)
            if self.lifetimes.active:
                self.lifetimes.taken(host, self.queue(index))
        return on_device(host, index)

    def index_of(self, x: torch.Tensor) -> int:
        """The device of a simulated tensor."""
        return _raw_device(x).index if self.many else 0

    def device_name(self, x: torch.Tensor) -> str:
        """The device of any tensor as CUDA's messages write it."""
        return "cpu" if x.is_cpu else f"cuda:{self.index_of(x)}"

    def raise_if_full(self, error: RuntimeError, index: int) -> None:
        """Raise for an error of the host's allocator what CUDA's would say.

        Raises:
            torch.OutOfMemoryError: the device has not so much memory; in CUDA's words.
            MemoryError: the device would, and this machine, which plays it, has not.
        """
        found = _NO_MEMORY.search(str(error))
        if found is None:
            return
        nbytes = int(found[1])
        memory = self.memories[max(index, 0)]
        if memory.allocated + nbytes > memory.limit_bytes:
            raise memory.refusal(nbytes) from None
        raise MemoryError(
            f"the simulated device has room for {nbytes:,} bytes more, and the machine that plays "
            "it has not; try with less, or a smaller memory_bytes"
        ) from None

    # Time

    def queue(self, index: int) -> Queue:
        """The calling thread's current queue on a device."""
        return current.thread.streams.get(index) or self.queues[index][0]

    def launch(self, plan: Plan | None, index: int, args: Any, result: Any) -> None:
        """Put an operator on the device's queue, at the cost that its sizes suggest."""
        nbytes = 0
        for x in args:
            if isinstance(x, _Tensor) and x.layout is _strided:
                nbytes += x.nbytes
        made = result
        if isinstance(made, (list, tuple)):
            made = made[0] if made else None
        work = 0.0
        if isinstance(made, _Tensor) and made.layout is _strided:
            nbytes += made.nbytes
            if plan is not None and plan.heavy:
                work = 2.0 * _depth(plan, args) * made.numel() / self.spec.flops_per_s
        moved = nbytes / self.spec.memory_bytes_per_s
        queue = self.queue(index)
        self.clock.launch(queue, self.spec.launch_s, work if work > moved else moved)
        if self.lifetimes.active:
            self.lifetimes.used(args, queue)

    def warn_of_wait(self) -> None:
        """Say that the host waits, as ``torch.cuda.set_sync_debug_mode`` asks.

        Raises:
            RuntimeError: the mode is "error".
        """
        if self.sync_debug_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=3)
        elif self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    def wait(self, kind: str, index: int) -> None:
        """The host waits for the current queue of a device: a synchronisation."""
        if self.sync_debug_mode:
            self.warn_of_wait()
        waited = self.clock.wait(self.queue(index).done_s)
        reason = current.thread.reason
        if reason is not None:
            kind = reason
            if reason == "print":
                if current.thread.counted:
                    return
                current.thread.counted = True
        self.host.passed(self.clock.host_s)
        self.events.append(Sync(kind=kind, location=locate(), device=index, waited_s=waited))

    def wait_for(self, until_s: float, kind: str, index: int) -> None:
        """The host waits for a virtual time: an event or a stream that is synchronised."""
        waited = self.clock.wait(until_s)
        self.host.passed(self.clock.host_s)
        self.events.append(Sync(kind=kind, location=locate(), device=index, waited_s=waited))

    # Copies

    def copying(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        raw_target: torch.Tensor,
        raw: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        """Called before the bytes of ``copy_`` go."""
        if self.host.downloads:
            self.host.touched(source)

    def copied(
        self, target: torch.Tensor, source: torch.Tensor, raw: torch.Tensor, non_blocking: bool
    ) -> None:
        """Record a copy and put it on the queue; a blocking one to the host waits."""
        up, down = source.is_cpu, target.is_cpu
        index = self.index_of(source if down else target)
        nbytes = raw.nbytes
        if not up and not down:
            other = self.index_of(source)
            if other == index:
                self.launch(None, index, (raw,), raw)
                return
        host_side = source if up else target
        pinned = self.host.is_pinned(host_side) if (up or down) else False
        rate = self.spec.host_copy_bytes_per_s
        if (up or down) and not pinned:
            rate /= 2
        queue = self.queue(index)
        done_s = self.clock.launch(queue, self.spec.launch_s, nbytes / rate)
        if self.lifetimes.active:
            self.lifetimes.used([x for x in (target, source) if not x.is_cpu], queue)
        if current.thread.reason == "print":
            self.wait("print", index)
            return
        where = locate()
        self.events.append(
            Copy(
                direction="h2d" if up else "d2h" if down else "d2d",
                bytes=nbytes,
                pinned=pinned,
                non_blocking=non_blocking,
                location=where,
                storage_id=identity_of(source),
                offset=int(source.storage_offset()),
                version=version_of(source),
            )
        )
        if down and not non_blocking:
            self.wait("cpu", index)
        elif down:
            self.host.downloading(target, done_s)
        elif up and non_blocking and pinned:
            self.host.passed(self.clock.host_s)
            self.host.uploading(source, done_s)
        elif up:
            self.clock.wait(done_s)  # pageable memory is staged: the host is busy with it

    # Origins

    def made(self, tensor: torch.Tensor, how: str) -> None:
        """Note where a tensor was made, once."""
        key = id(tensor)
        known = self._origins.get(key)
        if known is not None and known[0]() is tensor:
            return
        frame = user_frame(2)
        if frame is None:
            return

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            entry = self._origins.get(key)
            if entry is not None and entry[0] is gone:
                del self._origins[key]

        self._origins[key] = (
            weakref.ref(tensor, forget),
            Origin(file=frame.f_code.co_filename, line=frame.f_lineno, how=how),
        )

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where a tensor was made."""
        known = self._origins.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def figures(self, index: int) -> MemoryFigures:
        """The memory of a device."""
        return self.memories[index].figures()


def _depth(plan: Plan, args: Any) -> float:
    """How many products go into one element of a matrix product's or convolution's result."""
    shaped = [x for x in args if isinstance(x, _Tensor)]
    if len(shaped) < 2:
        return 1.0
    if plan.base.startswith("convolution"):
        weight = shaped[2] if plan.base == "convolution_backward" else shaped[1]
        factor = 2.0 if plan.base == "convolution_backward" else 1.0
        return factor * math.prod(weight.shape[1:])
    left = shaped[1] if plan.base.startswith(("add", "badd")) else shaped[0]
    return float(left.shape[-1]) if left.dim() else 1.0
