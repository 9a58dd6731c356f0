"""The archives that torch.save writes: refused if they are anything else, before they are read."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from hasten.errors import CheckpointError

LIMIT_DIRECTORY_BYTES = 64 * 2**20
"""Of the list of an archive's files: a million of them, where a tensor is one."""
LIMIT_PICKLE_BYTES = 256 * 2**20

_START = b"PK\x03\x04"
_END, _END_BYTES = b"PK\x05\x06", 22
_END64, _END64_BYTES = b"PK\x06\x06", 56
_COMMENT_BYTES = 2**16


def check(file: BinaryIO, name: str, size: int) -> bool:
    """Refuse an archive that unpacks to more than it is, names paths, or lists too much.

    Args:
        file: open; left at its start.
        name: how a message names it.
        size: of the file in bytes.

    Returns:
        Whether it is an archive at all.

    Raises:
        CheckpointError: it is refused.
    """
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    if start != _START:
        return False
    directory = _directory_bytes(file, size)
    if directory > LIMIT_DIRECTORY_BYTES:
        raise CheckpointError(f"{name} has a list of files of {directory:,} bytes: refused")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name} is cut or altered ({first}); use another copy or an older checkpoint"
        ) from error
    finally:
        file.seek(0)
    for entry in entries:
        parts = entry.filename.replace("\\", "/").split("/")
        if ".." in parts or entry.filename.startswith(("/", "\\")):
            raise CheckpointError(
                f"{name} names a path outside itself ({entry.filename!r}): refused"
            )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(
            f"{name} is a compressed archive, which torch.save never writes: refused"
        )
    if sum(entry.file_size for entry in entries) > size:
        raise CheckpointError(f"{name} claims more bytes than the {size:,} it has: refused")
    if any(_is_pickle(entry) and entry.file_size > LIMIT_PICKLE_BYTES for entry in entries):
        raise CheckpointError(f"{name} has a pickle of more than 256 MiB: refused")
    return True


def pickles(file: BinaryIO) -> Iterator[tuple[BinaryIO, int]]:
    """Each pickle in an archive that was checked, with its length in bytes."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if _is_pickle(entry):
                content = archive.read(entry)
                yield io.BytesIO(content), len(content)
    file.seek(0)


def _is_pickle(entry: zipfile.ZipInfo) -> bool:
    return entry.filename.endswith(".pkl")


def _directory_bytes(file: BinaryIO, size: int) -> int:
    """How long an archive says that its list of files is."""
    tail_bytes = min(size, _COMMENT_BYTES + _END_BYTES + _END64_BYTES + 20)
    file.seek(-tail_bytes, os.SEEK_END)
    tail = file.read(tail_bytes)
    file.seek(0)
    found = 0
    at = tail.rfind(_END)
    if at >= 0 and at + _END_BYTES <= len(tail):
        found = struct.unpack_from("<L", tail, at + 12)[0]
    at = tail.rfind(_END64)
    if at >= 0 and at + _END64_BYTES <= len(tail):
        long = struct.unpack_from("<Q", tail, at + 40)[0]
        found = long if found == 0xFFFFFFFF else max(found, min(long, size))
    return int(found)
