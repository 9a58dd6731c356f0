"""What a position says of a DataLoader that was taken over: what of it can be brought back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.feed.stateful import KEY as STATES

KEY = "dataloader"
"""Under which a position has it."""

WRITTEN = (
    "persistent workers have the data set as it was when they began, and those that begin now have "
    "it as it is now: what was written to it since then (by its set_epoch, say) the ones before "
    "had not"
)
"""What of it is lost where the data set was written to between epochs."""


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
