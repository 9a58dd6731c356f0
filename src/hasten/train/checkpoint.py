"""Checkpoints: folders written whole or not at all, checked before a byte of them is believed.

::

    RUN/checkpoints/
        step-00000938/          one checkpoint
            model.pt            torch.save of the model's state_dict, without wrappers' prefixes
            training.pt         torch.save of everything else that training needs to go on
            part-00000.safetensors, …   of a model in parts (fsdp): those of each process
            checkpoint.json     the manifest, written last: step, versions, SHA-256 of each file
        best.json               names the best of them, replaced atomically
        .step-….tmp-…           what a run killed while saving left; removed by the next
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hasten.errors import CheckpointError
from hasten.train import atomic, manifest, pieces, unpickle
from hasten.train.buffers import HostBuffers
from hasten.train.kept import BEST, FOLDER, best, find, mark_best, name_of, newest, prune
from hasten.train.manifest import MODEL, TRAINING, Manifest

if TYPE_CHECKING:
    from hasten.train.parts import Parts

__all__ = [
    "BEST",
    "FOLDER",
    "Prepared",
    "Saved",
    "best",
    "find",
    "load",
    "mark_best",
    "name_of",
    "newest",
    "prepare",
    "prune",
    "save",
    "write",
]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint, loaded."""

    path: Path
    model: dict[str, torch.Tensor]
    """The model's state, by names without wrappers' prefixes."""
    training: dict[str, Any]
    """Optimizer, scheduler, scaler, random states, position in the data; empty if not asked for."""
    meta: dict[str, Any]
    """What the saver said, with ``step`` and ``epoch``."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A checkpoint that is ready to be written."""

    parts: dict[str, Any]
    """What each file is to hold, its tensors on the host."""
    head: dict[str, Any]
    """All of the manifest but its files."""
    copies_made: Callable[[], None]
    """Waits for the tensors to have arrived on the host."""
    in_parts: Parts | None = None
    """The tensors that lie in parts over several processes, which write them together."""


def save(
    folder: str | Path,
    *,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    meta: dict[str, Any],
) -> None:
    """Write a checkpoint; at no instant is there half of one at ``folder``.

    Args:
        folder: where, usually ``RUN/checkpoints/`` + ``name_of(step)``; its parent is made when
            the parent's own parent is there. A checkpoint there already is replaced.
        model: a ``state_dict``: tensors by name, on any device.
        training: dict, list, tuple, str, int, float, bool, None and tensors, in any nesting.
        meta: JSON values; ``step`` (int, optimizer steps done) is needed, ``epoch`` is 0 if absent.

    Raises:
        CheckpointError: the disk is full, the folder read-only or gone (what was saved before is
            as it was), or ``training`` holds a value that could not be loaded safely.
        UsageError: ``meta`` has no step or is no JSON.
    """
    write(folder, prepare(model=model, training=training, meta=meta))


def prepare(
    *,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    meta: dict[str, Any],
    buffers: HostBuffers | None = None,
    in_parts: Parts | None = None,
) -> Prepared:
    """Check and collect what :func:`write` is to write.

    Args:
        model: see :func:`save`.
        training: see :func:`save`.
        meta: see :func:`save`.
        buffers: where the tensors are copied, so that they may change before they are written;
            without, what lies on the host is not copied and must stay as it is until then.
        in_parts: what this process writes of tensors that lie in parts; ``model`` and ``training``
            have None in their places.

    Raises:
        CheckpointError: see :func:`save`.
        UsageError: see :func:`save`.
        RuntimeError: the host has no memory for copies.
    """
    memo: dict[Any, torch.Tensor] = {}
    head = manifest.head(meta)
    copied = None if buffers is None else buffers.copy
    if buffers is not None:
        buffers.begin()
    parts = {
        MODEL: unpickle.to_host(_as_dict(model), "model", memo, copied),
        TRAINING: unpickle.to_host(_as_dict(training), "training", memo, copied),
    }
    if in_parts is not None:
        head["schema"] = manifest.SCHEMA_IN_PARTS
        in_parts.take(copied)
    if buffers is not None:
        buffers.end()
    return Prepared(
        parts=parts,
        head=head,
        copies_made=buffers.wait if buffers else lambda: None,
        in_parts=in_parts,
    )


def write(folder: str | Path, prepared: Prepared) -> None:
    """Write what was prepared; at no instant is there half of a checkpoint at ``folder``.

    Raises:
        CheckpointError: see :func:`save`.
    """
    folder = Path(folder)
    prepared.copies_made()
    try:
        atomic.make_folder(folder.parent)
        atomic.clean(folder.parent)
        with atomic.new_folder(folder) as temporary:
            files = {}
            for name, value in prepared.parts.items():
                files[name] = _write_torch(temporary / name, value)
            if prepared.in_parts is not None:
                files |= prepared.in_parts.lead(temporary)
            _write_bytes(
                temporary / manifest.NAME, manifest.render(prepared.head | {"files": files})
            )
    except OSError as error:
        raise manifest.failure("save", folder, error) from error
    finally:
        if prepared.in_parts is not None:
            prepared.in_parts.dismiss()


def load(
    folder: str | Path, *, map_location: Any, training: bool = True, read_parts: bool = True
) -> Saved:
    """Read one checkpoint, after checking its manifest and the SHA-256 of each file read.

    Args:
        folder: one checkpoint's folder (see ``find`` for a run's).
        map_location: the device to load onto, whatever device it was saved from.
        training: False leaves ``training.pt`` unread.
        read_parts: False leaves tensors that were saved in parts on the disk: a
            :class:`hasten.train.pieces.Stored` in the place of each.

    Raises:
        CheckpointError: missing, half written, altered, of a newer hasten, or unsafe; names the
            file and says what to do.
    """
    found = manifest.read(folder)
    parts = {
        name: _read_torch(found, name, map_location)
        for name in ((MODEL, TRAINING) if training else (MODEL,))
    }
    if found.in_parts:
        roots = {"model": parts[MODEL]} | ({"training": parts[TRAINING]} if training else {})
        pieces.put_in(found, roots, read_onto=map_location if read_parts else None)
    return Saved(
        path=found.path,
        model=parts[MODEL],
        training=parts.get(TRAINING, {}),
        meta=found.meta | {"step": found.step, "epoch": found.epoch},
    )


def _as_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    return value if isinstance(value, dict) else dict(value)


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_torch(path: Path, value: Any) -> dict[str, Any]:
    with path.open("wb") as file:
        hashing = atomic.HashingFile(file)
        try:
            torch.save(value, cast(Any, hashing))  # it needs `write` and `flush` only
        except RuntimeError:
            if hashing.error is not None:  # torch hides why it could not write
                raise hashing.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
        manifest.remember_written(os.fstat(file.fileno()), hashing.sha256)
    return {"sha256": hashing.sha256, "bytes": hashing.bytes}


def _read_torch(found: Manifest, name: str, map_location: Any) -> dict[str, Any]:
    path, (sha256, size) = found.path / name, found.files[name]
    with manifest.open_verified(path, sha256) as file:
        value = unpickle.read(file, str(path), size=size, map_location=map_location)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no dictionary; {manifest.USE_ANOTHER}")
    return value
