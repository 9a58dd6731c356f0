"""Begin and end a simulation: ``with hasten.simulate() as simulation:``."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch._subclasses.fake_tensor
import torch.nested
import torch.nn.parallel._functions
import torch.nn.parallel.comm
import torch.utils._device
import torch.utils.data

from hasten.errors import UsageError
from hasten.simulate import (
    allocator,
    autocast,
    backend,
    backward,
    compiling,
    cuda_module,
    current,
    operators,
    parallel,
    parts,
    persistence,
    randomness,
    streams,
    tensors,
)
from hasten.simulate.naming import Naming, backend_device, index_of_name, named_refusals
from hasten.simulate.patches import Patches
from hasten.simulate.session import Session
from hasten.simulate.specs import DeviceSpec, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from hasten.simulate.clock import Clock
    from hasten.simulate.records import Event, MemoryFigures, MismatchInfo, Origin

_lock = threading.Lock()


class Simulation:
    """A running simulation, as ``with hasten.simulate() as simulation`` gives it."""

    def __init__(
        self,
        *,
        devices: int,
        spec: str | DeviceSpec,
        memory_bytes: int | None,
        on_mismatch: Callable[[MismatchInfo], str] | None,
        track_origins: bool,
    ) -> None:
        if not 1 <= devices <= backend.MOST_DEVICES:
            raise UsageError(
                f"a simulation has 1 to {backend.MOST_DEVICES} devices, and {devices} were asked"
            )
        self.devices = devices
        self.spec = spec_of(spec)
        self._memory_bytes = self.spec.memory_bytes if memory_bytes is None else memory_bytes
        if self._memory_bytes <= 0:
            raise UsageError(f"memory_bytes must be above 0, got {self._memory_bytes}")
        self._track_origins = track_origins
        self._on_mismatch = on_mismatch
        self._session: Session | None = None
        self._patches = Patches()
        self._mode: Any = Naming()
        self._threads = True

    def _open(self) -> Session:
        if self._session is None:
            raise UsageError("this simulation has not begun; use it in `with hasten.simulate()`")
        return self._session

    @property
    def events(self) -> list[Event]:
        """What happened, in order: `Sync`, `Copy`, `Mismatch` and `Hazard` records."""
        return self._open().events

    @property
    def clock(self) -> Clock:
        """The virtual clock, in seconds, and the number of launches."""
        return self._open().clock

    @property
    def on_mismatch(self) -> Callable[[MismatchInfo], str] | None:
        """Called when devices mix where CUDA refuses it; returns "raise" or "repair"."""
        return self._open().on_mismatch

    @on_mismatch.setter
    def on_mismatch(self, callback: Callable[[MismatchInfo], str] | None) -> None:
        self._on_mismatch = callback
        if self._session is not None:
            self._session.on_mismatch = callback

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Where a tensor was made; None where it is not known.

        Raises:
            UsageError: the simulation was begun without ``track_origins=True``.
        """
        session = self._open()
        if not session.track_origins:
            raise UsageError("origins are not tracked; use hasten.simulate(track_origins=True)")
        return session.origin(tensor)

    def memory(self, device: int | str | torch.device = 0) -> MemoryFigures:
        """The memory figures of a device, in bytes."""
        index = device if isinstance(device, int) else index_of_name(device)
        if index is None or not 0 <= index < self.devices:
            raise UsageError(f"no simulated device {device}; there are {self.devices}")
        return self._open().figures(index)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in page-locked memory."""
        return self._open().host.is_pinned(tensor)

    def __enter__(self) -> Simulation:
        with _lock:
            if current.session is not None:
                raise UsageError(
                    "a simulation is running already; there is one at a time in a process"
                )
            if self._session is not None:
                raise UsageError("this simulation has been used; make another")
            backend.install()
            self._session = Session(
                count=self.devices,
                spec=self.spec,
                memory_bytes=self._memory_bytes,
                on_mismatch=self._on_mismatch,
                track_origins=self._track_origins,
            )
            current.session = self._session
        try:
            operators.register()
            autocast.register()
            backend.open_module()
            self._patch()
            # One thread runs a backward pass: the engine has queues only for the devices that it
            # saw at the first backward of the process, which may lie before the simulation.
            self._threads = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
            self._mode.__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        torch._C._set_multithreading_enabled(self._threads)
        self._close()

    def _close(self) -> None:
        device = torch.get_default_device()
        if index_of_name(device) is not None:
            torch.set_default_device(None)  # which a script may have left on the device
        self._patches.undo()
        backend.close_module()
        current.session = None
        current.thread.__init__()  # type: ignore[misc]

    def _patch(self) -> None:
        patch = self._patches
        patch.set_all(torch.Tensor, tensors.PROPERTIES)
        patch.set_all(torch.UntypedStorage, persistence.UNTYPED)
        patch.set_all(torch.cuda, cuda_module.cuda_functions())
        patch.set_all(torch.accelerator, cuda_module.accelerator_functions())
        patch.set_all(torch.nn.parallel.comm, parallel.COMM)
        patch.set_all(torch.nn.parallel._functions, parallel.FUNCTIONS)
        patch.set(
            torch.serialization, "location_tag", persistence.tag(torch.serialization.location_tag)
        )
        for module, functions in cuda_module.module_functions().items():
            patch.set_all(module, functions)
        patch.set_all(torch._C, allocator.functions())
        patch.set_all(torch.cuda.nvtx, parts.nvtx_functions())
        patch.set(torch, "Generator", randomness.generator_class())
        patch.set(torch, "Stream", streams.Stream)
        patch.set(torch, "Event", streams.Event)
        patch.set(torch.version, "cuda", torch.version.cuda or "12.8")
        patch.set(torch.backends.cuda, "is_built", lambda: True)
        patch.set(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        patch.set(torch.backends.cudnn, "is_available", lambda: True)
        patch.set(torch.backends.cudnn, "version", lambda: 91002)
        patch.set(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        patch.set_all(torch, autocast.functions())
        patch.set(torch, "compile", compiling.compile_)
        fakes = torch._subclasses.fake_tensor.FakeTensorConverter
        patch.set(fakes, "from_real_tensor", compiling.no_fakes(fakes.from_real_tensor))
        for name in ("nested_tensor", "as_nested_tensor"):
            patch.set(torch.nested, name, named_refusals(getattr(torch.nested, name)))
        self._patch_defaults()
        backward.patch(self._patches, self._mode)
        self._patch_threads()

    def _patch_defaults(self) -> None:
        context = torch.utils._device.DeviceContext
        begin = context.__init__
        default = torch.get_default_device

        def init(self: Any, device: Any) -> None:
            begin(self, device)
            self.device = backend_device(self.device)

        def get_default_device() -> torch.device:
            found = default()
            index = index_of_name(found)
            return found if index is None else torch.device("cuda", index)

        self._patches.set(context, "__init__", init)
        choose_type = torch.set_default_tensor_type

        def set_default_tensor_type(t: Any) -> None:
            name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
            if "cuda" not in name:
                torch.set_default_device(None)
                choose_type(t)
                return
            torch.set_default_dtype(tensors.DTYPES[name.rsplit(".", 1)[-1]])
            torch.set_default_device("cuda")

        self._patches.set(torch, "get_default_device", get_default_device)
        self._patches.set(torch, "set_default_tensor_type", set_default_tensor_type)

    def _patch_threads(self) -> None:
        begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        mode, session = self._mode, self._session

        def bootstrap(self: threading.Thread) -> None:
            if current.session is not session:
                begin(self)
                return
            torch._C._set_multithreading_enabled(False)
            with mode:
                begin(self)

        self._patches.set(threading.Thread, "_bootstrap_inner", bootstrap)


def simulate(
    devices: int = 1,
    *,
    spec: str | DeviceSpec = "h100",
    memory_bytes: int | None = None,
    on_mismatch: Callable[[MismatchInfo], str] | None = None,
    track_origins: bool = False,
) -> Simulation:
    """Return a context manager in which ``cuda`` is a device made of software.

    Inside it `torch.cuda` is available. Tensors on ``cuda`` are computed by the CPU, refuse to
    meet tensors of other devices as CUDA does, and wait for nobody until something synchronises.

    Args:
        devices: how many devices there are, ``cuda:0`` onwards.
        spec: the device's figures, by name (``t4``, ``rtx4090``, ``a100``, ``h100``) or your own.
        memory_bytes: memory of each device; by default as the spec says.
        on_mismatch: called where devices mix and CUDA would refuse; it returns ``"raise"``, or
            ``"repair"`` to move the operands to the device and go on.
        track_origins: remember where each tensor was made, for `Simulation.origin`.

    Raises:
        UsageError: a value is out of range, or a simulation is running already.
    """
    return Simulation(
        devices=devices,
        spec=spec,
        memory_bytes=memory_bytes,
        on_mismatch=on_mismatch,
        track_origins=track_origins,
    )


def _in_child() -> None:
    if current.session is not None and current.session.initialised:
        current.session.bad_fork = True


os.register_at_fork(after_in_child=_in_child)
