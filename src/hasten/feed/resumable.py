"""What a position says of a DataLoader that was taken over: what of it can be brought back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hasten.errors import CheckpointError
from hasten.feed.stateful import KEY as STATES

_log = logging.getLogger("hasten.feed")

KEY = "dataloader"
"""Under which a position has it."""

WRITTEN = (
    "persistent workers have the data set as it was when they began, and those that begin now have "
    "it as it is now: what was written to it since then (by its set_epoch, say) the ones before "
    "had not"
)
"""What of it is lost where the data set was written to between epochs."""


def check_alike(position: Mapping[str, Any], loader: Any, original: Any) -> None:
    """Refuse to go on within an epoch with a loader whose order is another; warn where what its
    samples draw is.

    Args:
        position: of the loader that the epoch was begun with.
        loader: the Loader or other iterable that it would be gone on with.
        original: the DataLoader that this stands for, or is; None where there is none.

    Raises:
        CheckpointError: one of the two is a DataLoader, the other none.
    """
    kept = position.get(KEY)
    if not position or (kept is None) == (original is None):
        workers = None if original is None or kept is None else kept.get("workers")
        if workers not in (None, original.num_workers if original is not None else None):
            _log.warning(
                "the checkpoint was made with num_workers=%s, and the DataLoader has %s now: its "
                "order is the same, what samples draw is not",
                workers,
                original.num_workers,
            )
        return
    saved = "a hasten.Loader" if kept is None else "a DataLoader"
    here = type(loader).__name__ if original is None else "DataLoader"
    raise CheckpointError(
        f"the checkpoint was made in an epoch of {saved}, and this loader is a {here}, whose order "
        f"is another: go on with {saved}, at least to the epoch's end"
    )


def brings_back(position: Mapping[str, Any], original: Any) -> bool:
    """Whether a position brings a DataLoader that is taken over to where it was, with nothing
    lost: else it is read again up to there, by one who can."""
    kept = position.get(KEY)
    if kept is None or kept["refuses"] or kept.get("lost", "") not in ("", WRITTEN):
        return False
    return _as_many(kept, original)


def beginning(position: Mapping[str, Any], original: Any) -> dict[str, Any] | None:
    """Of a position, where its epoch begins by workers that go on from the epoch before, for who
    reads it again: nothing is drawn for them then. None where it begins as any does."""
    kept = position.get(KEY)
    if kept is None or not kept.get("again"):
        return None
    begins = {name: value for name, value in kept.items() if name != "global"}
    begins["after"] = kept.get("before", kept["after"]) if _as_many(kept, original) else {}
    return {**position, "batch": 0, KEY: {**begins, "workers": original.num_workers}}


def _as_many(kept: Mapping[str, Any], original: Any) -> bool:
    workers = original.num_workers
    return bool(kept.get("workers", workers) == workers)


def within_epoch(position: Mapping[str, Any]) -> bool:
    """Whether a position of a DataLoader that is taken over can be moved about in its epoch."""
    return "global" in position.get(KEY, {})


def keeps(position: Mapping[str, Any]) -> bool:
    """Whether a position has something of its DataLoader that an epoch's number does not tell."""
    kept = position.get(KEY, {})
    return any(kept.get(name) for name in ("own", STATES, "again", "lost"))


def lost(position: Mapping[str, Any]) -> str:
    """What a position does not bring back of its DataLoader, in words, where nothing is loaded of
    it: `load_state` says it of what is. '' where nothing is missing."""
    kept = position.get(KEY, {})
    return "" if kept.get("again") else str(kept.get("lost", ""))
