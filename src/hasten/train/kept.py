"""Of a folder of checkpoints: the newest whole one, the best one, those that are kept.

The last checkpoint is the one with the highest step in its manifest; clocks are never asked. The
best is named by a file, ``best.json``, which is replaced atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from hasten.errors import CheckpointError, UsageError
from hasten.train import atomic, manifest
from hasten.train.manifest import Manifest
from hasten.train.together import ALONE, World

BEST = "best.json"
FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder's name for a step: ``step-00000938``."""
    return f"step-{step:08d}"


def newest(
    folder: str | Path,
    world: World = ALONE,
    *,
    reads: Callable[[Manifest], Iterable[str]] | None = None,
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint among those in ``folder``, by the step in their manifests.

    Args:
        folder: the folder of checkpoints, ``RUN/checkpoints``; it may be absent.
        world: the processes that are to find one whole, all of them.
        reads: tells which files of a checkpoint this process is to check: those that it will
            load; by default all.

    Returns:
        Its path, or None where there is none; and the newer ones that were passed over, each with
        the reason.
    """
    listed = world.by_main(
        lambda: [
            (found.path, None) if isinstance(found, Manifest) else found
            for found in _newest_first(Path(folder))
        ]
    )
    passed_over: list[tuple[Path, str]] = []
    for path, reason in world.first(listed) or []:
        why = reason or _what_is_wrong_for_all(path, world, reads)
        if why is None:
            return path, passed_over
        passed_over.append((path, why))
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
            whole += _what_is_wrong(found, found.files, as_written=True) is None
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
        UsageError: ``why`` is no JSON (no NaN, no objects).
    """
    folder = Path(folder)
    found = manifest.read(folder / Path(checkpoint).name)
    mark = {"schema": manifest.SCHEMA, "folder": found.path.name, "step": found.step} | why
    try:
        text = json.dumps(mark, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"what is kept beside the best must be JSON: {error}") from error
    try:
        with atomic.new_file(folder / BEST) as temporary:
            temporary.write_bytes(text.encode())
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


def _what_is_wrong_for_all(
    path: Path, world: World, reads: Callable[[Manifest], Iterable[str]] | None
) -> str | None:
    """Why a checkpoint is not whole for one of the processes, each of which looks at its own
    files; None where it is for all."""
    try:
        found = manifest.read(path)
        mine = _what_is_wrong(found, found.files if reads is None else reads(found))
    except CheckpointError as error:
        mine = str(error)
    told = [
        f"rank {rank}: {why}" if rank else why
        for rank, why in enumerate(world.gather(mine))
        if why is not None
    ]
    return told[0] if told else None


def _what_is_wrong(
    found: Manifest, files: Iterable[str], *, as_written: bool = False
) -> str | None:
    """Why a checkpoint's files are not those of its manifest, or None.

    Args:
        found: its manifest.
        files: those to look at.
        as_written: what this process has written itself, and nobody touched since, is believed
            to be as it was written: read back, it would come from the system's memory, and tell
            nothing of the disk.
    """
    for name in sorted(files):
        sha256, _ = found.files[name]
        try:
            if not (as_written and manifest.is_as_written(found.path / name, sha256)):
                manifest.open_verified(found.path / name, sha256).close()
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
