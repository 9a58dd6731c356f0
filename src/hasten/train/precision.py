"""Precision and memory format: what they are, what a device does well, and which is faster here."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import UsageError

NAMES = ("auto", "float32", "bfloat16", "float16")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# A choice must win by this much to be taken: less is noise, and full precision is the safer one.
WORTH = 1.10
_DOUBT = 0.05  # chance that a gain's median lies below its bound, and that it lies above
_FEWEST_ROUNDS = 8  # so that one of them may be disturbed by any much and the others still tell
_MOST_ROUNDS = 31
_BUDGET_S = 2.0  # for the measured rounds; a warm-up round comes on top
_LONG_S = 5.0  # that nobody waits for without a word


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
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Precision, bool]:
    """The fastest of ``choices``, measured in rounds of one step each, and whether that is sure.

    The first choice, the plain one, stays unless another is :data:`WORTH` times as fast for
    certain; of several that are, an earlier one stays unless a later is so against it. Where
    other programs disturb the steps too much to tell, it is not sure, and the plain one stays:
    the next measurement may tell.

    Args:
        choices: at least one; the first is what the others are compared with.
        time_step: runs the step at a precision and returns its seconds; infinite where it cannot.
        say: told, where it will take long, for how long.
    """
    plain = choices[0]
    if len(choices) == 1:
        return plain, True
    seconds = _measured(choices, time_step, say)
    gains = {c: _Gain.of(seconds[plain], seconds[c]) for c in seconds if c is not plain}
    measured = f"auto measured {len(choices)} ways, {len(seconds[plain])} steps each"
    won = [choice for choice, gain in gains.items() if gain.is_sure]
    if won:
        best = max(won, key=lambda choice: gains[choice].times)
        chosen = next(
            c for c in won if c is best or not _Gain.of(seconds[c], seconds[best]).is_sure
        )
        told = f"{gains[chosen].times:.2f} times the speed of plain {plain.name}"
        reason = f"{measured}: {told} in forward and backward"
        better = [c for c in seconds if _Gain.of(seconds[chosen], seconds[c]).is_vague]
        if better:
            reason += f" (not remembered: {better[0]} may be faster still)"
        return replace(chosen, reason=reason), not better
    vague = {choice: gain for choice, gain in gains.items() if gain.is_vague}
    if vague:
        choice, gain = max(vague.items(), key=lambda item: item[1].high)
        told = f"{choice}: {gain.low:.2f} to {gain.high:.2f} times the speed of plain {plain.name}"
        reason = f"{measured}, too uneven to tell ({told}); plain stays and is not remembered"
        return replace(plain, reason=reason), False
    told = f"none is {WORTH:.2f} times the speed of plain {plain.name}"
    return replace(plain, reason=f"{measured}: {told}"), True


def _measured(
    choices: Sequence[Precision],
    time_step: Callable[[Precision], float],
    say: Callable[[str], None],
) -> dict[Precision, list[float]]:
    """Seconds of each round's step, by choice; without those that cannot run.

    The order is drawn anew each round, so that no choice always follows the same one and nothing
    that comes and goes in the machine keeps step with one. A round before them warms up.
    """
    warm = {choice: time_step(choice) for choice in choices}
    able = [choice for choice, taken in warm.items() if math.isfinite(taken)]
    long_s = _FEWEST_ROUNDS * sum(warm[choice] for choice in able)
    if long_s > _LONG_S:
        say(
            f"Precision: auto measures {len(able)} ways to compute, {_FEWEST_ROUNDS} steps each: "
            f"some {long_s:.0f} s (none where the precision is named)"
        )
    seconds: dict[Precision, list[float]] = {choice: [] for choice in able}
    order, rounds, spent_s = random.Random(0), 0, 0.0
    while rounds < _FEWEST_ROUNDS or (rounds < _MOST_ROUNDS and spent_s < _BUDGET_S):
        for choice in order.sample(able, len(able)):
            taken = time_step(choice)
            seconds[choice].append(taken)
            spent_s += taken
        rounds += 1
    return seconds


class _Gain(NamedTuple):
    """How many times as fast one way is as another."""

    low: float
    high: float
    """Between these the median of such ratios lies, 9 times in 10."""
    times: float
    """By the ratios' median and by the shortest times, whichever is less."""

    @classmethod
    def of(cls, slow: Sequence[float], fast: Sequence[float]) -> _Gain:
        """By the two steps of each round, which other programs disturb alike; what disturbs one
        of them alone is as likely to be for either side, whatever its size."""
        ratios = sorted(map(_ratio, slow, fast))
        # A median lies below the n-th least of so many with the chance of as few heads of coins.
        rounds, outside = len(ratios), 0
        while sum(math.comb(rounds, k) for k in range(outside + 2)) <= _DOUBT * 2**rounds:
            outside += 1
        times = min(statistics.median(ratios), _ratio(min(slow), min(fast)))
        return cls(ratios[outside], ratios[-1 - outside], times)

    @property
    def is_sure(self) -> bool:
        """Whether it is worth it for certain."""
        return min(self.low, self.times) >= WORTH

    @property
    def is_vague(self) -> bool:
        """Whether it may be worth it, and is less certain than by what it would be worth."""
        return self.high >= WORTH and self.high >= WORTH * min(self.low, self.times)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0  # a clock that stands still tells nothing


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
