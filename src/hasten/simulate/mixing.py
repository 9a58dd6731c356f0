"""Tensors of several devices in one operator: refused, repaired or allowed, as CUDA would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hasten.simulate import current, placement
from hasten.simulate.frames import locate
from hasten.simulate.records import Mismatch, MismatchInfo, Operand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hasten.simulate.plan import Plan
    from hasten.simulate.session import Session

_Tensor = torch.Tensor


class Repair(BaseException):
    """Asks the intercepted call to move these host tensors to the device and to begin again."""

    def __init__(self, operands: list[torch.Tensor], index: int) -> None:
        super().__init__()
        self.operands = operands
        self.index = index


def tensors(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each tensor of a call: the argument's name, the role to print, the tensor."""
    given = [*zip(plan.names, args, strict=False), *kwargs.items()]
    for name, value in given:
        if isinstance(value, _Tensor):
            yield name, name, value
        elif isinstance(value, (list, tuple)):
            for position, x in enumerate(value):
                if isinstance(x, _Tensor):
                    yield name, f"{name}[{position}]", x


def has_mask(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an indexing call has a boolean mask on the device, whose True values it counts."""
    indices = plan.value("indices", args, kwargs)
    if plan.base == "index_put":
        values = plan.value("values", args, kwargs)
        given = [x for x in indices if x is not None]
        if len(given) == 1 and values.numel() == 1:
            return False  # CUDA fills through the mask and counts nothing
    return any(
        isinstance(x, _Tensor) and x.dtype in (torch.bool, torch.uint8) and not x.is_cpu
        for x in indices or ()
    )


def check(session: Session, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse, or repair, host tensors that CUDA would not take beside device tensors.

    Raises:
        RuntimeError: a host tensor is where CUDA takes none.
    """
    if plan.host_all:
        return
    found = list(tensors(plan, args, kwargs))
    if plan.indexing and _indexes_host(plan, args, kwargs):
        _check_host_indexed(session, plan, found)
        return
    if plan.base == "fill":
        _check_fill(session, plan, args, kwargs)
        return
    bad = [(name, role, x) for name, role, x in found if x.is_cpu and not _allowed(plan, name, x)]
    if bad:
        _refuse(session, plan, found, bad)
        return
    if plan.scalars and len(found) > 2 and plan.base != "where" and "_foreach" not in plan.base:
        scalars = [x for _, _, x in found if x.is_cpu]
        if len(scalars) > 1:
            raise RuntimeError("Trying to pass too many CPU scalars to CUDA kernel!")


def _indexes_host(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    indexed = plan.value("self", args, kwargs)
    return isinstance(indexed, _Tensor) and indexed.is_cpu


def _check_host_indexed(
    session: Session, plan: Plan, found: list[tuple[str, str, torch.Tensor]]
) -> None:
    """A CPU tensor that is indexed: CPU indices only, and one number of the device as the value."""
    on_device = [entry for entry in found if not entry[2].is_cpu]
    if all(name == "values" and x.dim() == 0 for name, _, x in on_device):
        session.wait("item", session.index_of(on_device[0][2]))
        return
    indices = any(name == "indices" for name, _, _ in on_device)
    _refuse(session, plan, found, [] if indices else [e for e in found if e[0] == "self"])


def _check_fill(
    session: Session, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """One number fills a tensor of any device; CUDA reads it first."""
    value = plan.value("value", args, kwargs)
    if value.dim():
        raise RuntimeError(
            "fill_ only supports 0-dimension value tensor but got tensor with "
            f"{value.dim()} dimensions."
        )
    if not value.is_cpu:
        session.wait("item", session.index_of(value))


def _allowed(plan: Plan, name: str, x: torch.Tensor) -> bool:
    if name in plan.host:
        return True
    if x.dim():
        return False
    if name in plan.host_scalars:
        return True
    return plan.scalars and name not in plan.device_only and name not in plan.writes


def _refuse(
    session: Session,
    plan: Plan,
    found: list[tuple[str, str, torch.Tensor]],
    bad: list[tuple[str, str, torch.Tensor]],
) -> None:
    name, first, second = _words(session, plan, found, bad)
    message = placement.refusal(
        plan.name, plan.overload, name, first, second, structured=plan.structured
    )
    layouts = {x.layout for _, _, x in found} - {torch.strided}
    if layouts:
        argument = bad[0][0] if bad else name
        message = placement.sparse_refusal(message, plan.base, argument, layouts)
    index = next((session.index_of(x) for _, _, x in found if not x.is_cpu), 0)
    report(session, plan.name, [(role, x) for _, role, x in found], message)
    written = any(name in plan.writes for name, _, _ in bad)
    if current.thread.repairing and bad and not written:
        raise Repair([x for _, _, x in bad], index)


def report(session: Session, op: str, found: list[tuple[str, torch.Tensor]], message: str) -> None:
    """Tell `on_mismatch` and record it; return where the answer is to repair.

    Raises:
        RuntimeError: the answer is to raise, or nobody was asked.
    """
    where = locate()
    answer = "raise"
    if session.on_mismatch is not None:
        operands = tuple(
            Operand(role=role, tensor=x, device=session.device_name(x)) for role, x in found
        )
        info = MismatchInfo(op=op, operands=operands, message=message, location=where)
        answer = session.on_mismatch(info)
    session.record(Mismatch(op=op, message=message, location=where, repaired=answer == "repair"))
    if answer != "repair":
        raise _reported(message)


def _reported(message: str) -> RuntimeError:
    """The error that a script sees, marked as one that has been reported."""
    error = RuntimeError(message)
    error.__dict__["_hasten_reported"] = True
    return error


def is_reported(error: BaseException) -> bool:
    """Whether an error is a mismatch that `on_mismatch` knows of."""
    return "_hasten_reported" in error.__dict__


def _words(
    session: Session,
    plan: Plan,
    found: list[tuple[str, str, torch.Tensor]],
    bad: list[tuple[str, str, torch.Tensor]],
) -> tuple[str, str, str]:
    """The argument to blame and the two devices, in the order in which CUDA names them."""
    if plan.indexing and not bad:
        return "indices", "cpu", "cuda"
    device = next(session.device_name(x) for _, _, x in found if not x.is_cpu)
    if plan.indexing:
        return bad[0][0], device, "cpu"
    if plan.scalars or plan.base == "masked_fill":
        return bad[0][0], device, session.device_name(bad[0][2])
    strict = [(name, x) for name, _, x in found if name not in plan.host]
    settled = session.device_name(strict[0][1])
    for name, x in strict:
        own = session.device_name(x)
        if own != settled:
            return name, settled, own
    return bad[0][0], device, "cpu"


def settle(
    session: Session,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    simulated: list[torch.Tensor],
) -> int:
    """Which of several simulated devices an operator runs on; refuse tensors of two of them.

    Raises:
        RuntimeError: the tensors lie on two simulated devices.
    """
    if not simulated:
        return current.thread.device
    index = session.index_of(simulated[0])
    for x in simulated:
        if session.index_of(x) != index and not plan.host_all:
            found = list(tensors(plan, args, kwargs))
            strict = [
                entry
                for entry in found
                if not entry[2].is_cpu
                and session.index_of(entry[2]) != index
                and not (entry[2].dim() == 0 and entry[0] in plan.host_scalars)
            ]
            if strict:
                _refuse(session, plan, found, strict)
            break
    return index
