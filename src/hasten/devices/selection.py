"""Choosing the device: what a spec such as "auto" or "cuda:1" means on this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hasten.devices import advising, runtime
from hasten.errors import DeviceUnavailable, UsageError

VARIABLE = "HASTEN_DEVICE"
"""Environment variable that is used where a program leaves the device to hasten."""

Spec = str | torch.device | int | None

_SPELLINGS = {
    "gpu": "Name its type. ",
    "hip": "PyTorch calls AMD's GPUs cuda. ",
    "rocm": "PyTorch calls AMD's GPUs cuda. ",
    "nvidia": "PyTorch calls NVIDIA's GPUs cuda. ",
    "metal": "PyTorch calls Apple's GPUs mps. ",
}


class DeviceWarning(UserWarning):
    """An accelerator is here but is not used; the message says which and why."""


class Machine(Protocol):
    """What choosing needs to know of a machine; ``Here`` is the real one, a test has its own."""

    def devices(self) -> list[torch.device]:
        """Accelerators that PyTorch reports, best first, each with its index."""
        ...

    def current(self, kind: str) -> torch.device:
        """The current device of a type that is here."""
        ...

    def name(self, device: torch.device) -> str:
        """What its maker calls the device."""
        ...

    def trial(self, device: torch.device) -> str | None:
        """Why the device cannot be used, or None."""
        ...

    def mend(self, reason: str) -> str:
        """What to do about a failed trial; may be empty."""
        ...

    def advice(self) -> list[str]:
        """Accelerators in the machine that PyTorch cannot use, each with how to mend that."""
        ...


@dataclass(slots=True)
class Here:
    """This machine, as PyTorch sees it. A device that passed its trial is not tried again."""

    tried: set[torch.device] = field(default_factory=set)

    def devices(self) -> list[torch.device]:
        """See ``Machine``."""
        return runtime.devices()

    def current(self, kind: str) -> torch.device:
        """See ``Machine``."""
        return runtime.with_index(torch.device(kind))

    def name(self, device: torch.device) -> str:
        """See ``Machine``."""
        return runtime.name(device)

    def trial(self, device: torch.device) -> str | None:
        """See ``Machine``."""
        if device in self.tried:
            return None
        reason = runtime.trial(device)
        if reason is None:
            self.tried.add(device)
        return reason

    def mend(self, reason: str) -> str:
        """See ``Machine``."""
        return advising.mend(reason)

    def advice(self) -> list[str]:
        """See ``Machine``."""
        return advising.advice()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A device, and what a person should know of how it came to be chosen."""

    device: torch.device
    notes: tuple[str, ...] = ()
    """Accelerators that were passed over, each with the reason and how to mend it."""


_here = Here()


def device(spec: Spec = "auto") -> torch.device:
    """The device to compute on, with its index (``cuda:0``, never ``cuda``).

    ``"auto"`` or None is the environment variable ``HASTEN_DEVICE`` where that is set, else the
    best accelerator that works, else the CPU. An accelerator that is reported but cannot
    multiply two small matrices, or that is in the machine while PyTorch cannot use it, is passed
    over with a ``DeviceWarning`` that says why.

    Args:
        spec: ``"auto"``, a name (``"cuda"``, ``"cuda:1"``, ``"mps"``, ``"xpu"``, ``"cpu"``), a
            ``torch.device``, or the index of an accelerator.

    Raises:
        DeviceUnavailable: no such device here, or it does not work; names those that are here.
        UsageError: the spec is of a type that names no device.
    """
    choice = choose(spec)
    for note in choice.notes:
        warnings.warn(note, DeviceWarning, stacklevel=2)
    return choice.device


def choose(
    spec: Spec = "auto",
    *,
    machine: Machine = _here,
    environ: Mapping[str, str] = os.environ,
) -> Choice:
    """As ``device``, returning the notes instead of warning of them.

    Raises:
        DeviceUnavailable: as ``device``.
        UsageError: as ``device``.
    """
    source = ""
    if spec is None or (isinstance(spec, str) and spec.strip().lower() == "auto"):
        spec = environ.get(VARIABLE, "").strip() or "auto"
        source = f" (from the environment variable {VARIABLE})" if spec != "auto" else ""
    if isinstance(spec, str) and spec.lower() == "auto":
        return _best(machine)
    wanted = _parse(spec, machine, source)
    if runtime.is_host(wanted):
        return Choice(device=wanted)
    if reason := machine.trial(wanted):
        raise DeviceUnavailable(
            f"{wanted} ({machine.name(wanted)}){source} is here but does not work: "
            f"{_reason(machine, reason)}. {_others(machine, wanted)}"
        )
    return Choice(device=wanted)


def _best(machine: Machine) -> Choice:
    notes: list[str] = []
    for candidate in machine.devices():
        reason = machine.trial(candidate)
        if reason is None:
            return Choice(device=candidate, notes=tuple(notes))
        notes.append(
            f"{candidate} ({machine.name(candidate)}) is passed over, since it cannot multiply "
            f"two small matrices: {_reason(machine, reason)}"
        )
    notes += [f"using the CPU, although {line}" for line in machine.advice()]
    return Choice(device=torch.device("cpu"), notes=tuple(notes))


def _parse(spec: Spec, machine: Machine, source: str) -> torch.device:
    """The device that an explicit spec names, if it is here."""
    if isinstance(spec, bool) or not isinstance(spec, (str, int, torch.device)):
        raise UsageError(
            f"a device is a name such as 'cuda:1', a torch.device, or an index, not {spec!r} "
            f"of type {type(spec).__name__}. {_inventory(machine)}"
        )
    if isinstance(spec, str) and spec.isdecimal():
        spec = int(spec)
    if isinstance(spec, int):
        return _by_index(spec, machine, source)
    if isinstance(spec, str):
        kind, colon, number = spec.strip().lower().partition(":")
        if not kind or (colon and not number.isdecimal()):
            raise DeviceUnavailable(f"{spec!r}{source} names no device. {_inventory(machine)}")
        index = int(number) if colon else None
    else:
        kind, index = spec.type, spec.index
    wanted = kind if index is None else f"{kind}:{index}"
    if kind == "cpu" and index in (None, 0):
        return torch.device("cpu")
    if kind == "meta":
        raise DeviceUnavailable(
            f"'meta'{source} holds shapes without numbers: nothing can be trained on it. "
            f"{_inventory(machine)}"
        )
    here = [found for found in machine.devices() if found.type == kind]
    if not here:
        hint = _SPELLINGS.get(kind, "")
        known = kind == "cpu" or kind in _SPELLINGS or _is_type(kind)
        problem = (
            f"there is no {wanted!r} on this machine" if known else f"unknown device {wanted!r}"
        )
        mending = "".join(f" But {line}." for line in machine.advice()) if known else ""
        raise DeviceUnavailable(f"{problem}{source}. {hint}{_inventory(machine)}{mending}")
    if index is None:
        return machine.current(kind)
    if index not in {found.index for found in here}:
        raise DeviceUnavailable(f"there is no {wanted}{source}. {_inventory(machine)}")
    return torch.device(kind, index)


def _reason(machine: Machine, reason: str) -> str:
    mending = machine.mend(reason)
    return f"{reason} ({mending})" if mending else reason


def _by_index(index: int, machine: Machine, source: str) -> torch.device:
    here = machine.devices()
    same = [found for found in here if found.type == here[0].type]
    for found in same:
        if found.index == index:
            return found
    mending = "" if here else "".join(f" But {line}." for line in machine.advice())
    raise DeviceUnavailable(
        f"there is no accelerator of index {index}{source}. {_inventory(machine)}{mending}"
    )


def _is_type(kind: str) -> bool:
    """Whether PyTorch knows such a type of device, present or not."""
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def _inventory(machine: Machine) -> str:
    found = [f"{device} ({machine.name(device)})" for device in machine.devices()]
    return f"Here: {', '.join([*sorted(found), 'cpu'])}."


def _others(machine: Machine, but: torch.device) -> str:
    found = sorted(str(device) for device in machine.devices() if device != but)
    return f"Also here: {', '.join([*found, 'cpu'])}."
