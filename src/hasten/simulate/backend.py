"""PyTorch's spare backend (PrivateUse1) as an address for memory that the CPU computes on.

A simulated tensor is an ordinary ``torch.Tensor`` on that backend whose storage points at memory
of the host. Two functions cross the border without copying: `on_device` and `on_host`. They go
through DLPack, whose capsule names the device in one field, which is rewritten here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from hasten.errors import UsageError

BACKEND = "privateuseone"
_DLPACK_CPU = 1
_DLPACK_EXTENSION = 12  # kDLExtDev, which PyTorch reads as PrivateUse1
MOST_DEVICES = 64
# The type and, in the upper half of the word, the index.
_ON_DEVICE = [_DLPACK_EXTENSION | index << 32 for index in range(MOST_DEVICES)]
_DEVICE_OFFSET = 8  # of DLTensor.device: behind the data pointer

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_field = ctypes.c_int64.from_address
_export = torch._C._to_dlpack
_import = torch._C._from_dlpack
_alias = torch.ops.aten.alias.default
_CAPSULE = b"dltensor"

_installed = False


def on_device(host: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of a simulated device over the memory of a host tensor, which it keeps."""
    capsule = _export(host)
    _field(_pointer_of(capsule, _CAPSULE) + _DEVICE_OFFSET).value = _ON_DEVICE[index]
    made: torch.Tensor = _import(capsule)
    return made


def on_host(simulated: torch.Tensor) -> torch.Tensor:
    """Return a host tensor over the memory of a simulated one, which it keeps alive."""
    capsule = _export(simulated)
    _field(_pointer_of(capsule, _CAPSULE) + _DEVICE_OFFSET).value = _DLPACK_CPU
    made: torch.Tensor = _import(capsule)
    if made.is_complex() and simulated.is_conj():
        made = torch._conj(made)
    if simulated.is_neg():
        made = torch._neg_view(made)
    return made


def view_like(base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a view of the simulated `base` that lies as the host `view` lies in its memory.

    Args:
        base: a simulated tensor.
        view: a host view of `on_host(base)`.
    """
    if view.dtype != base.dtype:
        return on_device(view, base.get_device())
    return strided(base, view.size(), view.stride(), base.storage_offset() + view.storage_offset())


def strided(base: torch.Tensor, size: Any, stride: Any, offset: int | torch.SymInt) -> torch.Tensor:
    """Return a view of a simulated tensor with the given layout, sharing its storage."""
    out: torch.Tensor = _alias(base)
    out.as_strided_(size, stride, offset)
    return out


def _pieces() -> tuple[Any, Any]:
    """What PyTorch's runtime asks a backend: whether it is there, and what type it is."""
    parts: Any = torch._C._acc

    class Hook(parts.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(parts.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Hook(), Guard()


class _Module:
    """What PyTorch asks the Python module of a backend."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Leave the seed: the simulation keeps its own generators."""

    def device_count(self) -> int:
        return 1


def install() -> None:
    """Register what PyTorch expects of a backend: once a process, and only when first needed.

    PyTorch cannot take it back; it has no effect while no simulated tensor exists.

    Raises:
        UsageError: another package has taken PyTorch's spare backend, or PyTorch is too old.
    """
    global _installed
    if _installed:
        return
    name = torch._C._get_privateuse1_backend_name()
    if name != BACKEND:
        raise UsageError(
            f"the simulated accelerator needs PyTorch's spare backend, and {name!r} has taken it; "
            "run without the package that registers it"
        )
    if not hasattr(torch._C, "_acc"):
        raise UsageError(
            f"the simulated accelerator needs a newer PyTorch than {torch.__version__}: one that "
            "takes backends written in Python"
        )
    hook, guard = _pieces()
    # Autograd asks for *the* accelerator, and PyTorch takes a named spare backend for it from then
    # on. What `torch.accelerator` says outside a simulation must stay what it was.
    before = torch._C._accelerator_getAccelerator()
    torch._C._rename_privateuse1_backend(BACKEND)
    torch._C._accelerator_getAccelerator = lambda: before
    torch._C._acc.register_python_privateuseone_hook(hook)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _installed = True


def open_module() -> None:
    """Make the backend's Python module known while a simulation runs."""
    module = _Module()
    setattr(torch, BACKEND, module)
    sys.modules[f"torch.{BACKEND}"] = module  # type: ignore[assignment]


def close_module() -> None:
    """Take the backend's Python module away."""
    if hasattr(torch, BACKEND):
        delattr(torch, BACKEND)
    sys.modules.pop(f"torch.{BACKEND}", None)
