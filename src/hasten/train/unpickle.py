"""Reading and preparing what ``torch.save`` writes, without ever running code from a file."""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import torch

from hasten.devices import runtime
from hasten.errors import CheckpointError
from hasten.train import archives, pickles

_SCALARS = (bool, int, float, str, type(None))
_MAPPINGS = (dict, OrderedDict, Counter)
_FORBIDDEN = re.compile(r"GLOBAL (\S+)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")


def to_host(
    value: Any,
    path: str,
    memo: dict[Any, torch.Tensor] | None = None,
    copied: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Take a nest of plain values with every tensor in host memory, detached.

    Tensors that are one in memory stay one, so that tied weights are written once.

    Args:
        value: dict, list, tuple, str, int, float, bool, None and tensors, in any nesting.
        path: how a message names ``value`` (``training``).
        memo: tensors taken so far, where several nests may hold the same ones.
        copied: makes the host's copy of a strided tensor; by default one that is on the host
            already is taken as it is.

    Raises:
        CheckpointError: a value of another type, which could be saved but not be loaded without
            running code; the message gives its path (``training['scheduler']['fn']``).
    """
    memo = {} if memo is None else memo
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _tensor_to_host(value, memo, copied)
    if kind in _MAPPINGS:
        for key in value:
            if type(key) not in _SCALARS:
                raise CheckpointError(
                    f"{path} has a key of type {_type_name(key)}; keys must be strings or numbers"
                )
        copy = {key: to_host(item, f"{path}[{key!r}]", memo, copied) for key, item in value.items()}
        if kind is dict:
            return copy
        rebuilt = kind(copy)
        versions = getattr(value, "_metadata", None)  # of a state_dict, which modules convert by
        if versions is not None:
            cast(Any, rebuilt)._metadata = to_host(versions, f"{path}._metadata", memo, copied)
        return rebuilt
    if kind in (list, tuple, torch.Size):
        items = [to_host(item, f"{path}[{i}]", memo, copied) for i, item in enumerate(value)]
        return items if kind is list else tuple(items)
    raise CheckpointError(
        f"{path}: {_type_name(value)} cannot go into a checkpoint, because loading it would run "
        f"code. {_advice(value)}"
    )


def read(file: BinaryIO, name: str, *, size: int, map_location: Any, trust: bool = False) -> Any:
    """Read a ``torch.save`` file (zip or the older format).

    Args:
        file: open at its start.
        name: how a message names the file.
        size: of the file, in bytes; nothing read may claim more memory than this.
        map_location: as ``torch.load`` takes it.
        trust: True runs whatever program the file holds, to make the objects that it wants made.

    Raises:
        CheckpointError: the file is no such file, is cut or altered, asks to run code (unless
            it is trusted), or claims more memory than it holds.
    """
    is_archive = archives.check(file, name, size)
    if not trust:
        _check_pickles(file, name, size, is_archive)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of formats: what is wrong is told as an error
            value = torch.load(file, map_location=map_location, weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise _refusal(name, error) from error
    except MemoryError as error:
        raise CheckpointError(f"{name}: not enough memory to read its {size:,} bytes") from error
    except Exception as error:  # a broken file can fail anywhere in it
        raise CheckpointError(
            f"{name} cannot be read as a file of torch.save: {_first_line(error)}. It may be cut, "
            "altered or of another format; use another copy or an older checkpoint"
        ) from error
    for tensor in () if trust else tensors(value):
        if tensor.device.type != "meta" and _storage_bytes(tensor) > size:
            raise CheckpointError(
                f"{name} claims a tensor of {_storage_bytes(tensor):,} bytes in a file of "
                f"{size:,}: it is altered or malicious, and refused"
            )
    return value


def _check_pickles(file: BinaryIO, name: str, size: int, is_archive: bool) -> None:
    """Refuse what loading would choke on or run, before torch sees any of it."""
    try:
        if is_archive:
            for part, length in archives.pickles(file):
                pickles.check(part, length, size)
        else:
            pickles.check_old_file(file, size)
    except pickles.Refused as refused:
        if refused.wants is not None:
            raise _wants_code(name, refused.wants) from refused
        raise CheckpointError(
            f"{name} cannot be read as a file of torch.save: {refused}. It may be cut, altered or"
            " of another format; use another copy or an older checkpoint"
        ) from refused
    finally:
        file.seek(0)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of dicts, lists and tuples."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)


def _tensor_to_host(
    tensor: torch.Tensor,
    memo: dict[Any, torch.Tensor],
    copied: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        host = tensor.detach().cpu()
        return host.clone() if copied is not None and runtime.is_host(tensor.device) else host
    # The original is kept in the memo's value's key through its storage only while `value` lives,
    # which the caller guarantees for the call, so that addresses are not reused.
    key = (
        tensor.device,
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
        tensor.dtype,
    )
    if key not in memo:
        host = tensor.detach().cpu() if copied is None else copied(tensor.detach())
        if _storage_bytes(host) > host.numel() * host.element_size():
            host = host.clone()  # a view: torch.save would write all that it looks into
        memo[key] = host
    return memo[key]


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def _refusal(name: str, error: pickle.UnpicklingError) -> CheckpointError:
    text = str(error)
    found = _FORBIDDEN.search(text)
    if found:
        return _wants_code(name, found[1])
    reason = _REASON.search(text)
    return CheckpointError(
        f"{name} is refused: it is no plain dictionary of tensors, or is altered "
        f"({reason[1] if reason else _first_line(error)})"
    )


def _wants_code(name: str, wants: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is refused: to load it, Python would have to run {wants}, and hasten never runs"
        " code from a checkpoint. If you trust whoever made it with all that you may do on this"
        " machine, use --trust (weights.read(…, trust=True)), and save only model.state_dict()"
        " from then on"
    )


def _advice(value: Any) -> str:
    if type(value).__module__.split(".")[0] == "numpy":
        return "Use torch.from_numpy(...) for an array, .item() for a number"
    return "Keep dicts, lists, tuples, strings, numbers and tensors only (a state_dict())"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
