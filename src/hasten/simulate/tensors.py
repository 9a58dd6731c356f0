"""The methods of `torch.Tensor` that speak of devices, as they are while a simulation runs."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hasten.simulate import current
from hasten.simulate.backend import BACKEND, MOST_DEVICES
from hasten.simulate.naming import HANDLERS, backend_device, index_of_name, is_simulated

_Tensor = torch.Tensor
_methods: Any = torch.Tensor
_Base = torch._C.TensorBase
_raw_device = _Base.device.__get__
_CUDA = [torch.device("cuda", index) for index in range(MOST_DEVICES)]


def _device(self: torch.Tensor) -> torch.device:
    found: torch.device = _raw_device(self)
    if found.type != BACKEND or current.session is None:
        return found
    # PyTorch's own Python code, called below the function mode, hands the device on to PyTorch.
    if not _modes() and _hands_on(sys._getframe(1).f_code.co_filename):
        return found
    return _CUDA[current.session.index_of(self)]


_TORCH = str(Path(torch.__file__).parent)
_FUNCTIONAL = ("functional.py", "linear_cross_entropy.py")
_modes = torch._C._len_torch_function_stack


@cache
def _hands_on(file: str) -> bool:
    return file.startswith(_TORCH) and file.endswith(_FUNCTIONAL)


def _is_cuda(self: torch.Tensor) -> bool:
    return _device(self).type == "cuda"


def _get_device(self: torch.Tensor) -> int:
    found = _device(self)
    return -1 if found.type == "cpu" else int(found.index)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    if self.is_cpu or self.layout is not torch.strided:
        kind = {torch.sparse_coo: "Sparse", torch.strided: ""}.get(self.layout, "SparseCsr")
        raise NotImplementedError(
            "Could not run 'aten::record_stream' with arguments from the "
            f"'{kind}{'CPU' if self.is_cpu else 'CUDA'}' backend."
        )
    current.require().lifetimes.recorded(self, stream._queue)


PROPERTIES: dict[str, Any] = {
    "device": property(_device),
    "is_cuda": property(_is_cuda),
    "get_device": _get_device,
    "record_stream": _record_stream,
}
"""Set on `torch.Tensor` while a simulation runs."""


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if rest:
        rest[0] = backend_device(rest[0])
    if not x.is_cpu and (kwargs.get("device") or (rest and rest[0])) is not None:
        return _with_reason("cpu", func, (x, *rest), kwargs)
    return func(x, *rest, **kwargs)


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, value = args
    if isinstance(value, _Tensor) and _compatible(_never, (x, value), {}):
        move_in_place(x, value)
        return None
    return func(*args, **kwargs)


def move_in_place(x: torch.Tensor, value: torch.Tensor) -> None:
    """``x.data = value`` where only one of them is simulated: the same object, other memory.

    PyTorch itself allows this between CPU and CUDA, not between CPU and the spare backend.
    """
    grad = x.grad if x.is_leaf else None
    fresh = value.detach()
    fresh.requires_grad_(x.requires_grad)
    if grad is not None:
        moved = grad.detach().to(_raw_device(value))
        if grad.is_cpu != moved.is_cpu:
            move_in_place(grad, moved)
        x.grad = None
        fresh.grad = grad
    torch._C._swap_tensor_impl(x, fresh)


def _never(*_: Any) -> bool:
    return False


def _compatible(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args
    if (is_simulated(one) and other.is_cpu) or (one.is_cpu and is_simulated(other)):
        return one.layout is torch.strided and other.layout is torch.strided
    return func(*args, **kwargs)


def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    device = kwargs.get("device", rest[0] if rest else None)
    non_blocking = kwargs.get("non_blocking", rest[1] if len(rest) > 1 else False)
    if "async" in kwargs:
        non_blocking = kwargs["async"]
    extra = {name: kwargs[name] for name in ("memory_format",) if name in kwargs}
    if device is None:
        device = torch.device("cuda")
    elif index_of_name(device) is None:
        raise RuntimeError(f"Invalid device, must be cuda device, but got {device}")
    target = backend_device(device)
    return _to(_Base.to, (x, target), {"non_blocking": non_blocking, **extra})


def _with_reason(reason: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    thread = current.thread
    before, thread.reason = thread.reason, thread.reason or reason
    counted, thread.counted = thread.counted, thread.counted and before is not None
    try:
        return func(*args, **kwargs)
    finally:
        thread.reason, thread.counted = before, counted


def _waiting(reason: str) -> Any:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_reason(reason, func, args, kwargs)

    return handler


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    force = kwargs.get("force", False)
    if not is_simulated(x):
        return func(*args, **kwargs)
    if force:
        return _to(_Base.to, (x.detach(), "cpu"), {}).numpy()
    if x.requires_grad and func is not _Tensor.__array__:
        return func(*args, **kwargs)
    raise TypeError(
        f"can't convert {_device(x)} device type tensor to numpy. Use Tensor.cpu() to copy the "
        "tensor to host memory first."
    )


_TYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
DTYPES = {f"{name}Tensor": dtype for dtype, name in _TYPES.items()}
"""The dtype of each of the old type names, as ``FloatTensor``."""


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    wanted = kwargs.get("dtype", rest[0] if rest else None)
    if wanted is None:
        if not is_simulated(x):
            return func(*args, **kwargs)
        return f"torch.cuda.{_TYPES.get(x.dtype, str(x.dtype))}Tensor"
    if isinstance(wanted, torch.dtype):
        return func(x, wanted)
    if isinstance(wanted, str):
        name = wanted
    else:
        name = f"{getattr(wanted, '__module__', 'torch')}.{wanted.__name__}"
    dtype = DTYPES.get(name.rsplit(".", 1)[-1])
    if dtype is None:
        return func(*args, **kwargs)
    device = torch.device("cuda") if "cuda" in name else torch.device("cpu")
    return _to(_Base.to, (x, backend_device(device), dtype), {})


def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    host = current.require().host
    if is_simulated(x):
        raise RuntimeError(
            f"cannot pin '{_type(func, (x,), {})}' only dense CPU tensors can be pinned"
        )
    if host.is_pinned(x):
        return x
    out = x.detach().clone() if x.requires_grad and x.is_leaf else x.clone()
    host.pin(out)
    return out


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return current.require().host.is_pinned(args[0])


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if not is_simulated(x):
        return func(*args, **kwargs)
    if x.layout is torch.sparse_coo and len(rest) > 1:
        return torch.sparse_coo_tensor(*rest, dtype=x.dtype, device=backend_device(_device(x)))
    if len(rest) == 1 and isinstance(rest[0], (torch.UntypedStorage, torch.TypedStorage)):
        return torch.empty(0, dtype=x.dtype, device=backend_device(_device(x))).set_(rest[0])
    if len(rest) == 1 and not isinstance(rest[0], (int, torch.Size)):
        made = torch.tensor(rest[0], dtype=x.dtype)
    else:
        made = torch.empty(*rest or (0,), dtype=x.dtype)
    return _to(_Base.to, (made, _device(x)), {})


def deep_copy(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """``copy.deepcopy`` of a simulated tensor: a leaf on the same device."""
    if id(x) in memo:
        done: torch.Tensor = memo[id(x)]
        return done
    if not x.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment.  If you were attempting to deepcopy a module, this may be "
            "because of a torch.nn.utils.weight_norm usage, see "
            "https://github.com/pytorch/pytorch/pull/103001"
        )
    with torch.no_grad():
        dense = x.layout is torch.strided
        made = x.detach().clone(memory_format=torch.preserve_format if dense else None)
    out: torch.Tensor
    if type(x) is torch.Tensor:
        out = made
    elif isinstance(x, torch.nn.Parameter):
        out = type(x)(made, x.requires_grad)
    else:
        out = made.as_subclass(type(x))
    out.requires_grad_(x.requires_grad)
    memo[id(x)] = out
    if x.grad is not None:
        out.grad = deep_copy(x.grad, memo)
    if x.__dict__:
        out.__dict__.update(copy.deepcopy(x.__dict__, memo))
    return out


def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_simulated(args[0]):
        return deep_copy(args[0], args[1])
    return func(*args, **kwargs)


def handlers() -> dict[Any, Any]:
    """What replaces each method, by the function object that PyTorch hands to a mode."""
    waits = {
        _Tensor.item: "item",
        _Tensor.tolist: "tolist",
        _Tensor.__bool__: "bool",
        _Tensor.__float__: "item",
        _Tensor.__int__: "item",
        _Tensor.__index__: "item",
        _Tensor.__repr__: "print",
        _Tensor.__format__: "print",
        _Tensor.cpu: "cpu",
    }
    table: dict[Any, Any] = {func: _waiting(reason) for func, reason in waits.items()}
    table |= {
        _Tensor.to: _to,
        _Tensor.cuda: _cuda,
        _Tensor.numpy: _numpy,
        _Tensor.__array__: _numpy,
        _Tensor.type: _type,
        _Tensor.pin_memory: _pin_memory,
        _Tensor.is_pinned: _is_pinned,
        _Tensor.new: _new,
        _methods.data.__set__: _set_data,
        torch._has_compatible_shallow_copy_type: _compatible,
        _Tensor.__deepcopy__: _deepcopy,
    }
    return table


HANDLERS.update(handlers())
