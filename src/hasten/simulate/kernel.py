"""How any operator runs on the simulated device: on the same memory, by the CPU's kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current, mixing, sparse
from hasten.simulate.backend import on_device, on_host, view_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.simulate.plan import Plan
    from hasten.simulate.session import Session

_Tensor = torch.Tensor
_strided = torch.strided
_CPU = torch.device("cpu")
HOST = -1
"""Stands for the index of a device where a call asks for a result on the host."""
_nested = (torch.Tensor, list, tuple)
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_modes = torch._C._len_torch_function_stack
_autocast = torch.is_autocast_enabled
_cpu_autocast: Any = torch._C._parse_dispatch_key("AutocastCPU")
_CPU_AUTOCAST = torch._C.DispatchKeySet(_cpu_autocast)


def execute(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors (or whose ``device=``) are on the simulated device.

    Raises:
        RuntimeError: the tensors lie on devices that CUDA does not let meet.
        torch.OutOfMemoryError: the device's memory is full.
    """
    if _modes() or _autocast("cpu"):
        return alone(_execute, plan, args, kwargs)
    return _execute(plan, args, kwargs)


def alone(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call without function modes and the CPU's autocast, which are not for the device's work."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_CPU_AUTOCAST):
        return call(*args, **kwargs)


def _execute(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    session = current.session
    if session is None:
        session = current.require()
    simulated: list[torch.Tensor] = []
    host: list[torch.Tensor] = []
    raw_args = [lower(x, simulated, host) if isinstance(x, _nested) else x for x in args]
    raw_kwargs = kwargs
    index: int | None = None
    if kwargs:
        raw_kwargs = {
            name: lower(x, simulated, host) if isinstance(x, _nested) else x
            for name, x in kwargs.items()
        }
        if plan.has_device:
            index = _take_device(kwargs, raw_kwargs)
    if host and simulated:
        mixing.check(session, plan, args, kwargs)
    if not session.many:
        index = index or 0
    elif index is None:
        index = mixing.settle(session, plan, args, kwargs, simulated)
    try:
        if plan.seeded:
            result = session.random.run(plan, raw_args, raw_kwargs, index)
        elif plan.outs:
            result = _with_outs(plan, raw_args, raw_kwargs, kwargs)
        else:
            result = plan.op(*raw_args, **raw_kwargs)
    except RuntimeError as error:
        session.raise_if_full(error, index)
        raise
    if index == HOST:
        return result
    session.launch(plan, index, raw_args, result)
    if plan.waits is not None:
        session.wait(plan.waits, index)
    elif plan.indexing and mixing.has_mask(plan, args, kwargs):
        session.wait("mask", index)
    returns = plan.returns
    if len(returns) == 1:
        return _raise(session, plan, returns[0], result, args, kwargs, index)
    if not returns:
        return None
    return tuple(
        _raise(session, plan, kind, value, args, kwargs, index)
        for kind, value in zip(returns, result, strict=True)
    )


def lower(value: Any, simulated: list[torch.Tensor], host: list[torch.Tensor]) -> Any:
    """Replace simulated tensors by host tensors over the same memory, also in lists.

    Args:
        value: a tensor or a list.
        simulated: gets the simulated tensors that were met.
        host: gets the host tensors that were met.
    """
    if isinstance(value, _Tensor):
        if value.is_cpu:
            host.append(value)
            return value
        if value.is_meta:
            return value
        simulated.append(value)
        return on_host(value) if value.layout is _strided else sparse.to_host(value)
    for x in value:
        if isinstance(x, _Tensor):
            return [lower(x, simulated, host) if isinstance(x, _Tensor) else x for x in value]
    return value


def _take_device(kwargs: dict[str, Any], raw_kwargs: dict[str, Any]) -> int | None:
    """The device's index that a call names (None: it names none), and the call for the CPU."""
    target = kwargs.get("device")
    if raw_kwargs.get("pin_memory"):
        if target is not None and target.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        raw_kwargs["pin_memory"] = False
    if target is None:
        return None
    raw_kwargs["device"] = _CPU
    if target.type == "cpu":
        return HOST
    index: int | None = target.index
    return index


def _with_outs(
    plan: Plan, raw_args: list[Any], raw_kwargs: dict[str, Any], kwargs: dict[str, Any]
) -> Any:
    """Run an ``out=`` overload, which may resize the tensors it writes."""
    for name in plan.outs:
        raw = raw_kwargs.get(name)
        if isinstance(raw, _Tensor) and raw.numel() == 0:
            # Memory that came over the border cannot grow; an empty tensor of its own can.
            raw_kwargs[name] = raw.new_empty(0)
    try:
        result = plan.op(*raw_args, **raw_kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        for name in plan.outs:
            raw = raw_kwargs.get(name)
            if isinstance(raw, _Tensor):
                raw_kwargs[name] = raw.new_empty(0)
        result = plan.op(*raw_args, **raw_kwargs)
    for name in plan.outs:
        raw, given = raw_kwargs.get(name), kwargs.get(name)
        if (
            isinstance(raw, _Tensor)
            and given is not None
            and not given.is_cpu
            and (raw.shape != given.shape or not _same_memory(raw, given))
        ):
            rebind(given, raw)
    return result


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is other.layout is _strided and one.data_ptr() == other.data_ptr()


def rebind(simulated: torch.Tensor, host: torch.Tensor, *, track: bool = True) -> None:
    """Let an existing simulated tensor have the memory and the layout of a host tensor."""
    session = current.require()
    index = session.index_of(simulated)
    _set_data(simulated, session.adopt(host, index, track=track))


def _raise(
    session: Session,
    plan: Plan,
    kind: tuple[str, str],
    value: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int,
) -> Any:
    """Turn a result of the CPU's kernel into one of the simulated device."""
    how, source = kind
    if how == "new":
        if isinstance(value, _Tensor):
            return session.adopt(value, index)
        if isinstance(value, (list, tuple)):
            return [session.adopt(x, index) if isinstance(x, _Tensor) else x for x in value]
        return value
    given = plan.value(source, args, kwargs)
    if how == "same":
        if isinstance(given, _Tensor) and given.layout is not _strided:
            rebind(given, value)  # its parts may be others now
        return given
    if isinstance(value, _Tensor) and value.layout is not _strided:
        return session.adopt(value, index, track=False)
    if isinstance(value, (list, tuple)):
        return [view_like(given, x) for x in value]
    return view_like(given, value)


__all__ = ["execute", "lower", "on_device", "rebind"]
