"""Host memory as the device sees it: what is pinned, and copies that have not run yet."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hasten.simulate import sparse
from hasten.simulate.frames import Location, locate
from hasten.simulate.records import Hazard

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARED_BYTES = 1 << 22  # copies up to this size are also compared by content


@dataclass(kw_only=True, slots=True)
class _Upload:
    source: torch.Tensor
    version: int
    content: torch.Tensor | None
    done_s: float
    location: Location | None


@dataclass(kw_only=True, slots=True)
class _Download:
    target: torch.Tensor
    address: int
    done_s: float
    location: Location | None


class HostMemory:
    """Knows pinned memory by its storage, and watches non-blocking copies until they are done."""

    def __init__(self, record: Callable[[Hazard], None]) -> None:
        self._record = record
        self._uploads: list[_Upload] = []
        self.downloads: list[_Download] = []

    def pin(self, tensor: torch.Tensor) -> None:
        """Mark the memory of a host tensor as page-locked."""
        for part in _dense(tensor):
            part.untyped_storage().__dict__["_hasten_pinned"] = True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a host tensor is page-locked."""
        if not tensor.is_cpu:
            return False
        return all(
            part.untyped_storage().__dict__.get("_hasten_pinned", False) for part in _dense(tensor)
        )

    def uploading(self, source: torch.Tensor, done_s: float) -> None:
        """Watch a non-blocking copy to the device until the virtual time when it has run."""
        small = source.nbytes <= _COMPARED_BYTES
        self._uploads.append(
            _Upload(
                source=source,
                version=version_of(source),
                content=source.detach().clone() if small else None,
                done_s=done_s,
                location=locate(),
            )
        )

    def downloading(self, target: torch.Tensor, done_s: float) -> None:
        """Watch a non-blocking copy to the host until the host has waited for it."""
        self.downloads.append(
            _Download(
                target=target,
                address=target.untyped_storage().data_ptr(),
                done_s=done_s,
                location=locate(),
            )
        )

    def passed(self, host_s: float) -> None:
        """Settle the copies that are done by the host's virtual time."""
        if self._uploads:
            for upload in self._uploads:
                self._settle(upload)
            self._uploads = [x for x in self._uploads if x.done_s > host_s]
        if self.downloads:
            self.downloads = [x for x in self.downloads if x.done_s > host_s]

    def _settle(self, upload: _Upload) -> None:
        source = upload.source
        changed = version_of(source) != upload.version
        if not changed and upload.content is not None:
            changed = not _same(source, upload.content)
        if changed:
            upload.version = version_of(source)
            upload.content = None
            self._record(Hazard(kind="source-changed", location=upload.location, noticed=locate()))

    def touched(self, tensor: torch.Tensor) -> None:
        """Note that the host reads a tensor: a hazard when its copy has not been waited for."""
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        address = tensor.untyped_storage().data_ptr()
        for download in self.downloads:
            if download.address == address:
                self.downloads.remove(download)
                self._record(
                    Hazard(kind="read-before-sync", location=download.location, noticed=locate())
                )
                return


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that a tensor is made of: itself, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    return sparse.parts(tensor) if tensor.layout in sparse.LAYOUTS else []


_identities = itertools.count(1)


def identity_of(tensor: torch.Tensor) -> int:
    """A number of a tensor's memory that no other memory of the process ever has.

    Addresses are of no use for that: what is freed in one step is handed out again in the next.
    """
    known = tensor.untyped_storage().__dict__
    number: int = known.get("_hasten_identity") or next(_identities)
    known["_hasten_identity"] = number
    return number


def version_of(tensor: torch.Tensor) -> int:
    """The counter that in-place changes of a tensor raise; 0 for one of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = one.detach()
    return (
        bool(torch.equal(raw.view(torch.uint8), other.view(torch.uint8)))
        if (raw.is_contiguous() and raw.dim())
        else bool(torch.equal(raw, other))
    )
