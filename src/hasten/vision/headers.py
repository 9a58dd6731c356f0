"""What the first bytes of an image file say: its format, size and orientation, undecoded."""

from __future__ import annotations

import struct
from dataclasses import dataclass

FORMATS = ("JPEG", "PNG", "WebP", "BMP", "GIF", "TIFF")
"""Formats that hasten reads."""

HEAD_BYTES = 4096
"""So many first bytes hold nearly every header; :class:`ShortHeaderError` asks for the rest."""

# Frame headers; C4, C8 and CC are other things in the same range.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset([0x01, *range(0xD0, 0xD8)])  # markers without a length
_EXIF = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112
_SHORT = 3


class HeaderError(Exception):
    """The bytes are not a header of their format; the message says what is wrong."""


class ShortHeaderError(Exception):
    """The header goes on past the bytes that were given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known of an image before it is decoded."""

    format: str
    """One of ``FORMATS``."""
    width: int
    """Stored pixels across; before turning it upright."""
    height: int
    """Stored pixels down; before turning it upright."""
    orientation: int = 1
    """EXIF orientation 1..8; known for JPEG only."""
    channels: int = 0
    """Colour components; known for JPEG only."""


def sniff(head: bytes) -> str | None:
    """Format of a file by its first bytes (16 are enough), or None where it is no image.

    Formats that are images but are not in ``FORMATS`` (``AVIF``, ``HEIC``, ``JPEG 2000``) are
    named too, so that a message can.
    """
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WebP"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    if head.startswith(b"BM") and len(head) >= 16 and head[14] in (12, 40, 52, 56, 64, 108, 124):
        return "BMP"
    if head[4:8] == b"ftyp":
        return "AVIF" if head[8:12] in (b"avif", b"avis") else "HEIC"
    if head.startswith((b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")):
        return "JPEG 2000"
    return None


def parse(head: bytes) -> Header | None:
    """Header of an image, from its first bytes.

    Returns:
        None where the format is TIFF, whose header may lie anywhere, or is not known.

    Raises:
        HeaderError: the header is broken.
        ShortHeaderError: it is longer than ``head``.
    """
    kind = sniff(head)
    reader = {"JPEG": _jpeg, "PNG": _png, "GIF": _gif, "WebP": _webp, "BMP": _bmp}.get(kind or "")
    if reader is None:
        return None
    try:
        header = reader(head)
    except (struct.error, IndexError) as error:
        raise ShortHeaderError from error
    if header.width < 1 or header.height < 1:
        raise HeaderError(f"its size is {header.width}x{header.height}")
    return header


def exif_orientation(exif: bytes) -> int:
    """Orientation 1..8 in EXIF data (a TIFF structure); 1 where there is none or it is broken."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, start)
        for entry in range(min(entries, 1000)):
            tag, kind, count, value = struct.unpack_from(
                order + "HHIH", exif, start + 2 + 12 * entry
            )
            if tag == _ORIENTATION_TAG:
                good = kind == _SHORT and count == 1 and 1 <= value <= 8
                return int(value) if good else 1
    except struct.error:
        return 1
    return 1


def _jpeg(data: bytes) -> Header:
    orientation, offset = 1, 2
    while True:
        if data[offset] != 0xFF:
            raise HeaderError("its segments do not follow one another")
        while data[offset] == 0xFF:  # any number of fill bytes may come before a marker
            offset += 1
        marker = data[offset]
        offset += 1
        if marker in _JPEG_BARE:
            continue
        if marker in (0xD9, 0xDA):
            raise HeaderError("its picture comes before its size")
        (length,) = struct.unpack_from(">H", data, offset)
        if length < 2:
            raise HeaderError("it has a segment of no length")
        if marker in _JPEG_FRAMES:
            height, width, channels = struct.unpack_from(">HHB", data, offset + 3)
            return Header(
                format="JPEG",
                width=width,
                height=height,
                orientation=orientation,
                channels=channels,
            )
        body = offset + 2
        if marker == 0xE1 and data[body : body + 6] == _EXIF:
            if len(data) < offset + length:
                raise ShortHeaderError
            orientation = exif_orientation(data[body + 6 : offset + length])
        offset += length


def _png(head: bytes) -> Header:
    width, height = struct.unpack_from(">II", head, 16)
    if head[12:16] != b"IHDR":
        raise HeaderError("its first chunk is not IHDR")
    return Header(format="PNG", width=width, height=height)


def _gif(head: bytes) -> Header:
    width, height = struct.unpack_from("<HH", head, 6)
    return Header(format="GIF", width=width, height=height)


def _bmp(head: bytes) -> Header:
    if head[14] == 12:
        width, height = struct.unpack_from("<HH", head, 18)
    else:
        width, height = struct.unpack_from("<ii", head, 18)
    return Header(format="BMP", width=width, height=abs(height))  # below 0: top row first


def _webp(head: bytes) -> Header:
    chunk = head[12:16]
    if chunk == b"VP8X":
        low = struct.unpack_from("<HBHB", head, 24)
        width, height = 1 + low[0] + (low[1] << 16), 1 + low[2] + (low[3] << 16)
    elif chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif chunk == b"VP8 ":
        width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", head, 26))
    else:
        raise HeaderError("its first chunk is not a picture")
    return Header(format="WebP", width=width, height=height)
