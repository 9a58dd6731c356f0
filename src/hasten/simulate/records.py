"""What a simulation saw, as plain records in the order in which it happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.simulate.frames import Location


@dataclass(frozen=True, kw_only=True)
class Sync:
    """The host waited for the device."""

    kind: str
    """What made it wait: item, bool, print, cpu, numpy, tolist, nonzero, mask, synchronize, ..."""
    location: Location | None
    device: int
    waited_s: float
    """Virtual seconds that the host waited, by the model's clock. Not a measured time."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Bytes went between host and device, or between devices."""

    direction: str
    """h2d, d2h or d2d."""
    bytes: int
    pinned: bool
    """Whether the host side is page-locked."""
    non_blocking: bool
    location: Location | None
    storage_id: int
    """Of the source: equal for copies of the same memory, and never used for other memory."""
    offset: int
    """Of the source in that memory, in elements: what tells one slice of it from another."""
    version: int
    """Of the source, which in-place changes raise: equal means the same content again."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Tensors of two devices met in an operator that does not allow it."""

    op: str
    message: str
    location: Location | None
    repaired: bool


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """An order of host and device work whose outcome is undefined on a real device."""

    kind: str
    """source-changed: host memory was written before a non-blocking copy from it had run;
    read-before-sync: the target of a non-blocking copy was read before a synchronisation;
    reused: memory that was freed went to another tensor before a stream that nobody had recorded
    on it (`Tensor.record_stream`) was done with it."""
    location: Location | None
    """Where the copy was made, or the memory was last used."""
    noticed: Location | None
    """Where the conflicting access was made, or the synchronisation that came too late."""


Event = Sync | Copy | Mismatch | Hazard


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor that took part in a mismatch."""

    role: str
    """The operator's name for it, as ``mat1``; with the position in a list, as ``tensors[1]``."""
    tensor: Any
    device: str


@dataclass(frozen=True, kw_only=True)
class MismatchInfo:
    """What `on_mismatch` is told: the operator, its tensors, and CUDA's message."""

    op: str
    operands: tuple[Operand, ...]
    message: str
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a tensor was made, and by which call (``torch.zeros``)."""

    file: str
    line: int
    how: str


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Bytes of one simulated device."""

    allocated_bytes: int
    peak_bytes: int
    total_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
