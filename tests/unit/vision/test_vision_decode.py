"""Decoding: every format, mode and orientation gives the right pixels; broken files are named."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps, TiffImagePlugin

from hasten.errors import DataError, UsageError
from hasten.vision import decode as decoding
from hasten.vision import headers
from hasten.vision.cutting import Crop
from hasten.vision.cutting import cut as cut_out
from hasten.vision.decode import ImageError, decode, decode_copy, decode_crop
from hasten.vision.resizing import resized, resized_to

PHOTOS = (
    Path(importlib.util.find_spec("sklearn").submodule_search_locations[0]) / "datasets" / "images"
)


def scene(height: int = 48, width: int = 64) -> np.ndarray:
    """A smooth picture with no symmetry at all, uint8 [H, W, 3]."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    planes = [200 * x + 40 * y, 30 + 180 * y * y, 255 - 120 * x - 90 * y]
    return np.rint(np.stack(planes, -1)).astype(np.uint8)


def stored(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(pixels: np.ndarray, color_type: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow cannot write for colour."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    head = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def off_by(got: np.ndarray, want: np.ndarray) -> int:
    assert got.shape == want.shape
    assert got.dtype == np.uint8
    return int(np.abs(got.astype(int) - want.astype(int)).max())


RGB = scene()
GREY = np.asarray(Image.fromarray(RGB).convert("L"))
PICTURE = Image.fromarray(RGB)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("WebP", {"lossless": True}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_deflate", "big_tiff": True}),
    ],
)
def test_lossless_formats(kind: str, options: dict[str, object]) -> None:
    data = stored(PICTURE, kind, **options)
    assert headers.sniff(data) == kind
    assert off_by(decode(data), RGB) == 0
    assert off_by(decode(data, channels=1), GREY[:, :, None]) == 0


@pytest.mark.parametrize("options", [{"subsampling": 0}, {"progressive": True, "subsampling": 0}])
def test_jpeg(options: dict[str, object]) -> None:
    data = stored(PICTURE, "JPEG", quality=98, **options)
    assert off_by(decode(data), RGB) <= 5
    assert off_by(decode(data, channels=1), GREY[:, :, None]) <= 5


def test_gif_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue")]
    data = stored(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert off_by(decode(data), np.full((4, 5, 3), (255, 0, 0))) == 0
    animated = stored(frames[0], "WebP", save_all=True, append_images=frames[1:], lossless=True)
    assert off_by(decode(animated), np.full((4, 5, 3), (255, 0, 0))) == 0
    pages = stored(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    assert off_by(decode(pages), np.full((4, 5, 3), (255, 0, 0))) == 0


def test_grey_and_black_and_white() -> None:
    three = np.repeat(GREY[:, :, None], 3, 2)
    for kind in ("PNG", "BMP", "TIFF", "GIF"):
        assert off_by(decode(stored(Image.fromarray(GREY), kind)), three) == 0
    assert off_by(decode(stored(Image.fromarray(GREY), "JPEG", quality=98)), three) <= 3
    one_bit = Image.fromarray(GREY).convert("1")
    want = np.where(np.asarray(one_bit), 255, 0)[:, :, None]
    for kind in ("PNG", "BMP", "TIFF"):
        assert off_by(decode(stored(one_bit, kind), channels=1), want) == 0


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = (np.arange(48 * 64).reshape(48, 64) * 21 % 65536).astype(np.uint16)
    want = np.rint(deep / 257)
    for data in (png(deep, 0), stored(Image.fromarray(deep), "TIFF")):
        assert off_by(decode(data, channels=1), want[:, :, None]) == 0
        assert off_by(decode(data), np.repeat(want[:, :, None], 3, 2)) == 0
    colour = np.stack([deep, deep[::-1], deep[:, ::-1]], -1)
    assert off_by(decode(png(colour, 2)), np.rint(colour / 257)) <= 1
    opaque = np.stack([deep, np.full_like(deep, 65535)], -1)
    assert off_by(decode(png(opaque, 4), channels=1), want[:, :, None]) <= 1


def test_floating_point_tiff() -> None:
    light = np.linspace(0, 1, 48 * 64, dtype=np.float32).reshape(48, 64)
    data = stored(Image.fromarray(light), "TIFF")
    assert off_by(decode(data, channels=1), np.rint(light * 255)[:, :, None]) == 0
    with pytest.raises(ImageError, match=r"within 0\.\.1"):
        decode(stored(Image.fromarray(light * 7), "TIFF"))
    with pytest.raises(ImageError, match="32-bit"):
        decode(stored(Image.fromarray(light.astype(np.int32)), "TIFF"))


def test_palette() -> None:
    palette = PICTURE.quantize(32)
    want = np.asarray(palette.convert("RGB"))
    for kind in ("PNG", "BMP", "GIF", "TIFF"):
        assert off_by(decode(stored(palette, kind)), want) == 0


def test_transparency_is_laid_on_white() -> None:
    alpha = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (48, 1))
    share = alpha[:, :, None] / 255
    want = np.rint(RGB * share + 255 * (1 - share))
    rgba = Image.fromarray(np.dstack([RGB, alpha]))
    assert off_by(decode(stored(rgba, "PNG")), want) <= 1
    assert off_by(decode(stored(rgba, "TIFF")), want) <= 1
    assert off_by(decode(stored(rgba, "WebP", lossless=True, exact=True)), want) <= 1
    la = Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(alpha)))
    grey = np.rint(GREY[:, :, None] * share + 255 * (1 - share))
    assert off_by(decode(stored(la, "PNG"), channels=1), grey) <= 1
    assert off_by(decode(stored(la, "PNG")), np.repeat(grey, 3, 2)) <= 1


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
@pytest.mark.parametrize("transparency", [1, b"\xff\x00"])
def test_transparent_palette_entry(kind: str, transparency: int | bytes) -> None:
    if kind == "GIF" and isinstance(transparency, bytes):
        transparency = 1
    image = Image.new("P", (2, 1))
    image.putpalette([200, 30, 10, 0, 0, 90])
    image.putdata([0, 1])
    data = stored(image, kind, transparency=transparency)
    assert off_by(decode(data), np.array([[(200, 30, 10), (255, 255, 255)]])) == 0


def test_transparent_colour_of_png() -> None:
    image = Image.new("RGB", (2, 1))
    image.putdata([(1, 2, 3), (9, 9, 9)])
    data = stored(image, "PNG", transparency=(1, 2, 3))
    assert off_by(decode(data), np.array([[(255, 255, 255), (9, 9, 9)]])) == 0


def test_cmyk_and_ycck_jpeg() -> None:
    ink = np.dstack([255 - RGB, np.zeros_like(GREY)])
    cmyk = stored(Image.fromarray(ink, "CMYK"), "JPEG", quality=98, subsampling=0)
    assert b"Adobe" in cmyk
    assert off_by(decode(cmyk), RGB) <= 6
    ycck = simplejpeg.encode_jpeg(
        np.ascontiguousarray(255 - ink), 98, colorspace="CMYK", colorsubsampling="444"
    )
    assert b"Adobe\0d\0\0\0\0\x02" in ycck  # transform 2: YCCK, as Photoshop writes
    assert off_by(decode(ycck), RGB) <= 6
    square = decode_crop(
        ycck, lambda height, width: Crop(top=0, left=0, height=48, width=64), size=24
    )
    want = resized(RGB, 24)
    assert (square.int() - want.int()).abs().max() <= 6
    tiff = stored(Image.fromarray(ink, "CMYK"), "TIFF")
    assert off_by(decode(tiff), RGB) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "TIFF"])
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 98, "subsampling": 0}, "WebP": {"lossless": True}}
    data = stored(PICTURE, kind, exif=exif, **options.get(kind, {}))
    tagged = Image.open(io.BytesIO(data))
    tagged.load()
    want = np.asarray(ImageOps.exif_transpose(tagged).convert("RGB"))
    upright = decode(data)
    assert off_by(upright, want) <= 2
    height, width = want.shape[:2]
    assert (height > width) == (orientation >= 5)
    crop = Crop(top=3, left=9, height=height - 12, width=width - 14)
    seen = []

    def choose(height: int, width: int) -> Crop:
        seen.append((height, width))
        return crop

    got = decode_crop(data, choose, size=16)
    assert seen == [(height, width)]
    part = want[3 : height - 9, 9 : width - 5]
    assert (got.int() - resized(part, 16).int()).abs().max() <= 4
    mirrored = Crop(top=3, left=9, height=height - 12, width=width - 14, mirror=True)
    assert torch.equal(decode_crop(data, lambda height, width: mirrored, size=16), got.flip(2))


@pytest.mark.parametrize("value", [0, 9, 77])
def test_absurd_orientation_is_none(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    for kind in ("JPEG", "PNG"):
        assert decode(stored(PICTURE, kind, exif=exif)).shape == RGB.shape


def test_broken_exif_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = exif.tobytes()[6:]
    assert headers.exif_orientation(raw) == 6
    for cut in range(len(raw)):
        assert headers.exif_orientation(raw[:cut]) in (1, 6)
    assert headers.exif_orientation(raw[:10]) == 1
    assert headers.exif_orientation(b"II*\0\xff\xff\xff\xff") == 1


@pytest.mark.parametrize("photo", ["china.jpg", "flower.jpg"])
@pytest.mark.parametrize("size", [32, 64, 128, 224])
@pytest.mark.parametrize("subsampling", ["as it is", "444", "420"])
def test_reduced_scale_is_as_good_as_the_whole(photo: str, size: int, subsampling: str) -> None:
    data = (PHOTOS / photo).read_bytes()
    if subsampling != "as it is":
        whole = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        data = simplejpeg.encode_jpeg(whole, 90, colorsubsampling=subsampling)
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    for crop in (
        Crop(top=3, left=5, height=419, width=633),
        Crop(top=67, left=161, height=313, width=315),
        Crop(top=0, left=0, height=424, width=640),
        Crop(top=64, left=160, height=320, width=320),
        Crop(top=120, left=40, height=240, width=304),
    ):
        got = decode_crop(data, lambda height, width, crop=crop: crop, size=size)
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        want = whole.crop(box).resize((size, size), Image.Resampling.BILINEAR)
        difference = np.abs(got.permute(1, 2, 0).numpy().astype(int) - np.asarray(want))
        assert difference.mean() <= 2


def test_jpeg_is_decoded_at_the_smallest_scale_that_serves(monkeypatch) -> None:
    asked: list[tuple[int, ...]] = []
    real = simplejpeg.decode_jpeg

    def spy(*arguments: object, **options: object) -> np.ndarray:
        pixels = real(*arguments, **options)
        asked.append(pixels.shape)
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    data = stored(Image.fromarray(scene(800, 800)), "JPEG")
    for size in (48, 96, 192, 500):
        decode_crop(data, lambda h, w: Crop(top=0, left=0, height=h, width=w), size=size)
    assert [shape[0] for shape in asked] == [100, 200, 400, 800]


@pytest.mark.parametrize("side", range(1, 20))
def test_tiny_images(side: int) -> None:
    for kind in ("JPEG", "PNG"):
        data = stored(
            Image.new("RGB", (side, 3), (10, 200, 30)),
            kind,
            **({"quality": 98} if kind == "JPEG" else {}),
        )
        square = decode_crop(
            data, lambda h, w: Crop(top=h - 1, left=w - 1, height=1, width=1), size=1
        )
        assert (square[:, 0, 0].int() - torch.tensor([10, 200, 30])).abs().max() <= 3


def cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "BMP", "GIF", "TIFF"])
def test_truncated_files_are_named(kind: str, share: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    path = tmp_path / f"picture {kind}"
    path.write_bytes(cut(stored(Image.fromarray(random), kind), share))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of a broken TIFF
        with pytest.raises(ImageError) as caught:
            decode(path)
    assert str(path) in str(caught.value)
    assert caught.value.skip is True
    assert isinstance(caught.value, DataError)


@pytest.mark.parametrize("progressive", [True, False])
def test_truncated_jpeg_is_refused_at_reduced_scale_too(progressive: bool) -> None:
    random = np.random.default_rng(0).integers(0, 256, (512, 512, 3)).astype(np.uint8)
    data = stored(Image.fromarray(random), "JPEG", progressive=progressive)
    with pytest.raises(ImageError, match="truncated"):
        decode_crop(cut(data, 0.8), lambda h, w: Crop(top=0, left=0, height=h, width=w), size=32)


def test_stray_bytes_in_a_jpeg_do_no_harm() -> None:
    data = stored(PICTURE, "JPEG", quality=98, subsampling=0)
    want = decode(data)
    assert off_by(decode(data + b"trailing bytes"), want) == 0
    place = data.index(b"\xff\xda")
    stray = data[:place] + b"\0\0" + data[place:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(stray)
    assert off_by(decode(stray), want) <= 1
    whole = Crop(top=0, left=0, height=48, width=64)
    small = decode_crop(stray, lambda height, width: whole, size=8)
    assert (small.int() - resized(want, 8).int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"hello, world, I am a text file", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9", "not an image"),
        (b"\0\0\0\x20ftypavif" + bytes(40), "AVIF"),
        (b"\0\0\0\x20ftypheic" + bytes(40), "HEIC"),
        (b"\xff\xd8\xff\xe0", "cut short"),
        (b"\xff\xd8\xff\xd9", "broken JPEG"),
        (b"\xff\xd8\xff\xe0\0\0" + bytes(50), "broken JPEG"),
        (b"\x89PNG\r\n\x1a\n", "cut short"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "broken PNG"),
        (b"RIFF\0\0\0\0WEBPxxxx" + bytes(50), "broken WebP"),
        (b"II*\0" + bytes(50), "cannot be decoded"),
    ],
)
def test_what_is_no_image(data: bytes, word: str) -> None:
    with pytest.raises(ImageError, match=word):
        decode(data)


def jpeg_saying(height: int, width: int) -> bytes:
    data = bytearray(stored(PICTURE, "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def png_saying(height: int, width: int) -> bytes:
    data = bytearray(stored(PICTURE, "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        jpeg_saying(65500, 65500),
        jpeg_saying(20000, 10000),
        png_saying(20000, 10000),
        png_saying(2**31 - 1, 2**31 - 1),
        b"RIFF\xff\xff\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + bytes(60),
        b"GIF89a" + b"\xff\xff" * 2 + bytes(60),
        b"BM" + bytes(12) + struct.pack("<Iii", 40, 60000, -60000) + bytes(60),
    ],
)
def test_bombs_are_refused_before_decoding(data: bytes, monkeypatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("decoded a bomb")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", never)
    monkeypatch.setattr(decoding, "_open", never)
    limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ImageError, match="bomb"):
            decode(data)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_a_bomb_in_tiff_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header may lie anywhere, so that Pillow has to open it first."""
    data = stored(PICTURE, "TIFF")
    at = struct.unpack("<I", data[4:8])[0]
    tags = {256: 60000, 257: 60000}  # width, height
    bomb = bytearray(data)
    for place in range(at + 2, at + 2 + 12 * struct.unpack("<H", data[at : at + 2])[0], 12):
        tag = struct.unpack("<H", data[place : place + 2])[0]
        if tag in tags:
            bomb[place + 2 : place + 12] = struct.pack("<HII", 4, 1, tags[tag])

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("decoded a bomb")

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "load", never)
    with pytest.raises(ImageError, match="60000x60000 pixels"):
        decode(bytes(bomb))


def test_the_limit_of_pixels_is_ours() -> None:
    for kind in headers.FORMATS:
        data = stored(PICTURE, kind)
        assert decode(data, max_pixels=48 * 64).shape == (48, 64, 3)
        with pytest.raises(ImageError, match=r"64x48 pixels"):
            decode(data, max_pixels=48 * 64 - 1)


@pytest.mark.parametrize("kind", headers.FORMATS)
def test_damaged_files_give_an_image_or_our_error(kind: str) -> None:
    random = np.random.default_rng(7)
    whole = stored(PICTURE, kind)
    results = set()
    for _ in range(60):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 4):
            data[place] = random.integers(0, 256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata
            try:
                results.add(decode(bytes(data), max_pixels=1 << 20).ndim)
            except ImageError as error:
                results.add(str(error)[:9])
    assert results <= {3, "the image"}


def test_a_missing_file_and_unusable_arguments(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="No such file"):
        decode(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="is a folder"):
        decode(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    with pytest.raises(ImageError, match="not a regular file"):
        decode(tmp_path / "pipe.png")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(decoding.MAX_FILE_BYTES + 1)  # takes no room: it has no blocks
    with pytest.raises(ImageError, match="1,073,741,825 bytes"):
        decode(tmp_path / "huge.png")
    with pytest.raises(UsageError, match="channels"):
        decode(stored(PICTURE, "PNG"), channels=4)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ImageError("a.png: is empty")))
    assert error.skip
    assert str(error) == "a.png: is empty"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "GIF", "BMP"])
def test_headers_agree_with_pillow(kind: str) -> None:
    for lossless in (False, True):
        for mode in ("RGB", "RGBA", "P", "L"):
            if kind == "JPEG" and mode in ("RGBA", "P"):
                continue
            options = {"lossless": lossless} if kind == "WebP" else {}
            header = headers.parse(stored(PICTURE.convert(mode), kind, **options))
            assert header is not None
            assert (header.format, header.width, header.height) == (kind, 64, 48)


def test_a_header_that_is_not_all_there_asks_for_more() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    exif[0x010E] = "x" * 5000
    data = stored(PICTURE, "JPEG", exif=exif)
    with pytest.raises(headers.ShortHeaderError):
        headers.parse(data[: headers.HEAD_BYTES])
    header = headers.parse(data)
    assert header is not None
    assert header.orientation == 3
    assert headers.parse(b"II*\0" + bytes(30)) is None
    assert headers.parse(b"no image") is None


@pytest.mark.parametrize("size", [1, 7, 8, 24, 30])
@pytest.mark.parametrize("channels", [1, 3])
def test_mirroring(size: int, channels: int) -> None:
    data = stored(Image.fromarray(scene(40, 56)), "PNG")

    def part(mirror: bool) -> torch.Tensor:
        crop = Crop(top=3, left=5, height=33, width=41, mirror=mirror)
        return decode_crop(data, lambda height, width: crop, size=size, channels=channels)

    assert torch.equal(part(True), part(False).flip(2))
    assert part(True).is_contiguous()


ALONE = """
import io, os, sys, threading
import numpy as np, torch
from PIL import Image
from hasten.vision.cutting import Crop, cut
from hasten.vision.decode import decode_copy, decode_crop
torch.set_num_threads(2)
def stored(side, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, kind, exif=exif.tobytes())
    return file.getvalue()
files = [stored(side, kind, orientation)
         for side in (300, 1600) for kind in ("JPEG", "PNG") for orientation in (1, 4, 6)]
count = lambda: len(os.listdir("/proc/self/task"))
found = []
def work():
    before = count()
    for data in files:
        for mirror in (False, True):
            choose = lambda h, w: Crop(top=1, left=2, height=h - 3, width=w - 5, mirror=mirror)
            decode_crop(data, choose, size=224)
            cut(decode_copy(data, size=224), choose, 224)
    found.append(count() - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(found[0])
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
def test_decoding_in_a_thread_starts_no_threads_of_torchs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_square_may_be_written_where_it_is_wanted(kind: str) -> None:
    data = stored(Image.fromarray(scene(60, 80)), kind)

    def part(out: torch.Tensor | None) -> torch.Tensor:
        crop = Crop(top=3, left=5, height=33, width=41, mirror=True)
        return decode_crop(data, lambda height, width: crop, size=16, out=out)

    batch = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    slot = batch[1]
    assert part(slot) is slot
    assert torch.equal(batch[1], part(None))
    assert not batch[0].any()
    assert not batch[2].any()
    for other in (torch.zeros(3, 16, 17, dtype=torch.uint8), torch.zeros(3, 16, 16)):
        assert torch.equal(part(other), batch[1])
        assert not other.any()


def test_pictures_do_not_share_the_memory_that_they_are_made_in() -> None:
    """What is given lives on while the thread makes others."""
    files = [stored(Image.fromarray(scene(90 + n, 120) ^ n), "JPEG") for n in range(4)]
    whole = Crop(top=0, left=0, height=80, width=120)
    makers = [
        lambda data: decode(data),
        lambda data: decode_crop(data, lambda height, width: whole, size=30),
        lambda data: decode_crop(data, lambda height, width: whole, size=30, channels=1),
        lambda data: decode_copy(data, size=16).content,
        lambda data: decode_copy(data, size=80).content,
    ]
    for make in makers:
        kept = [make(data) for data in files]
        copies = [np.asarray(each).copy() for each in kept]
        for data in files:
            decode_crop(data, lambda height, width: whole, size=64)
        assert all(np.array_equal(each, copy) for each, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mirror", [False, True])
def test_pixels_of_four_bytes_are_laid_apart_as_those_of_three(
    orientation: int, mirror: bool
) -> None:
    """A JPEG is cut from words; a copy of it from three bytes a pixel."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = stored(Image.fromarray(scene(60, 84)), "JPEG", exif=exif.tobytes())

    def choose(height: int, width: int) -> Crop:
        return Crop(top=2, left=5, height=height - 9, width=width - 8, mirror=mirror)

    copy = decode_copy(data, size=33)
    assert copy.content.shape[2] == 3
    slot = torch.zeros(3, 33, 33, dtype=torch.uint8)
    got = decode_crop(data, choose, size=33, out=slot)
    assert got is slot
    assert torch.equal(got, cut_out(copy, choose, 33))
    assert torch.equal(got, decode_crop(data, choose, size=33))


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether another thread gets the interpreter's lock while this work is done.

    Nobody is made to give it up meanwhile, so it is got only where the work lets go of it. The
    other thread may not be given a core in time, so the work is done some times.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(30):
            order: list[str] = []
            begun = threading.Lock()
            begun.acquire()

            def other(order: list[str] = order, begun: threading.Lock = begun) -> None:
                with begun:
                    order.append("other")

            thread = threading.Thread(target=other)
            thread.start()
            begun.release()
            work()
            order.append("work")
            thread.join()
            if order[0] == "other":
                return True
    finally:
        sys.setswitchinterval(interval)
    return False


def test_decoders_and_resizing_release_the_lock() -> None:
    pixels = scene(1200, 1600)
    jpeg = stored(Image.fromarray(pixels), "JPEG")
    other = stored(Image.fromarray(pixels), "PNG")
    assert not lets_others_run(lambda: sum(range(300_000))), "Python's own code does not"
    assert lets_others_run(lambda: simplejpeg.decode_jpeg(jpeg, "RGB"))
    assert lets_others_run(lambda: Image.open(io.BytesIO(other)).load())
    assert lets_others_run(lambda: resized_to(pixels, 600, 800))
