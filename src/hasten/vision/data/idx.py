"""Reading IDX files, the format in which MNIST and Fashion-MNIST come."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hasten.errors import DataError
from hasten.vision.file_names import show

_UNSIGNED_BYTE = 0x08


def read_bytes(path: Path, *, most: int) -> bytes:
    """Contents of a file, gunzipped where it is gzip (told by its first bytes, not its name).

    Args:
        path: the file.
        most: bytes of content at which reading stops, so that no file fills the memory.

    Raises:
        DataError: the file cannot be read, its compression is broken or cut short, or it holds
            more than ``most`` bytes.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=raw) as file:
                    content = file.read(most + 1)
            else:
                content = raw.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{show(path)} is cut short or not gzip ({error}); fetch it again") from (
            error
        )
    except OSError as error:
        raise DataError(f"{show(path)} cannot be read: {error.strerror or error}") from error
    if len(content) > most:
        raise DataError(f"{show(path)} holds more than the {most} bytes that it should")
    return content


def check_sha256(content: bytes, expected: str, path: Path) -> None:
    """Compare contents with their checksum.

    Raises:
        DataError: they differ; names the file.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{show(path)} is not the file it should be: the SHA-256 of its contents is "
            f"{found}, not {expected} ({len(content)} bytes). Delete it and fetch it again"
        )


def parse(content: bytes, *, dimensions: int, path: Path) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes that an IDX file holds, a view of ``content``.

    Args:
        content: the whole file, gunzipped.
        dimensions: how many the array must have: 3 for images, 1 for labels.
        path: for messages.

    Raises:
        DataError: the magic number, the type, the dimensions or the length is wrong.
    """
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise DataError(f"{show(path)} is no IDX file: it has only {len(content)} bytes")
    if content[:2] != b"\0\0":
        raise DataError(f"{show(path)} is no IDX file: it starts with {content[:4].hex()}")
    if content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{show(path)} is an IDX file of type {content[2]:#04x}, not of bytes")
    if content[3] != dimensions:
        raise DataError(f"{show(path)} has {content[3]} dimension(s), not {dimensions}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = head + math.prod(shape)
    if len(content) != expected or 0 in shape:
        raise DataError(
            f"{show(path)} should have {expected} bytes for its {'x'.join(map(str, shape))} "
            f"values but has {len(content)}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
