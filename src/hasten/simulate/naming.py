"""The name "cuda" for the simulated device: what a script says, and what it is told.

A function mode sees each call of PyTorch's Python interface before PyTorch does. It turns
``"cuda"`` into the simulated backend on the way in; the properties of `torch.Tensor` in
`properties` and the texts of errors turn it back on the way out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from hasten.simulate import current, placement
from hasten.simulate.backend import BACKEND, MOST_DEVICES
from hasten.simulate.mixing import Repair, is_reported, report
from hasten.simulate.randomness import DeviceGenerator
from hasten.simulate.wording import cuda_error

if TYPE_CHECKING:
    pass

_Tensor = torch.Tensor
_DEVICES = [torch.device(BACKEND, index) for index in range(MOST_DEVICES)]

HANDLERS: dict[Any, Any] = {}
"""What replaces a function of PyTorch: called with the function, its arguments and keywords."""


def index_of_name(device: Any) -> int | None:
    """The index of a device that a script names, None for one that is no ``cuda`` device.

    Raises:
        RuntimeError: there is no such device.
    """
    if isinstance(device, torch.device):
        if device.type not in ("cuda", BACKEND):
            return None
        index = device.index if device.index is not None else current.thread.device
    elif isinstance(device, str):
        if not device.startswith("cuda"):
            return None
        named: Any = torch.device(device).index
        index = current.thread.device if named is None else named
    elif isinstance(device, int) and not isinstance(device, bool):
        index = device
    else:
        return None
    return checked(index)


def checked(index: int) -> int:
    """Return a device's index.

    Raises:
        RuntimeError: no simulated device has it; in CUDA's words.
    """
    if not 0 <= index < current.require().count:
        raise cuda_error("invalid device ordinal")
    return index


def backend_device(device: Any) -> Any:
    """The device that PyTorch is told for one that a script names; others are returned as given.

    Raises:
        RuntimeError: there is no such device, or the process is a fork that CUDA refuses.
    """
    index = index_of_name(device)
    if index is None:
        return device
    current.require().touch()
    return _DEVICES[index]


def is_simulated(x: Any) -> bool:
    """Whether a value is a tensor of the simulated device."""
    return isinstance(x, _Tensor) and not x.is_cpu and not x.is_meta


# What a PyTorch for the CPU says where its C++ code meets a device that it has not.
_PYTORCHS_OWN = {
    "PyTorch is not linked with support for cuda devices": (
        "the simulated accelerator cannot do this: PyTorch's C++ code asks for a GPU here, as for "
        "nested tensors of the strided layout; see docs/simulate.md"
    ),
    "QUInt/QInt types are not supported by dlpack": (
        "the simulated accelerator has no quantized tensors; see docs/simulate.md"
    ),
}


_SPARE = re.compile("privateuseone|PrivateUse(?:1|One)")


def translated(error: BaseException) -> BaseException:
    """The error with CUDA's names in its text, the same object where nothing changes."""
    text = str(error)
    for words, instead in _PYTORCHS_OWN.items():
        if text.startswith(words):
            return NotImplementedError(instead).with_traceback(error.__traceback__)
    if not _SPARE.search(text):
        return error
    text = _SPARE.sub(lambda found: "cuda" if found[0] == BACKEND else "CUDA", text)
    if isinstance(error, NotImplementedError) and "Could not run" in text:
        text = text.split("\n")[0].split(". This could be because")[0]
        if text.startswith(tuple(f"Could not run 'aten::{name}" for name in placement.CPU_ONLY)):
            text += ". This could be because the operator doesn't exist for this backend."
        else:
            text += ". The simulated accelerator does not have this operator; see docs/simulate.md."
    try:
        return type(error)(text).with_traceback(error.__traceback__)
    except TypeError:
        return error


def named_refusals(call: Any) -> Any:
    """A function of PyTorch's that no function mode sees, with its errors in CUDA's names."""

    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            other = translated(error)
            if other is error:
                raise
            raise other from None

    return named


class Naming(TorchFunctionMode):
    """Lets a script's calls say "cuda"."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the module's text."""
        session = current.session
        if session is None:
            return func(*args, **(kwargs or {}))
        if session.host.downloads:
            _reads(session, func, args)
        handler = HANDLERS.get(func)
        if kwargs:
            if "device" in kwargs:
                kwargs["device"] = backend_device(kwargs["device"])
            if handler is None and kwargs.get("pin_memory"):
                handler = _pinned_factory
        try:
            if session.on_mismatch is not None:
                out = _repairing(func, handler, args, kwargs)
            elif handler is not None:
                out = handler(func, args, kwargs or {})
            elif kwargs:
                out = func(*args, **kwargs)
            else:
                out = func(*args)
        except Exception as error:
            other = translated(error)
            if other is error:
                raise
            raise other from None
        if kwargs and isinstance(kwargs.get("generator"), DeviceGenerator):
            _check_generator(out)
        if session.track_origins and isinstance(out, _Tensor):
            session.made(out, getattr(func, "__name__", "?"))
        return out


def _pinned_factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **{**kwargs, "pin_memory": False})
    if isinstance(out, _Tensor):
        if not out.is_cpu:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        current.require().host.pin(out)
    return out


def _check_generator(out: Any) -> None:
    """Refuse a random call of the CPU that was handed a generator of the device."""
    if isinstance(out, _Tensor) and out.is_cpu:
        raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")


_READ_NOTHING = {
    *(
        "__get__",
        "__len__",
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "data_ptr",
    ),
    *("storage_offset", "untyped_storage", "is_contiguous", "is_floating_point", "is_complex"),
    *("is_pinned", "pin_memory", "is_conj", "is_neg", "is_inference", "detach", "requires_grad_"),
}
"""Methods that ask of a tensor, or change, what is not its values."""


def _reads(session: Any, func: Any, args: tuple[Any, ...]) -> None:
    if getattr(func, "__name__", "") in _READ_NOTHING:
        return
    for x in args:
        for y in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(y, _Tensor) and y.is_cpu:
                session.host.touched(y)


def _repairing(func: Any, handler: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Make a call; where a mismatch asks for it, make it again with its operands moved."""
    thread = current.thread
    kwargs = kwargs or {}
    before = thread.repairing
    for _ in range(8):
        thread.repairing = True
        try:
            return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)
        except Repair as repair:
            moved = _moved((args, kwargs), repair)
            if moved is None:
                break
            args, kwargs = moved
        except RuntimeError as error:
            if is_reported(error):
                raise
            # A check in PyTorch's own code, before any operator ran.
            mixed = _mixed_call(func, args, kwargs, error)
            if mixed is None:
                raise
            args, kwargs = mixed
        finally:
            thread.repairing = before
    thread.repairing = False  # the operands are not the call's own: repair below autograd
    try:
        return handler(func, args, kwargs) if handler is not None else func(*args, **kwargs)
    finally:
        thread.repairing = before


def _mixed_call(func: Any, args: Any, kwargs: dict[str, Any], error: RuntimeError) -> Any:
    """Report an error about devices; the call with its host tensors moved; None: not about them."""
    message = str(translated(error))
    if "device" not in message or not ("cpu" in message or "cuda:" in message):
        return None
    found: list[tuple[str, torch.Tensor]] = []
    names = [*((f"argument {i}", x) for i, x in enumerate(args)), *kwargs.items()]
    for name, value in names:
        group = value if isinstance(value, (list, tuple)) else (value,)
        found.extend((name, x) for x in group if isinstance(x, _Tensor))
    devices = {"cpu" if x.is_cpu else "cuda" for _, x in found}
    if len(devices) < 2:
        return None
    session = current.require()
    report(session, getattr(func, "__name__", "?"), found, message)
    index = next(session.index_of(x) for _, x in found if not x.is_cpu)
    return _moved((args, kwargs), Repair([x for _, x in found if x.is_cpu and x.dim()], index))


def _memory_of(x: torch.Tensor) -> int | None:
    """What two tensors over the same memory have in common; a sparse tensor has none."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def _moved(call: Any, repair: Repair) -> Any:
    """The call with the blamed tensors, or others over their memory, moved; None: it has none."""
    blamed = {id(x) for x in repair.operands}
    memory = {_memory_of(x) for x in repair.operands} - {None}
    target = _DEVICES[repair.index]
    hit = False

    def walk(x: Any) -> Any:
        nonlocal hit
        if isinstance(x, _Tensor):
            if x.is_cpu and (id(x) in blamed or _memory_of(x) in memory):
                hit = True
                return x.to(target)
            return x
        if isinstance(x, (list, tuple)) and type(x) in (list, tuple):
            return type(x)(walk(y) for y in x)
        if type(x) is dict:
            return {key: walk(y) for key, y in x.items()}
        return x

    moved = walk(call)
    return moved if hit else None
