"""Finding a trained model: which file a path means, its weights, and what goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import CheckpointError, UsageError
from hasten.train import checkpoint, manifest, weights
from hasten.train.folder import CONFIG
from hasten.train.result import WEIGHTS
from hasten.vision.data.layout import promises_image
from hasten.vision.facts import Facts, Given, from_config, from_given
from hasten.vision.file_names import show

_NAMED = 5  # runs that a message names


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Weights and facts, read from files; no code of theirs was run."""

    path: Path
    """The checkpoint's folder or the file that the weights come from."""
    about: str
    """Which one it is, in a few words."""
    state: dict[str, Any]
    """The weights, on the host."""
    facts: Facts
    complete: bool
    """Whether the facts came with the weights, not from the caller."""


def find(path: str | Path, which: str | None, given: Given) -> Trained:
    """Read what a path means.

    Args:
        path: a run's folder, a checkpoint's, or a file of weights.
        which: of a run's checkpoints the ``best`` (also None) or the ``last``.
        given: facts for weights that come without.

    Raises:
        CheckpointError: there is none there, or it is broken, altered or unsafe.
        UsageError: ``which`` has nothing to choose from, or facts are needed and not given.
    """
    path = Path(path)
    if which not in (None, "best", "last"):
        raise UsageError(f"--which is best or last, not {which!r}")
    if path.name in (manifest.NAME, manifest.MODEL) and (path.parent / manifest.NAME).is_file():
        path = path.parent
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(
                f"{show(path)} does not exist; give a run's folder (runs/NAME), a checkpoint's, or"
                " a file of weights"
            )
        _refuse_which(which, path)
        return _file(path, given)
    alone = path / WEIGHTS
    if alone.is_file() and not (path / checkpoint.FOLDER).is_dir():
        # Somebody kept the weights of a run and threw its checkpoints away.
        _refuse_which(which, path)
        return _file(alone, given)
    _refuse_other_folder(path)
    found = checkpoint.find(path, "newest" if which == "last" else "best")
    if found == path:
        _refuse_which(which, path)
    return _checkpoint(found, which, given)


def _refuse_which(which: str | None, path: Path) -> None:
    if which is not None:
        raise UsageError(f"--which chooses among the checkpoints of a run; {show(path)} is no run")


def _refuse_other_folder(path: Path) -> None:
    try:
        if any(
            (path / name).exists() for name in (checkpoint.FOLDER, manifest.NAME, checkpoint.BEST)
        ):
            return
        below = sorted(each for each in path.iterdir() if each.is_dir())
    except OSError as error:
        raise manifest.failure("read", path, error) from error
    if any(each.name.startswith("step-") for each in (path, *below)):
        return
    runs = [show(each) for each in below if (each / CONFIG).is_file()]
    advice = "give a run's folder (runs/NAME), a checkpoint's, or a file of weights"
    if runs:
        more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
        advice = f"it holds runs, give one of them: {', '.join(runs[:_NAMED])}{more}"
    raise CheckpointError(f"{show(path)} is no run and no checkpoint; {advice}")


def _checkpoint(path: Path, which: str | None, given: Given) -> Trained:
    saved = checkpoint.load(path, map_location="cpu", training=False)
    meta = saved.meta
    config = meta.get("config")
    complete = False
    if isinstance(config, dict) and "architecture" in config:
        complete = True
        facts = from_config(
            config, precision=meta.get("precision"), device=meta.get("device"), source=str(path)
        )
    else:
        facts = from_given(given, show(path))
    marked = checkpoint.best(path.parent) if path.parent.name == checkpoint.FOLDER else None
    if which == "last":
        rank = ", the last"
    elif marked is not None and marked.name == path.name:
        rank = ", the best by validation"
    else:
        rank = ""
    return Trained(
        path=path,
        about=f"epoch {meta['epoch']}, step {meta['step']}{rank}",
        state=saved.model,
        facts=facts,
        complete=complete,
    )


def _file(path: Path, given: Given) -> Trained:
    if promises_image(path.name):
        raise CheckpointError(f"{show(path)} is an image; give the checkpoint first, then images")
    state = weights.read(path, trust=given.trust)
    beside = path.parent / CONFIG
    kept = _kept_beside(beside) if path.name == WEIGHTS and beside.is_file() else None
    if kept is None:
        return Trained(
            path=path,
            about="weights only",
            state=state,
            facts=from_given(given, show(path)),
            complete=False,
        )
    device = kept.get("device")
    facts = from_config(
        kept["config"],
        precision=kept.get("precision"),
        device=device.get("device") if isinstance(device, dict) else None,
        source=str(beside),
    )
    about = f"the run's final weights, described by {CONFIG} beside them"
    return Trained(path=path, about=about, state=state, facts=facts, complete=True)


def _kept_beside(path: Path) -> dict[str, Any] | None:
    """The run's settings, or None where they say nothing of a classifier."""
    try:
        with manifest.open_regular(path) as file:
            content = manifest.parse_json(file.read(manifest.LIMIT_BYTES))
    except OSError as error:
        raise manifest.failure("read", path, error) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no JSON ({error}); mend it, or give a checkpoint's folder"
        ) from error
    config = content.get("config") if isinstance(content, dict) else None
    return content if isinstance(config, dict) and "architecture" in config else None
