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

The last checkpoint is the one with the highest step in its manifest; clocks are never asked.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from hasten.errors import CheckpointError, UsageError
from hasten.train import atomic, manifest, pieces, unpickle
from hasten.train.buffers import HostBuffers
from hasten.train.manifest import MODEL, TRAINING, Manifest

if TYPE_CHECKING:
    from hasten.train.parts import Parts

BEST = "best.json"
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


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


def name_of(step: int) -> str:
    """The folder's name for a step: ``step-00000938``."""
    return f"step-{step:08d}"


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
        folder.parent.mkdir(exist_ok=True)
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


def newest(folder: str | Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint among those in ``folder``, by the step in their manifests.

    Args:
        folder: the folder of checkpoints, ``RUN/checkpoints``; it may be absent.

    Returns:
        Its path, or None where there is none; and the newer ones that were passed over, each with
        the reason.
    """
    passed_over: list[tuple[Path, str]] = []
    for found in _newest_first(Path(folder)):
        if isinstance(found, Manifest):
            reason = _what_is_wrong(found)
            if reason is None:
                return found.path, passed_over
            passed_over.append((found.path, reason))
        else:
            passed_over.append(found)
    return None, passed_over


def prune(folder: str | Path, keep: int, also: Iterable[Path] = ()) -> list[Path]:
    """Remove all but the ``keep`` newest whole checkpoints, the best one, and those in ``also``.

    Folders that are not whole are not counted, and left for a person to look at.

    Returns:
        The checkpoints removed.

    Raises:
        CheckpointError: one could not be removed; names it.
        UsageError: ``keep`` is below 1.
    """
    if keep < 1:
        raise UsageError(f"keep must be 1 or more, not {keep}: a run keeps its last checkpoint")
    folder = Path(folder)
    spared = {path.name for path in also} | {_best_name(folder)}
    whole, removed = 0, []
    for found in _newest_first(folder):
        if not isinstance(found, Manifest):
            continue
        if whole < keep:
            # The SHA-256 is asked too: a broken newest one must not cost the last that is whole.
            whole += _what_is_wrong(found) is None
        elif found.path.name not in spared:
            try:
                atomic.remove_folder(found.path)
            except OSError as error:
                raise manifest.failure("remove", found.path, error) from error
            removed.append(found.path)
    return removed


def mark_best(folder: str | Path, checkpoint: str | Path, **why: Any) -> None:
    """Name one checkpoint of ``folder`` as the best; replaces the earlier mark atomically.

    Args:
        folder: the folder of checkpoints.
        checkpoint: one in it.
        why: JSON values to keep beside the name (``metric="val_accuracy", value=0.91``).

    Raises:
        CheckpointError: it is no checkpoint, or the disk is full and the like.
    """
    folder = Path(folder)
    found = manifest.read(folder / Path(checkpoint).name)
    mark = {"schema": manifest.SCHEMA, "folder": found.path.name, "step": found.step} | why
    try:
        with atomic.new_file(folder / BEST) as temporary:
            _write_bytes(temporary, (json.dumps(mark, indent=1) + "\n").encode())
    except OSError as error:
        raise manifest.failure("save", folder / BEST, error) from error


def best(folder: str | Path) -> Path | None:
    """The checkpoint marked as the best of ``folder``, or None where none was marked.

    Raises:
        CheckpointError: the mark is broken, or what it names is gone.
    """
    folder = Path(folder)
    name = _best_name(folder)
    if name is None:
        return None
    for path, _ in _candidates(folder):
        if path.is_symlink() and path.name == name:
            raise CheckpointError(f"{path} is a link, which could lead out: refused")
        if path.name == name or atomic.meant_for(path) == name:
            return path
    raise CheckpointError(
        f"{folder / BEST} names {name}, which is not there; remove {BEST} to use the newest"
    )


def find(path: str | Path, which: Literal["newest", "best"] = "newest") -> Path:
    """The checkpoint that a person means by a path.

    Args:
        path: a run's folder, its folder of checkpoints, or one checkpoint.
        which: of several, the newest whole one, or the one marked best (the newest where none is).

    Raises:
        CheckpointError: there is none; says what was looked at and what was wrong with it.
    """
    path = Path(path)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {problem}; give a run's folder or a checkpoint's (runs/NAME/{FOLDER}/step-…)"
        )
    if (path / manifest.NAME).exists() or _NAME.fullmatch(path.name):
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if which == "best" and (marked := best(folder)):
        return marked
    found, passed_over = newest(folder)
    if found is None:
        reasons = "".join(f"\n  {why}" for _, why in passed_over)
        raise CheckpointError(f"{path} holds no whole checkpoint{':' if reasons else ''}{reasons}")
    return found


def _as_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    return value if isinstance(value, dict) else dict(value)


def _newest_first(folder: Path) -> list[Manifest | tuple[Path, str]]:
    """Manifests of the checkpoints in a folder, and what is wrong with those that have none."""
    found: list[tuple[int, str, Manifest | tuple[Path, str]]] = []
    for path, step in _candidates(folder):
        try:
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link, which could lead out: refused")
            good = manifest.read(path)
            found.append((good.step, path.name, good))
        except CheckpointError as error:
            found.append((step, path.name, (path, str(error))))
    return [item for _, _, item in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def _candidates(folder: Path) -> list[tuple[Path, int]]:
    """Folders that look like checkpoints with the step in their names.

    Those moved aside by a run that was killed before it filled their place count too.
    """
    try:
        entries = [(path, path.name) for path in sorted(folder.iterdir())]
        aside = [(path, name) for path, name, kind in atomic.leftovers(folder) if kind == "old"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise manifest.failure("read", folder, error) from error
    entries += [(path, name) for path, name in aside if not (folder / name).exists()]
    matches = ((path, _NAME.fullmatch(name)) for path, name in entries)
    return [(path, int(match[1])) for path, match in matches if match and path.is_dir()]


def _what_is_wrong(found: Manifest) -> str | None:
    """Why a checkpoint's files are not those of its manifest, or None. Asked again, it is fast."""
    prints = []
    for name in sorted(found.files):
        try:
            status = (found.path / name).stat()
        except OSError as error:
            return str(manifest.failure("read", found.path / name, error))
        prints.append((name, status.st_ino, status.st_mtime_ns, status.st_size, *found.files[name]))
    return _hash_files(found.path, tuple(prints))


@functools.lru_cache(maxsize=256)
def _hash_files(folder: Path, prints: tuple[tuple[Any, ...], ...]) -> str | None:
    try:
        for name, *_, sha256, _size in prints:
            manifest.open_verified(folder / name, sha256).close()
    except CheckpointError as error:
        return str(error)
    return None


def _best_name(folder: Path) -> str | None:
    path = folder / BEST
    try:
        with manifest.open_regular(path) as file:
            mark = manifest.parse_json(file.read(manifest.LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise manifest.failure("read", path, error) from error
    except ValueError:
        mark = None
    name = mark.get("folder") if isinstance(mark, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{path} names no checkpoint of its folder; remove it to use the newest"
        )
    return name


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
    return {"sha256": hashing.sha256, "bytes": hashing.bytes}


def _read_torch(found: Manifest, name: str, map_location: Any) -> dict[str, Any]:
    path, (sha256, size) = found.path / name, found.files[name]
    with manifest.open_verified(path, sha256) as file:
        value = unpickle.read(file, str(path), size=size, map_location=map_location)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no dictionary; {manifest.USE_ANOTHER}")
    return value
