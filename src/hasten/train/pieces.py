"""Tensors that lie in parts over several processes: taken apart for a checkpoint, read back as
wholes or in other parts.

PyTorch's distributed checkpoint plans who holds which rows of what; what it would write itself (a
pickle that names the parts) is not used. Each process writes a safetensors file, and the name of
each tensor in it says of what it is a part: where that belongs in the checkpoint, the shape of the
whole, and where in it the part begins, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hasten.errors import CheckpointError
from hasten.train import manifest, tensor_file
from hasten.train.manifest import Manifest

_LONGEST_SHAPE = 64


class Part(NamedTuple):
    """A part of a tensor, in a file."""

    data: torch.Tensor
    """In the file's own memory, not to be believed before the file is checked."""
    offsets: tuple[int, ...]
    """Where it begins in the whole."""
    file: PartFile


class PartFile:
    """A file of parts, in the system's memory of it: what is looked at is read, and no more."""

    def __init__(self, folder: Path, name: str, sha256: str, size: int) -> None:
        self.name = name
        self._path, self._sha256 = folder / name, sha256
        with manifest.open_regular(self._path) as file:
            self._status = os.fstat(file.fileno())
            header, start = tensor_file.header(file, self._path, size)
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch: writable
        self.tensors: dict[str, torch.Tensor] = {}
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            dtype, shape, first, last = tensor_file.entry(self._path, key, entry)
            if start + last > size or first == last:
                raise _refused(self._path, f"{key} lies beyond its end, or is empty")
            data = torch.frombuffer(
                self._memory, dtype=torch.uint8, count=last - first, offset=start + first
            )
            self.tensors[key] = data.view(dtype).view(shape)

    def check(self) -> None:
        """Read the file against its SHA-256, if this process has not done so.

        Raises:
            CheckpointError: it is altered.
        """
        manifest.verify(self._path, self._status, self._sha256, self._digest)

    def _digest(self) -> str:
        return hashlib.sha256(self._memory).hexdigest()


class Stored(torch.Tensor):
    """Stands for a tensor that is in a checkpoint's files and has not been read: it has a shape
    and a dtype. :func:`whole` and :func:`part` read it."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(shape: tuple[int, ...], parts: tuple[Part, ...]) -> Stored:
        """Of parts that make up the whole."""
        stands_for = torch.empty(1, dtype=parts[0].data.dtype, device="cpu").expand(shape)
        made: Stored = torch.Tensor._make_subclass(Stored, stands_for)
        made.parts = parts
        return made


def take_out(nest: Any, at: tuple[str | int, ...], found: dict[str, torch.Tensor]) -> Any:
    """A nest with None for each tensor that lies in parts; these go into ``found``.

    Args:
        nest: dicts, lists, tuples, tensors and plain values.
        at: where in the checkpoint it belongs.
        found: the tensors, by where they belong as JSON.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(nest, DTensor):
        found[json.dumps(at)] = nest
        return None
    if isinstance(nest, Mapping):
        made = OrderedDict((key, take_out(v, (*at, key), found)) for key, v in nest.items())
        if hasattr(nest, "_metadata"):
            made._metadata = nest._metadata  # type: ignore[attr-defined]
        return made if isinstance(nest, OrderedDict) else dict(made)
    if isinstance(nest, (tuple, list)):
        return type(nest)(take_out(item, (*at, i), found) for i, item in enumerate(nest))
    return nest


def mine(
    tensors: Mapping[str, torch.Tensor], copied: Callable[[torch.Tensor], torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The parts that this process is to write, on the host, by the names that files have them by.

    Args:
        tensors: what :func:`take_out` found.
        copied: makes the host's copy; by default what lies there already is not copied.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    held = {}
    for item in planner.create_local_plan().items:
        data, about = planner.resolve_data(item), item.tensor_data
        assert isinstance(data, torch.Tensor) and about is not None
        if not data.numel():
            continue  # more processes than rows
        place = [json.loads(item.index.fqn), list(about.size), list(about.chunk.offsets)]
        data = data.detach()
        held[json.dumps(place)] = data.cpu() if copied is None else copied(data)
    return held


def put_in(found: Manifest, parts: dict[str, Any], *, read_onto: Any) -> None:
    """Put the tensors in a checkpoint's files of parts where they belong.

    Args:
        found: the checkpoint.
        parts: what each other file holds, by what it is: None stands where a tensor belongs.
            Tensors of what is not there are left out.
        read_onto: the device to read them onto; None makes each a :class:`Stored`.

    Raises:
        CheckpointError: a file is altered, or the parts do not make up wholes.
    """
    for place, stored in stored_in(found).items():
        value = stored if read_onto is None else whole(stored).to(read_onto)
        _put(parts, json.loads(place), value, found.path)


def stored_in(found: Manifest) -> dict[str, Stored]:
    """What a checkpoint's files of parts hold, by where it belongs as JSON; only their headers are
    read.

    Raises:
        CheckpointError: a file is altered, or the parts do not make up wholes.
    """
    whole_of: dict[str, tuple[tuple[int, ...], dict[tuple[int, ...], Part]]] = {}
    for name in found.in_parts:
        path = found.path / name
        try:
            file = PartFile(found.path, name, *found.files[name])
        except OSError as error:
            raise manifest.failure("read", path, error) from error
        for key, data in file.tensors.items():
            place, shape, offsets = _place(key, path)
            known, parts_of = whole_of.setdefault(json.dumps(place), (shape, {}))
            inside = len(shape) == data.dim() == len(offsets) and all(
                start + length <= end
                for start, length, end in zip(offsets, data.shape, shape, strict=True)
            )
            if known != shape or not inside:
                raise _refused(path, f"{key} is no part of what it says")
            parts_of[offsets] = Part(data, offsets, file)
    made = {}
    for text, (shape, by_offset) in whole_of.items():
        held = tuple(by_offset[offsets] for offsets in sorted(by_offset))
        if sum(part.data.numel() for part in held) != math.prod(shape) or any(
            part.data.dtype != held[0].data.dtype for part in held
        ):
            raise _refused(found.path, f"the parts of {text} do not make up a whole")
        made[text] = Stored.of(shape, held)
    return made


def files_for(found: Manifest, rank: int, size: int) -> set[str]:
    """The files of a checkpoint that one of ``size`` processes reads which hold tensors in parts.

    They cut tensors as ``fully_shard`` does: in so many parts of the first dimension, all alike
    but the last ones. The first process is given those that no other would read, too.

    Raises:
        CheckpointError: see :func:`stored_in`.
    """
    read: dict[int, set[str]] = {other: set() for other in range(size)}
    for stored in stored_in(found).values():
        if not stored.dim():
            continue  # it is in no parts, and whoever reads it checks its file then
        rows = -(-stored.shape[0] // size)
        for held in stored.parts:
            begin, end = held.offsets[0], held.offsets[0] + held.data.shape[0]
            for other in range(begin // rows, -(-end // rows)):
                read[other].add(held.file.name)
    left = set(found.in_parts).difference(*read.values()) if rank == 0 else set()
    return found.files.keys() - set(found.in_parts) | read[rank] | left


def whole(stored: Stored) -> torch.Tensor:
    """Read it all, to the host."""
    made = torch.zeros(tuple(stored.shape), dtype=stored.dtype, device="cpu")
    _fill(made, stored)
    return made


def part(target: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Read what this process holds of it where it holds ``target``, in parts itself; no more."""
    made = torch.zeros_like(target, dtype=stored.dtype, requires_grad=False)
    _fill(made, stored)
    return made


def _fill(target: torch.Tensor, stored: Stored) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(one.offsets), sizes=one.data.size())
        for one in stored.parts
    ]
    about = TensorStorageMetadata(
        properties=TensorProperties(dtype=stored.dtype), size=stored.size(), chunks=chunks
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"it": target}, Metadata({"it": about}), is_coordinator=True)
    held = {one.offsets: one for one in stored.parts}
    for item in planner.finish_plan(planner.create_local_plan()).items:
        one = held[tuple(item.storage_index.offset or ())]
        one.file.check()
        data = one.data
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            data = data.narrow(dim, start, length)
        with torch.no_grad():
            planner.resolve_tensor(item).copy_(data)


def _place(key: str, path: Path) -> tuple[list[Any], tuple[int, ...], tuple[int, ...]]:
    try:
        place, shape, offsets = manifest.parse_json(key.encode())
    except ValueError:
        place = shape = offsets = None
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else None
    if (
        numbers is None
        or any(type(number) is not int or number < 0 for number in numbers)
        or len(numbers) > 2 * _LONGEST_SHAPE
        or not isinstance(place, list)
        or not place
        or any(type(step) not in (str, int) for step in place)
    ):
        raise _refused(path, f"{key[:80]} does not say of what it is a part")
    return place, tuple(shape), tuple(offsets)


def _put(parts: dict[str, Any], place: list[Any], tensor: torch.Tensor, path: Path) -> None:
    root, *steps = place
    if root not in parts:
        return
    try:
        holder: Any = parts[root]
        for step in steps[:-1]:
            holder = holder[step]
        if not isinstance(holder, (dict, list)) or holder[steps[-1]] is not None:
            raise KeyError(steps[-1])
    except (KeyError, IndexError, TypeError):
        raise _refused(path, f"it has no place for {json.dumps(place)}") from None
    holder[steps[-1]] = tensor


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is refused: {why}; {manifest.USE_ANOTHER}")
