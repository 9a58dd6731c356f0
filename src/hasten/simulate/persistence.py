"""Saving and loading: a checkpoint written in a simulation is the file that CUDA would write."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from hasten.simulate import current
from hasten.simulate.backend import BACKEND
from hasten.simulate.naming import HANDLERS, index_of_name, is_simulated

_Untyped: Any = torch.UntypedStorage
_StorageBase = torch._C.StorageBase


def _is_simulated(storage: Any) -> bool:
    return bool(_StorageBase.device.__get__(storage).type == BACKEND)  # type: ignore[attr-defined]


def _index(storage: Any) -> int:
    return int(_StorageBase.device.__get__(storage).index or 0)  # type: ignore[attr-defined]


def _device(storage: Any) -> torch.device:
    found: torch.device = _StorageBase.device.__get__(storage)  # type: ignore[attr-defined]
    if found.type == BACKEND:
        return torch.device("cuda", _index(storage))
    return found


def _host_storage(storage: Any) -> Any:
    """A copy of a simulated storage in host memory."""
    lent = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    copy = _Untyped(storage.nbytes())
    if storage.nbytes():
        copy.copy_(lent)
    return copy


def _to_cuda(storage: Any, index: int) -> Any:
    """A copy of a storage in a simulated device's memory."""
    host = _host_storage(storage) if _is_simulated(storage) else storage
    raw = torch.empty(0, dtype=torch.uint8).set_(host).clone()
    session = current.require()
    session.touch()
    return session.adopt(raw, index).untyped_storage()


def _storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
    index = index_of_name(device)
    if index is not None:
        if _is_simulated(self) and _index(self) == index:
            return self
        return _to_cuda(self, index)
    if _is_simulated(self):
        return _host_storage(self)
    if not isinstance(device, torch.device):
        device = torch.device(device)
    return _Untyped(self.size(), device=device).copy_(self, non_blocking)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return _storage_to(self, device=torch.device("cuda") if device is None else device)


def _storage_cpu(self: Any) -> Any:
    return _host_storage(self) if _is_simulated(self) else self


def _storage_clone(self: Any) -> Any:
    if _is_simulated(self):
        return _to_cuda(self, _index(self))
    return type(self)(self.nbytes(), device=self.device).copy_(self)


def _new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
    """What default_collate stacks into in a worker: on a device, memory like any other."""
    index = index_of_name(torch.device(device))
    if index is None:
        return _StorageBase_new_shared.__func__(cls, size, device=device)
    return _to_cuda(_Untyped(size), index)


_StorageBase_new_shared: Any = torch.storage._StorageBase.__dict__["_new_shared"]

UNTYPED: dict[str, Any] = {
    "_new_shared": classmethod(_new_shared),
    "device": property(_device),
    "is_cuda": property(lambda self: _device(self).type == "cuda"),
    "to": _storage_to,
    "cuda": _storage_cuda,
    "cpu": _storage_cpu,
    "clone": _storage_clone,
}
"""Set on `torch.UntypedStorage` while a simulation runs."""


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not is_simulated(x) or (x.layout is not torch.strided and type(x) is torch.Tensor):
        return func(*args, **kwargs)
    no_hooks: OrderedDict[Any, Any] = OrderedDict()
    if isinstance(x, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (x.data, x.requires_grad, no_hooks)
    typed: Any = torch.storage.TypedStorage
    storage = typed(wrap_storage=x.untyped_storage(), dtype=x.dtype, _internal=True)
    layout = (x.storage_offset(), tuple(x.size()), tuple(x.stride()))
    return torch._utils._rebuild_tensor_v2, (storage, *layout, x.requires_grad, no_hooks)


def tag(original: Any) -> Any:
    """``torch.serialization.location_tag`` that knows simulated storages."""

    def location_tag(storage: Any) -> Any:
        untyped = getattr(storage, "_untyped_storage", storage)
        if isinstance(untyped, _Untyped) and _is_simulated(untyped):
            return f"cuda:{_index(untyped)}"
        return original(storage)

    return location_tag


HANDLERS[torch.Tensor.__reduce_ex__] = _reduce
