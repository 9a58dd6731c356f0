"""Matching a file's weights to a model's by name, shape and dtype, and saying why they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hasten.errors import CheckpointError

_SHOWN = 5
_WRAPPER_SEGMENTS = {"module", "_orig_mod"}
_COUNTER = "num_batches_tracked"  # files from before PyTorch 0.4.1 lack it


@dataclass(frozen=True, kw_only=True)
class Match:
    """Weights by the model's names."""

    values: dict[str, Any]
    absent: list[str]
    """Counters that the file lacks and that can be."""
    notes: list[str]


def normal(name: str) -> str:
    """A name without the segments that wrappers add, wherever they are."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def identity(tensor: torch.Tensor) -> Any:
    """A key that two tensors share when they are one in memory (tied weights)."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    if hasattr(tensor, "to_local"):  # in parts: only what this process holds, if any, has a place
        local = tensor.to_local()
        place = local.untyped_storage()._cdata, local.storage_offset()
        return (tensor.device, *place, tensor.size(), tensor.stride(), tensor.dtype)
    return (tensor.device, tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)


def match(
    targets: Mapping[str, Any], state: Mapping[str, Any], *, source: str, model: str
) -> Match:
    """Find each of the model's tensors in the file.

    Args:
        targets: the model's tensors by their names without wrappers.
        state: the file's.
        source: the file, for messages.
        model: the model's class, for messages.

    Raises:
        CheckpointError: any name or shape does not fit.
    """
    _check_ready(targets, model)
    found, unexpected = _by_name(targets, state, source)
    _fill_tied(targets, found, source)
    missing = [name for name in targets if name not in found]
    absent = [name for name in missing if name.rpartition(".")[2] == _COUNTER]
    missing = [name for name in missing if name not in absent]
    wrong = [name for name in found if not _fits(name, targets[name], found[name])]
    if missing or unexpected or wrong:
        raise CheckpointError(_misfit(targets, found, missing, unexpected, wrong, source, model))
    notes = _casts(targets, found)
    if absent:
        notes.append(f"{source} lacks {_some(absent)}; left as they are")
    return Match(values=found, absent=absent, notes=notes)


def _check_ready(targets: Mapping[str, Any], model: str) -> None:
    lazy = [name for name, value in targets.items() if is_lazy(value)]
    if lazy:
        raise CheckpointError(
            f"{model} has parameters without a size yet ({_some(lazy)}): run one batch through it "
            "before loading weights, so that its lazy layers take their shapes"
        )
    meta = [k for k, v in targets.items() if isinstance(v, torch.Tensor) and v.is_meta]
    if meta:
        raise CheckpointError(
            f"{model} has tensors on the meta device, without memory ({_some(meta)}): call "
            "model.to_empty(device=...) before loading weights"
        )


def _by_name(
    targets: Mapping[str, Any], state: Mapping[str, Any], source: str
) -> tuple[dict[str, Any], list[str]]:
    """The file's values by the model's names, and the file's names that the model lacks."""
    counts = Counter(map(normal, targets))
    by_normal = {normal(name): name for name in targets if counts[normal(name)] == 1}
    chosen: dict[str, str] = {}
    unexpected = []
    for name in state:
        target = name if name in targets else by_normal.get(normal(name))
        if target is None:
            unexpected.append(name)
        elif target in chosen:
            raise CheckpointError(
                f"{source} has {chosen[target]} and {name}, which are both {target} of the model; "
                "nothing was loaded"
            )
        else:
            chosen[target] = name
    return {target: state[name] for target, name in chosen.items()}, unexpected


def _fill_tied(targets: Mapping[str, Any], found: dict[str, Any], source: str) -> None:
    """Give names that the model ties to another that one's value, where the file lacks them."""
    groups: dict[Any, list[str]] = {}
    for name, target in targets.items():
        if isinstance(target, torch.Tensor):
            groups.setdefault(identity(target), []).append(name)
    for names in groups.values():
        there = [name for name in names if name in found]
        if len(names) == 1 or not there:
            continue
        value = found[there[0]]
        for name in names:
            other = found.setdefault(name, value)
            if other.shape == value.shape and not torch.equal(other, value):
                raise CheckpointError(
                    f"{there[0]} and {name} are one tensor in the model and differ in {source}: "
                    "it is of a model that does not tie them; nothing was loaded"
                )


def _fits(name: str, target: Any, value: Any) -> bool:
    if not isinstance(target, torch.Tensor):
        return not isinstance(value, torch.Tensor)
    return (
        isinstance(value, torch.Tensor)
        and target.shape == value.shape
        and (torch.can_cast(value.dtype, target.dtype) or name.endswith(_COUNTER))
        and not value.is_meta
    )


def _casts(targets: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    pairs = Counter(
        (_plain(value.dtype), _plain(targets[name].dtype))
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.dtype != targets[name].dtype
    )
    return [
        f"{count} tensor{'s' if count > 1 else ''} cast from {old} to {new}"
        for (old, new), count in pairs.items()
    ]


def _misfit(
    targets: Mapping[str, Any],
    found: Mapping[str, Any],
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
    source: str,
    model: str,
) -> str:
    lines = [f"{source} does not fit the model {model}; nothing was loaded."]
    if missing:
        lines.append(f"  missing in the file: {_some(missing)}")
    if unexpected:
        lines.append(f"  unknown to the model: {_some(unexpected)}")
    if wrong:
        lines.append(f"  wrong: {_some((_difference(n, found, targets) for n in wrong), '; ')}")
    lines.append(_likely_cause(targets, found, missing, unexpected, wrong))
    return "\n".join(lines)


def _likely_cause(
    targets: Mapping[str, Any],
    found: Mapping[str, Any],
    missing: list[str],
    unexpected: list[str],
    wrong: list[str],
) -> str:
    if not found:
        return "No name is in both: the file is of another model (--model) or has other names."
    if missing or unexpected:
        return "The file is of another model, or of another version of it: check --model."
    shapes = [
        (tuple(found[name].shape), tuple(targets[name].shape))
        for name in wrong
        if isinstance(found[name], torch.Tensor) and isinstance(targets[name], torch.Tensor)
    ]
    outer = {(old[0], new[0]) for old, new in shapes if old and new and old[1:] == new[1:]}
    if len(outer) == 1 and all(old[1:] == new[1:] for old, new in shapes) and len(wrong) <= 2:
        old, new = outer.pop()
        return f"Likely another number of classes: {old} in the file, {new} in the model."
    inner = [(old[1], new[1]) for old, new in shapes if len(old) == len(new) == 4]
    if len(inner) == len(wrong) == 1:
        old, new = inner[0]
        return f"Likely another number of channels: {old} in the file, {new} in the model."
    return "The file is of a model of other sizes: check --model, --image-size and the classes."


def _difference(name: str, found: Mapping[str, Any], targets: Mapping[str, Any]) -> str:
    old, new = found[name], targets[name]
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return f"{name} is {type(old).__name__}, not {type(new).__name__}"
    if old.shape != new.shape:
        return f"{name} is {list(old.shape)} in the file and {list(new.shape)} in the model"
    if old.is_meta:
        return f"{name} has no values (meta device)"
    return f"{name} is {_plain(old.dtype)} in the file and {_plain(new.dtype)} in the model"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Iterable[str], separator: str = ", ") -> str:
    """The first five, and how many more."""
    names = list(names)
    more = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
