"""Records of a run: plain data that is logged, read back and rendered elsewhere; no torch, no text.

Each record goes to one JSON object and back. The JSON is strict: NaN and infinities, which JSON
does not have, are written as ``null`` and read back as NaN where the field must be a number and
as ``None`` where it may be missing. Fields that this version does not know are passed over, so
that an older hasten reads what a newer one wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self


def finite(value: Any) -> Any:
    """The value with every NaN and infinity in it, at any depth, replaced by ``None``.

    Mappings become dicts with string keys, tuples and lists become lists; numbers of numpy and
    torch become Python's.
    """
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return finite(value.item())
    return str(value)


def _fits(value: Any, kind: str) -> bool:
    """Whether a value of JSON is one of a field's kind; a number that is missing is NaN."""
    if kind.startswith("Mapping"):
        numbers = "Any" not in kind
        return isinstance(value, dict) and all(
            not numbers or _fits(item, "float") for item in value.values()
        )
    if value is None:
        return kind.endswith("None") or kind == "float"
    if isinstance(value, bool | str):
        return type(value).__name__ == kind
    return isinstance(value, int) or (isinstance(value, float) and kind.startswith("float"))


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the kinds of records share: a kind, and JSON both ways."""

    kind: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        """A dict that ``json.dumps(..., allow_nan=False)`` takes, with the record's kind first."""
        return {"kind": self.kind} | {f.name: finite(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record that :meth:`to_json` wrote; unknown fields are passed over.

        Raises:
            ValueError: a field without a default is missing, or has a value of another kind; the
                message names it.
        """
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in data:
                value = data[f.name]
                if not _fits(value, str(f.type)):
                    raise ValueError(f"in a record of kind {cls.kind!r} {f.name} is {value!r:.80}")
                values[f.name] = math.nan if value is None and f.type == "float" else value
            elif f.default is MISSING and f.default_factory is MISSING:
                raise ValueError(f"a record of kind {cls.kind!r} lacks the field {f.name!r}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One log point within an epoch."""

    kind: ClassVar[str] = "step"

    epoch: int
    """Counted from 1."""
    step: int
    """Optimizer steps done in the whole run."""
    batch: int
    """Batches done in this epoch."""
    loss: float
    """Mean over the samples since the log point before."""
    learning_rate: float
    images_per_s: float
    seconds: float
    """Since the run began."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Median seconds a step of each phase since the log point before."""


@dataclass(frozen=True, kw_only=True)
class EpochRecord(Record):
    """One epoch, finished."""

    kind: ClassVar[str] = "epoch"

    epoch: int
    """Counted from 1."""
    step: int
    """Optimizer steps done in the whole run."""
    loss: float
    """Mean training loss over the epoch's samples."""
    val_loss: float | None = None
    val_accuracy: float | None = None
    """Between 0 and 1."""
    seconds: float
    """Of the epoch's training, without validation."""
    images_per_s: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the epoch spent in each phase."""
    learning_rate: float
    peak_memory_bytes: int | None = None
    """The most that the device's allocator held; ``None`` where the device does not tell."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the epoch, by name."""


@dataclass(frozen=True, kw_only=True)
class EventRecord(Record):
    """Something that happened once: a checkpoint, a resume, a change of plan, a warning."""

    kind: ClassVar[str] = "event"

    name: str
    """A short word for machines: ``resumed``, ``checkpoint``, ``plan``, ``interrupted``."""
    message: str = ""
    """One line for people."""
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    """Since the run began."""
    details: Mapping[str, Any] = field(default_factory=dict)


AnyRecord = StepRecord | EpochRecord | EventRecord

_KINDS: dict[str, type[AnyRecord]] = {
    cls.kind: cls for cls in (StepRecord, EpochRecord, EventRecord)
}


def to_line(record: AnyRecord) -> str:
    """The record as one line of strict JSON, without the line's end."""
    return json.dumps(record.to_json(), allow_nan=False, ensure_ascii=False)


def from_line(line: str) -> AnyRecord | None:
    """The record that a line holds, or ``None`` for a kind that this version does not know.

    Raises:
        ValueError: the line is no JSON object, or lacks a field that its kind must have.
    """
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError(f"a record is a JSON object, not {type(data).__name__}")
    cls = _KINDS.get(data.get("kind", ""))
    return None if cls is None else cls.from_json(data)
