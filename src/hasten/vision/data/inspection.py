"""Looking at files before training: is each a whole image, and of what size?

Only the first and last bytes are read, some 15 µs a file from the cache. A file that they leave
in doubt is decoded. Damage in the middle of a file is found when its turn comes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hasten.vision import decode, headers
from hasten.vision.file_names import show

from .layout import promises_image

_TAIL_BYTES = 16
_CHUNK_FILES = 64
_THREADS = 8  # more than cores: they wait for the disk


@dataclass(kw_only=True)
class Inspected:
    """What was found of each file, in the order in which the files were given."""

    sizes: NDArray[np.int32]
    """Height and width, upright, in pixels [N, 2]; 0 where it is no usable image."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why an image cannot be used, by its place."""


def inspect(root: str, paths: Sequence[str], *, max_pixels: int = decode.MAX_PIXELS) -> Inspected:
    """Look at files, several at once.

    Args:
        root: folder that the paths start from.
        paths: of the files.
        max_pixels: an image of more cannot be used.
    """
    found = Inspected(sizes=np.zeros((len(paths), 2), dtype=np.int32))

    def look(first: int) -> None:
        for place in range(first, min(first + _CHUNK_FILES, len(paths))):
            try:
                size = inspect_file(root, paths[place], max_pixels=max_pixels)
            except decode.ImageError as error:
                found.reasons[place] = decode.reason(error, show(paths[place]))
            else:
                if size is not None:
                    found.sizes[place] = size

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for _ in pool.map(look, range(0, len(paths), _CHUNK_FILES)):
                pass
        except BaseException:  # Ctrl-C among them: do not look at the rest first
            pool.shutdown(cancel_futures=True)
            raise
    return found


def inspect_file(root: str, path: str, *, max_pixels: int) -> tuple[int, int] | None:
    """Height and width of an image, upright, in pixels; None where a file is none and need not be.

    Raises:
        ImageError: it is an image that cannot be used, or its name promises one.
    """
    name = show(path)
    place = os.path.join(root, path)  # noqa: PTH118 - a million of them
    try:
        with open(place, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            head = file.read(headers.HEAD_BYTES)
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
    except OSError as error:
        raise decode.ImageError(f"{name}: cannot be read ({error.strerror or error})") from error
    kind = headers.sniff(head)
    if kind is None and not promises_image(path):
        return None
    if kind == "TIFF":
        return _tiff_size(place, name=name, max_pixels=max_pixels)
    try:
        header = headers.parse(head) if kind in headers.FORMATS else None
    except (headers.HeaderError, headers.ShortHeaderError):
        header = None
    if header is None or not _is_whole(header.format, head, tail, length):
        return decode.check(place, name=name, max_pixels=max_pixels)
    decode.check_size(header.width, header.height, name, max_pixels)
    turned = header.orientation >= 5
    return (header.width, header.height) if turned else (header.height, header.width)


def _is_whole(kind: str, head: bytes, tail: bytes, length: int) -> bool:
    """Whether a file ends as its format says; False is doubt only."""
    if kind == "JPEG":
        return tail.endswith(b"\xff\xd9")
    if kind == "PNG":
        return tail[-8:-4] == b"IEND"
    if kind == "GIF":
        return tail.endswith(b";")
    if kind == "WebP":
        return length >= int.from_bytes(head[4:8], "little") + 8
    return kind == "BMP" and length >= int.from_bytes(head[2:6], "little") > 0


def _tiff_size(path: str, *, name: str, max_pixels: int) -> tuple[int, int]:
    """Look at a TIFF file's directory; it may lie anywhere in the file."""
    from PIL import TiffImagePlugin

    def look() -> tuple[int, int, int, int]:
        with open(path, "rb") as file, TiffImagePlugin.TiffImageFile(file) as image:  # noqa: PTH123
            pieces = zip(
                image.tag_v2.get(273) or image.tag_v2.get(324) or (),
                image.tag_v2.get(279) or image.tag_v2.get(325) or (),
                strict=False,
            )
            end = max((start + length for start, length in pieces), default=0)
            missing = end - file.seek(0, os.SEEK_END)
            # Not image.size, which some versions of Pillow give upright already.
            height, width = image.tag_v2[257], image.tag_v2[256]
            return height, width, decode.orientation_of(image), missing

    height, width, orientation, missing = decode.guarded(name, look)
    decode.check_size(width, height, name, max_pixels)
    if missing > 0:
        raise decode.ImageError(
            f"{name}: is cut short: {missing:,} bytes of its pixels are missing"
        )
    return (width, height) if orientation >= 5 else (height, width)
