"""Precision and memory format: what they are, what a device does well, and which is faster here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import UsageError

NAMES = ("auto", "float32", "bfloat16", "float16")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# A choice must win by this much to be taken: less is noise, and full precision is the safer one.
WORTH = 1.10


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a step computes: the dtype of its matrix work and the layout of its images."""

    name: str
    """``float32``, ``bfloat16`` or ``float16`` (autocast; weights stay float32)."""
    channels_last: bool = False
    """Whether 4-dimensional weights and images are stored with channels last (NHWC)."""
    reason: str = ""
    """Why this was chosen, in a few words with figures; empty when it was asked for."""

    def __post_init__(self) -> None:
        if self.name not in NAMES[1:]:
            raise UsageError(f"unknown precision {self.name!r}; there are {', '.join(NAMES)}")

    def __str__(self) -> str:
        layout = ", channels last" if self.channels_last else ""
        return f"{self.name}{layout}" + (f" - {self.reason}" if self.reason else "")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that autocast computes matrix work in."""
        return _DTYPES.get(self.name, torch.float32)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context, usable again and again, in which forward passes compute at this precision."""
        if self.name == "float32":
            return nullcontext()
        return torch.autocast(device_type=device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """The gradient scaler that float16 needs; None for the others."""
        return torch.amp.GradScaler(device.type) if self.name == "float16" else None

    def to_json(self) -> dict[str, Any]:
        """As JSON, for a checkpoint: a resumed run keeps the choice that was made."""
        return {"name": self.name, "channels_last": self.channels_last, "reason": self.reason}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Precision:
        """What :meth:`to_json` wrote."""
        return Precision(
            name=str(content["name"]),
            channels_last=bool(content["channels_last"]),
            reason=str(content.get("reason", "")),
        )


def check(name: str, device: torch.device) -> str:
    """``name`` if ``device`` can compute at it.

    Raises:
        UsageError: the name is unknown, or autocast on this device does not know the dtype.
    """
    if name not in NAMES:
        raise UsageError(f"unknown precision {name!r}; there are {', '.join(NAMES)}")
    if name in _DTYPES and _DTYPES[name] not in runtime.autocast_dtypes(device):
        able = ["float32", *(n for n, d in _DTYPES.items() if d in runtime.autocast_dtypes(device))]
        raise UsageError(f"{device} cannot compute in {name}; it can in {', '.join(able)}")
    return name


def by_rule(name: str, device: torch.device, *, channels_last: bool = False) -> Precision:
    """Settle ``auto`` without measuring: bfloat16 on an accelerator built for it, else float32."""
    if check(name, device) != "auto":
        return Precision(name=name, channels_last=channels_last)
    if not runtime.is_host(device) and torch.bfloat16 in runtime.fast_dtypes(device):
        reason = f"auto: {runtime.name(device)} computes bfloat16 in hardware"
        return Precision(name="bfloat16", channels_last=channels_last, reason=reason)
    return Precision(name="float32", channels_last=channels_last, reason="auto")


def candidates(
    name: str, device: torch.device, model: nn.Module, channels_last: bool | str
) -> list[Precision]:
    """What ``auto`` measures against each other, the plain float32 step first.

    float16 is never among them: it needs loss scaling and can change what a model learns.
    """
    names = [check(name, device)]
    if name == "auto":
        names = ["float32"]
        if torch.bfloat16 in runtime.fast_dtypes(device):
            names.append("bfloat16")
    images = any(p.dim() == 4 for p in model.parameters())
    layouts = [False, True] if channels_last == "auto" and images else [channels_last is True]
    return [Precision(name=n, channels_last=layout) for n in names for layout in layouts]


def set_layout(model: nn.Module, channels_last: bool) -> None:
    """Store the model's 4-dimensional weights with channels last, or first again, in place."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    if any(p.dim() == 4 for p in model.parameters()):
        model.to(memory_format=layout)  # type: ignore[call-overload]


def fastest(
    choices: Sequence[Precision],
    time_step: Callable[[Precision], float],
    *,
    rounds: int = 5,
) -> Precision:
    """The fastest of ``choices`` by ``rounds`` interleaved measurements.

    The first choice stays unless another is :data:`WORTH` times as fast, by the medians and by
    the shortest times both: on a busy machine the medians alone favour whichever was disturbed
    less. One round before them warms up and is not counted.

    Args:
        choices: at least one; the first is what the others are compared with.
        time_step: runs the step at a precision and returns its seconds.
        rounds: measurements of each choice.
    """
    if len(choices) == 1:
        return choices[0]
    for choice in choices:
        time_step(choice)
    seconds: dict[Precision, list[float]] = {choice: [] for choice in choices}
    for _ in range(rounds):
        for choice in choices:
            seconds[choice].append(time_step(choice))
    plain = choices[0]
    gains = {choice: _gain(seconds[plain], seconds[choice]) for choice in choices}
    best = max(choices, key=lambda choice: gains[choice])
    gain = gains[best]
    if gain < WORTH:
        best = plain  # the same within noise: nothing is promised
    measured = f"auto measured {len(choices)} ways, {rounds} steps each"
    reason = f"{measured}: none is {WORTH:.2f} times the speed of plain {plain.name}"
    if best is not plain:
        reason = (
            f"{measured}: {gain:.2f} times the speed of plain {plain.name} in forward and backward"
        )
    return Precision(name=best.name, channels_last=best.channels_last, reason=reason)


def _gain(plain: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast ``other`` is for certain: 1 where it cannot be told."""
    of_medians = statistics.median(plain), statistics.median(other)
    return min(a / b if b else 1.0 for a, b in (of_medians, (min(plain), min(other))))


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Forward and backward passes inside leave buffers, gradients and train mode as they were.

    Only buffers are copied: without an optimizer step, parameters do not change.
    """
    parts = {part: part.training for module in modules for part in module.modules()}
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    gradients = {p: p.grad for module in modules for p in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, kept in buffers:
                buffer.copy_(kept)
                part._buffers[name] = buffer  # a forward pass may have put another in its place
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for part, mode in parts.items():
            part.training = mode


def has_stepped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler's last step of an optimizer was taken: it leaves out those whose gradients
    overflowed float16. Between its ``step`` and its ``update``; waits for the device."""
    state = scaler._per_optimizer_states[id(optimizer)]
    return not any(found.item() for found in state["found_inf_per_device"].values())
