"""What to tell when a loss is not finite or memory runs out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import NonFiniteLoss


def tensors(value: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a nest of tuples, lists and mappings, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}[{index}]")


def statistics(batch: Any) -> dict[str, dict[str, Any]]:
    """Of each tensor in a batch, by path: shape, dtype, range, mean, and how many are not finite.

    Reads the values, and so waits for the device.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, tensor in tensors(batch):
        facts: dict[str, Any] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        if tensor.numel() and not tensor.is_complex():
            values = tensor.detach().to("cpu").to(torch.float64)
            finite = values[values.isfinite()]
            facts["not_finite"] = values.numel() - finite.numel()
            if finite.numel():
                facts["min"], facts["max"] = finite.min().item(), finite.max().item()
                facts["mean"] = finite.mean().item()
        found[path] = facts
    return found


def non_finite_loss(
    value: float,
    *,
    epoch: int,
    step: int,
    learning_rate: float | None,
    batch: Any | None,
    last_good: str | None,
) -> NonFiniteLoss:
    """The error for a loss that became NaN or infinite.

    Args:
        value: the loss.
        epoch: counted from 1.
        step: counted from 1 in the whole run.
        learning_rate: of the first parameter group; ``None`` when there is no optimizer.
        batch: the batch that gave the loss; ``None`` when it can no longer be had.
        last_good: the last checkpoint; ``None`` when there is none.
    """
    return _stopped(
        f"the loss became {value} at step {step} (epoch {epoch})",
        {"loss": repr(value)},
        epoch=epoch,
        step=step,
        learning_rate=learning_rate,
        batch=batch,
        last_good=last_good,
    )


def non_finite_weights(modules: Iterable[nn.Module]) -> list[str]:
    """Names of the trained parameters that hold NaN or infinite values. Waits for the device."""
    named = [
        (name, local(parameter.detach()))
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    # A sum is finite only if all of it is, and takes a tenth of the time. One that is not may have
    # overflowed: then each value is looked at.
    suspect = _not_finite(named, [parameter.sum() for _, parameter in named])
    found = _not_finite(suspect, [parameter.isfinite().all() for _, parameter in suspect])
    return [name for name, _ in found]


def _not_finite(
    named: Sequence[tuple[str, torch.Tensor]], tellers: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Those whose teller is false, NaN or infinite."""
    flags = [teller if teller.dtype is torch.bool else teller.isfinite() for teller in tellers]
    # One reading for all that lie on a device, for each makes the host wait.
    if len({flag.device for flag in flags}) == 1:
        whole = torch.stack(flags).cpu().tolist()
    else:
        whole = [bool(flag) for flag in flags]
    return [pair for pair, flag in zip(named, whole, strict=True) if not flag]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that processes hold in parts, the part of this one."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def non_finite_step(
    names: Sequence[str],
    *,
    epoch: int,
    step: int,
    learning_rate: float | None,
    batch: Any | None,
    last_good: str | None,
) -> NonFiniteLoss:
    """The error for weights that became NaN or infinite though no loss was seen to.

    Args:
        names: of the parameters.
        epoch: counted from 1.
        step: the last one done; the weights broke at it or shortly before.
        learning_rate: of the first parameter group; ``None`` when there is no optimizer.
        batch: the last batch.
        last_good: the last checkpoint; ``None`` when there is none.
    """
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return _stopped(
        f"weights became NaN or infinite by step {step} (epoch {epoch}), in {shown}: the loss was"
        " finite, its gradient was not",
        {"weights": list(names)},
        epoch=epoch,
        step=step,
        learning_rate=learning_rate,
        batch=batch,
        last_good=last_good,
    )


def _stopped(
    head: str,
    details: dict[str, Any],
    *,
    epoch: int,
    step: int,
    learning_rate: float | None,
    batch: Any | None,
    last_good: str | None,
) -> NonFiniteLoss:
    facts = statistics(batch) if batch is not None else {}
    lines = [head if learning_rate is None else f"{head}, learning rate {learning_rate:.3g}"]
    if batch is None:
        lines.append("  the batch can no longer be had: use hasten.Loader, which can read it again")
    for path, fact in facts.items():
        lines.append(f"  {path}: {_sentence(fact)}")
    broken = [path for path, fact in facts.items() if fact.get("not_finite")]
    if broken:
        lines.append(f"The data is at fault: {', '.join(broken)} holds NaN or infinite values.")
    else:
        lines.append(
            "Usual causes: a learning rate that is too high (try a tenth), missing gradient"
            " clipping (clip_norm=1.0, --clip-norm 1.0), float16 overflow (try bfloat16 or"
            " float32), or a loss that takes the log or root of zero."
        )
    lines.append(
        f"The last good checkpoint is kept: {last_good}" if last_good else "No checkpoint was made."
    )
    return NonFiniteLoss(
        "\n".join(lines),
        epoch=epoch,
        step=step,
        details={
            **details,
            "learning_rate": learning_rate,
            "batch": facts,
            "checkpoint": last_good,
        },
    )


def _sentence(fact: dict[str, Any]) -> str:
    text = f"{fact['dtype']} {fact['shape']}"
    if "min" in fact:
        text += f", from {fact['min']:.4g} to {fact['max']:.4g}, mean {fact['mean']:.4g}"
    if fact.get("not_finite"):
        text += f", {fact['not_finite']} not finite"
    return text


def out_of_memory(
    error: BaseException, device: torch.device, *, batch: int | None, ran: int | None
) -> str:
    """What to say, and to try, when a batch does not fit.

    Args:
        error: torch's own error.
        device: whose memory ran out.
        batch: samples of the batch that failed; ``None`` when there was none yet.
        ran: the largest batch that ran before; ``None`` when none did.
    """
    memory = runtime.memory(device)
    size = f" of {memory.total_bytes / 2**30:.1f} GiB" if memory else ""
    lines = [f"out of memory on {device} ({runtime.name(device)}{size})"]
    if batch:
        lines[0] += f" with a batch of {batch}"
    if ran:
        lines.append(f"A batch of {ran} ran before it.")
    if batch and batch > 1:
        half = math.ceil(batch / 2)
        lines.append(
            f"Try batch size {half} with accumulate=2, the same effective batch (--batch-size"
            f" {half} --accumulate 2), or --batch-size auto, which finds the largest that fits."
        )
    lines.append("bfloat16 precision, a smaller image size or a smaller model need less, too.")
    first = str(error).strip().splitlines()
    lines.append(f"torch says: {first[0] if first else type(error).__name__}")
    return "\n".join(lines)
