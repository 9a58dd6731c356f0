"""From an image file to pixels: any format and colour mode, upright, 8 bits, grey or RGB.

JPEG goes through simplejpeg at the smallest scale that serves, the rest through Pillow; both, and
the resizing, release the interpreter lock. What comes in, and how:

- transparency is laid on white; of an animation or a many-page file the first picture is taken;
- 16 bits a channel are scaled to 8, not clipped; floating point is taken to be 0..1;
- the EXIF orientation is applied; colour profiles are not.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hasten.errors import DataError, UsageError

from . import headers, scratch
from .cutting import UPRIGHT, Copy, Crop, Scale, cut, plain_colours, upright_size
from .file_names import show
from .resizing import resized_to

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

MAX_PIXELS = 1 << 27
"""Images of more pixels (134 million) are refused: decoded, they could fill the memory."""

MAX_FILE_BYTES = 1 << 30
"""Files of more bytes are refused: as many pixels in 16 bits take less."""

_READING = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
"""Without waiting: to open a pipe that nobody writes to would take for ever."""

_MARGIN = 1.5  # decoded pixels for each one wanted; below that the reduced scale shows
_NOT_MUCH_LARGER = 1.25  # than what is needed: a copy would save little
_REDUCIBLE = 16  # pixels: smaller JPEGs are decoded whole


class ImageError(DataError):
    """One image cannot be used; the message names it. The rest of the data may go on.

    Attributes:
        skip: True: a loader may leave the sample out.
    """

    skip: ClassVar[bool] = True


def decode(
    source: bytes | str | Path,
    *,
    channels: int = 3,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Decode a whole image, upright.

    Args:
        source: the file's path or its contents.
        channels: 3 for RGB, 1 for grey.
        name: what messages call it; by default its path.
        max_pixels: an image of more is refused before it is decoded.

    Returns:
        uint8 [H, W, channels].

    Raises:
        ImageError: it cannot be read, is no image, is cut short, or has too many pixels.
        UsageError: ``channels`` is neither 1 nor 3.
    """
    picture = _Picture(source, name, channels, max_pixels)
    pixels, _ = picture.pixels(8, plain_colours=False)
    swap, turn_rows, turn_columns = UPRIGHT[picture.orientation]
    if swap:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(
        pixels[:: -1 if turn_rows else 1, :: -1 if turn_columns else 1], dtype=np.uint8
    )


def decode_crop(
    source: bytes | str | Path,
    choose: Callable[[int, int], Crop],
    *,
    size: int,
    channels: int = 3,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    out: Tensor | None = None,
) -> Tensor:
    """Decode a part of an image to a square, as cheaply as its quality allows.

    Args:
        source: the file's path or its contents.
        choose: given the upright image's height and width, says which part.
        size: side of the square, in pixels.
        channels: 3 for RGB, 1 for grey.
        name: what messages call it; by default its path.
        max_pixels: an image of more is refused before it is decoded.
        out: host memory to write it to; left alone where its shape or type is another.

    Returns:
        uint8 [channels, size, size]: ``out``, or else one of its own, contiguous.

    Raises:
        ImageError: as :func:`decode`.
        UsageError: as :func:`decode`.
    """
    return cut(_Picture(source, name, channels, max_pixels), choose, size, out)


def decode_copy(
    source: bytes | str | Path,
    *,
    size: int,
    channels: int = 3,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Copy:
    """Decode a whole image to the size at which random squares of it can be cut at most.

    Its shorter side has twice ``size``, in which a training crop keeps ``size`` (of the area 35 %,
    at a ratio of 3:4). An image that is not much larger keeps its size and every bit of what
    :func:`decode_crop` would cut from it.

    Raises:
        ImageError: as :func:`decode`.
        UsageError: as :func:`decode`.
    """
    picture = _Picture(source, name, channels, max_pixels)
    shorter, enough = min(picture.height, picture.width), 2 * size
    plain = plain_colours(picture, size)
    if shorter <= _NOT_MUCH_LARGER * enough:
        content, _ = picture.pixels(8, plain_colours=plain)
    else:
        content, _ = picture.pixels(picture.scale_for(shorter, enough), plain_colours=plain)
        sides = [max(1, round(side * enough / shorter)) for side in (picture.height, picture.width)]
        content = resized_to(content, sides[0], sides[1])
    return Copy(np.ascontiguousarray(content), picture.height, picture.width, picture.orientation)


class _Picture:
    """An image whose header has been read and found fit to decode."""

    def __init__(
        self, source: bytes | str | Path, name: str | None, channels: int, max_pixels: int
    ) -> None:
        if channels not in (1, 3):
            raise UsageError(f"images are decoded to 1 or 3 channels, not {channels}")
        self.name = name or ("the image" if isinstance(source, bytes) else show(source))
        self._mode = "L" if channels == 1 else "RGB"
        self._data = source if isinstance(source, bytes) else read_file(source, self.name)
        self._image: Image | None = None
        header = _header(self._data, self.name)
        if header is not None:
            check_size(header.width, header.height, self.name, max_pixels)
        if header is not None and header.format == "JPEG":
            self.height, self.width = header.height, header.width
            self.orientation = header.orientation
            self._direct = header.channels in (1, 3)  # not CMYK
        else:
            image = guarded(self.name, _open, self._data)
            check_size(image.width, image.height, self.name, max_pixels)
            guarded(self.name, image.load)
            # Only now: Pillow turns TIFF upright as it loads, and PNG may have its EXIF last.
            self.orientation = guarded(self.name, orientation_of, image)
            self.height, self.width = image.height, image.width
            self._image = image
            self._direct = False

    def scale_for(self, shortest: int, size: int) -> int:
        """Eighths of the size to decode at, so that ``shortest`` pixels serve for ``size``."""
        if self._direct and min(self.height, self.width) >= _REDUCIBLE:
            for scale in (1, 2, 4):  # others have no fast transform
                if shortest * scale >= 8 * _MARGIN * size:
                    return scale
        return 8

    def pixels(
        self, scale: int, *, plain_colours: bool, brief: bool = False
    ) -> tuple[NDArray[np.uint8], Scale]:
        """Pixels as they are stored, not turned upright, and the scale they came out at.

        Args:
            scale: eighths of the size that would serve.
            plain_colours: a JPEG's colours need not be smoothed as they are enlarged.
            brief: they may lie in memory that this thread's next picture takes, and have a
                fourth byte beside red, green and blue: whole words are quicker to work on.

        Returns:
            uint8 [H, W, channels, or 4]; the scale.
        """
        if self._direct:
            pixels = self._reduced(scale, plain_colours, brief)
            if pixels is not None:
                return pixels, (scale / 8, scale / 8)
        image = self._image
        if image is None:
            image = guarded(self.name, _open, self._data)
            guarded(self.name, image.load)
        return guarded(self.name, _eight_bits, image, self._mode), (1.0, 1.0)

    def _reduced(self, scale: int, plain_colours: bool, brief: bool) -> NDArray[np.uint8] | None:
        import simplejpeg

        height, width = -(-self.height * scale // 8), -(-self.width * scale // 8)
        reduced = {"min_height": height, "min_width": width} if scale != 8 else {}
        kind, channels = ("GRAY", 1) if self._mode == "L" else ("RGBX", 4) if brief else ("RGB", 3)
        shape = height, width, channels
        try:
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                self._data,
                kind,
                fastupsample=plain_colours,
                buffer=scratch.empty("picture", shape) if brief else None,
                **reduced,
            )
        except ValueError:
            # It is strict: any irregularity comes here. Pillow tells the harmless ones (stray
            # bytes between segments) from files that are cut short.
            return None
        return pixels if pixels.shape == shape else None


def check(
    source: bytes | str | Path, *, name: str, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """Decode a whole image, at a reduced scale where that is cheaper, to see that it can be.

    Returns:
        Its height and width, upright, in pixels.

    Raises:
        ImageError: as :func:`decode`.
    """
    picture = _Picture(source, name, 3, max_pixels)
    picture.pixels(picture.scale_for(min(picture.height, picture.width), 1), plain_colours=True)
    return upright_size(picture)


def check_size(width: int, height: int, name: str, max_pixels: int = MAX_PIXELS) -> None:
    """Refuse a decompression bomb.

    Raises:
        ImageError: the image has more than ``max_pixels`` pixels.
    """
    if width * height > max_pixels:
        raise ImageError(
            f"{name}: its header says {width}x{height} pixels, more than the {max_pixels:,} that "
            "are read (a decompression bomb?)"
        )


def reason(error: ImageError, name: str) -> str:
    """What an error says, without the file's name."""
    return str(error).removeprefix(f"{name}: ")


def read_file(path: str | Path, name: str) -> bytes:
    """Contents of an image file.

    Raises:
        ImageError: it cannot be read, is a device or a pipe, or is larger than any image.
    """
    try:
        file = os.open(path, _READING)  # a file object costs as much again
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise ImageError(f"{name}: is {kind}")
            if status.st_size > MAX_FILE_BYTES:
                raise ImageError(
                    f"{name}: has {status.st_size:,} bytes, more than the {MAX_FILE_BYTES:,} that "
                    "are read"
                )
            data = os.read(file, status.st_size)
            while len(data) < status.st_size and (rest := os.read(file, status.st_size)):
                data += rest
            return data
        finally:
            os.close(file)
    except OSError as error:
        raise ImageError(f"{name}: cannot be read ({error.strerror or error})") from error


def _header(data: bytes, name: str) -> headers.Header | None:
    kind = headers.sniff(data[:16])
    if kind is None:
        what = "is empty" if not data else "is not an image, whatever its name says"
        raise ImageError(f"{name}: {what}")
    if kind not in headers.FORMATS:
        known = ", ".join(headers.FORMATS)
        raise ImageError(f"{name}: is {kind}, which is not read; convert it to one of {known}")
    try:
        return headers.parse(data)
    except headers.HeaderError as error:
        raise ImageError(f"{name}: is a broken {kind} file: {error}") from error
    except headers.ShortHeaderError as error:
        raise ImageError(f"{name}: is cut short: its header does not end") from error


def guarded(name: str, work: Callable[..., T], *arguments: Any) -> T:
    """Do some work of Pillow's.

    Raises:
        ImageError: it raised anything, as it does on a broken file.
    """
    try:
        return work(*arguments)
    except MemoryError:
        raise
    except Exception as error:  # decoders fed a broken file raise anything
        raise ImageError(f"{name}: cannot be decoded ({error or type(error).__name__})") from error


def _open(data: bytes) -> Image:
    """Open with the plugin of the format.

    Not Image.open: it would try every format there is, among them some that run programs, and
    its own limit of pixels is a global that warns.
    """
    from PIL import (
        BmpImagePlugin,
        GifImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    plugins: dict[str | None, Callable[[io.BytesIO], Image]] = {
        "BMP": BmpImagePlugin.BmpImageFile,
        "GIF": GifImagePlugin.GifImageFile,
        "JPEG": JpegImagePlugin.JpegImageFile,
        "PNG": PngImagePlugin.PngImageFile,
        "TIFF": TiffImagePlugin.TiffImageFile,
        "WebP": WebPImagePlugin.WebPImageFile,
    }
    return plugins[headers.sniff(data[:16])](io.BytesIO(data))


def orientation_of(image: Image) -> int:
    """EXIF orientation 1..8 of an image that Pillow opened; 1 where it has none."""
    value = image.getexif().get(0x0112, 1)
    return value if value in UPRIGHT else 1


def _eight_bits(image: Image, mode: str) -> NDArray[np.uint8]:
    """uint8 [H, W, C] of a loaded image of any mode."""
    from PIL import Image as Pillow

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        deep = np.asarray(image).astype(np.int32)
        image = Pillow.fromarray(((deep + 128) // 257).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        light = np.asarray(image)
        if not (np.isfinite(light).all() and light.min() >= 0 and light.max() <= 1):
            raise ValueError("its floating-point values are not within 0..1")
        image = Pillow.fromarray(np.rint(light * 255).astype(np.uint8))
    elif image.mode == "I":
        raise ValueError("32-bit whole numbers have no known range; store it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = Pillow.alpha_composite(paper, image)
    if image.mode != mode:
        image = image.convert(mode)
    pixels = np.asarray(image)
    return pixels[:, :, None] if mode == "L" else pixels
