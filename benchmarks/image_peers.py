"""Further peers of benchmarks/feed_images.py: other decoders, and pipelines of their own.

A decoder gives one picture's crop, and two threads feed with it: all of them release the lock.
A pipeline decodes by itself, or reads the same pictures from files made for it beforehand.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from feed_images import (
    BATCH,
    SIZE,
    THREADS,
    Batches,
    Crop,
    Pictures,
    cut,
    decoded,
    stacked_threads,
)
from hasten.vision.data.preparation import random_crop


def torchvision() -> Crop:
    """decode_jpeg, and resized_crop of the transforms' second version, antialiased."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    def crop(pictures: Pictures, index: int) -> torch.Tensor:
        image = decode_jpeg(read_file(str(pictures.files[index])), ImageReadMode.RGB)
        part = random_crop(image.shape[1], image.shape[2], pictures.key(index))
        box = (part.top, part.left, part.height, part.width)
        square = functional.resized_crop(image, *box, size=[SIZE, SIZE], antialias=True)
        return functional.horizontal_flip(square) if part.mirror else square

    return crop


def opencv() -> Crop:
    """imdecode, and resize by areas, which is the one of its ways that looks antialiased."""
    import cv2

    cv2.setNumThreads(1)  # two threads bring their own work

    def crop(pictures: Pictures, index: int) -> torch.Tensor:
        raw = np.fromfile(pictures.files[index], np.uint8)
        image = cv2.imdecode(raw, cv2.IMREAD_COLOR_RGB)
        return _resized(pictures, index, image, cv2)

    return crop


def _resized(pictures: Pictures, index: int, image: Any, cv2: Any) -> torch.Tensor:
    part = random_crop(image.shape[0], image.shape[1], pictures.key(index))
    inner = image[part.top : part.top + part.height, part.left : part.left + part.width]
    shrinks = part.width > SIZE or part.height > SIZE
    way = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    square = cv2.resize(inner, (SIZE, SIZE), interpolation=way)
    if part.mirror:
        square = cv2.flip(square, 1)
    return torch.from_numpy(square).permute(2, 0, 1)


def kornia() -> Crop:
    """kornia-rs: decoded by its libjpeg-turbo, cut and resized by torch."""
    from kornia_rs.io import read_image_jpegturbo

    return _by_torch(lambda path: np.asarray(read_image_jpegturbo(str(path))))


def turbojpeg() -> Crop:
    """PyTurboJPEG: decoded whole, cut and resized by torch."""
    from turbojpeg import TJPF_RGB, TurboJPEG

    try:
        decoder = TurboJPEG()
    except RuntimeError as error:
        raise ImportError(str(error).splitlines()[0]) from error
    return _by_torch(lambda path: decoder.decode(path.read_bytes(), pixel_format=TJPF_RGB))


def _by_torch(decode: Callable[[Path], Any]) -> Crop:
    def crop(pictures: Pictures, index: int) -> torch.Tensor:
        return cut(pictures, index, decode(pictures.files[index]))

    return crop


def pyvips() -> Crop:
    """libvips: cut first, so that no rows below the crop are decoded; then resized."""
    import pyvips as vips

    def crop(pictures: Pictures, index: int) -> torch.Tensor:
        image = vips.Image.new_from_file(str(pictures.files[index]), access="sequential")
        part = random_crop(image.height, image.width, pictures.key(index))
        inner = image.crop(part.left, part.top, part.width, part.height)
        square = inner.resize(SIZE / part.width, vscale=SIZE / part.height, kernel="linear")
        tensor = torch.from_numpy(square.numpy()).permute(2, 0, 1)
        return tensor.flip(2) if part.mirror else tensor

    return crop


DECODERS: tuple[Callable[[], Crop], ...] = (torchvision, opencv, kornia, turbojpeg, pyvips)


class _Cropped(Dataset[Any]):
    def __init__(self, pictures: Pictures, crop: Crop) -> None:
        self.pictures, self.crop = pictures, crop

    def __len__(self) -> int:
        return len(self.pictures.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.crop(self.pictures, index).contiguous(), 0


def dali(pictures: Pictures) -> Batches:
    """NVIDIA DALI on the CPU, decoding whole pictures: its decoder of parts is ten times slower
    there. Its resize cuts, is antialiased, and mirrors where a part ends before it begins."""
    from nvidia.dali import fn, pipeline_def, types

    count = len(pictures.files)
    parts = [
        random_crop(height, width, pictures.key(index))
        for index, (width, height) in enumerate(Image.open(file).size for file in pictures.files)
    ]
    sides = [(p.left, p.left + p.width)[:: -1 if p.mirror else 1] for p in parts]
    begins = np.array([(p.top, left) for p, (left, _) in zip(parts, sides, strict=True)], "f")
    ends = np.array(
        [(p.top + p.height, right) for p, (_, right) in zip(parts, sides, strict=True)], "f"
    )

    def numbers(at: types.BatchInfo) -> tuple[Any, ...]:
        if at.iteration >= -(-count // BATCH):
            raise StopIteration
        index = slice(at.iteration * BATCH, (at.iteration + 1) * BATCH)
        raw = [np.fromfile(file, np.uint8) for file in pictures.files[index]]
        return raw, list(begins[index]), list(ends[index])

    @pipeline_def(batch_size=BATCH, num_threads=THREADS, device_id=None, prefetch_queue_depth=2)
    def steps() -> Any:
        raw, begin, end = fn.external_source(numbers, num_outputs=3, batch_info=True)
        image = fn.resize(
            fn.decoders.image(raw),
            size=(SIZE, SIZE),
            roi_start=begin,
            roi_end=end,
            interp_type=types.INTERP_TRIANGULAR,
        )
        return fn.transpose(image, perm=[2, 0, 1])

    pipe = steps()
    pipe.build()

    def epoch() -> Iterator[Any]:
        for _ in range(-(-count // BATCH)):
            yield torch.from_numpy(pipe.run()[0].as_array())
        pipe.reset()

    return epoch


def webdataset(pictures: Pictures) -> Batches:
    """The same files in tars, one for each of two workers, cut and resized by torch."""
    from webdataset import TarWriter, WebDataset, WebLoader

    place = _made_once(pictures, "tar")
    if not any(place.iterdir()):
        for shard in range(THREADS):
            with TarWriter(str(place / f"{shard}.tar")) as tar:
                for index in range(shard, len(pictures.files), THREADS):
                    raw = pictures.files[index].read_bytes()
                    tar.write({"__key__": f"{index:06d}", "jpg": raw})
    shards = [str(path) for path in sorted(place.iterdir())]
    samples = WebDataset(shards, shardshuffle=False).map(
        lambda sample: decoded(pictures, int(sample["__key__"]), sample["jpg"])
    )
    loader = WebLoader(samples.batched(BATCH, collation_fn=torch.stack), None, num_workers=THREADS)
    return lambda: loader


def litdata(pictures: Pictures) -> Batches:
    """The same files in litdata's chunks, cut and resized by torch in two workers."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    place = _made_once(pictures, "litdata")
    if not any(place.iterdir()):
        optimize(
            functools.partial(_sample, pictures),
            list(range(len(pictures.files))),
            str(place),
            chunk_bytes="32MB",
            num_workers=1,
            start_method="fork",  # it becomes everybody's
        )
    loader = StreamingDataLoader(
        StreamingDataset(str(place)),
        batch_size=BATCH,
        num_workers=THREADS,
        collate_fn=functools.partial(_stacked, pictures),
    )
    return lambda: loader


def _stacked(pictures: Pictures, samples: list[Any]) -> torch.Tensor:
    return torch.stack([decoded(pictures, int(one["index"]), one["jpg"]) for one in samples])


def _sample(pictures: Pictures, index: int) -> dict[str, Any]:
    return {"index": index, "jpg": pictures.files[index].read_bytes()}


def _made_once(pictures: Pictures, kind: str) -> Path:
    place = pictures.root.parent / f"{pictures.root.name}-{kind}-{len(pictures.files)}"
    place.mkdir(exist_ok=True)
    return place


def spdl(pictures: Pictures) -> Batches:
    """SPDL's own decoder, FFmpeg's, which cuts, resizes and mirrors as well."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    sizes = [Image.open(file).size for file in pictures.files]

    def frames(index: int) -> Any:
        width, height = sizes[index]
        part = random_crop(height, width, pictures.key(index))
        packets = spdl.io.demux_image(str(pictures.files[index]))
        mirror = "hflip," if part.mirror else ""
        filters = (
            f"crop={part.width}:{part.height}:{part.left}:{part.top}:exact=1,{mirror}"
            f"scale={SIZE}:{SIZE}:flags=bilinear,format=pix_fmts=rgb24"
        )
        return spdl.io.decode_packets(packets, filter_desc=filters)

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(range(len(pictures.files)))
            .pipe(frames, concurrency=THREADS, output_order="input")
            .aggregate(BATCH)
            .pipe(lambda batch: spdl.io.to_torch(spdl.io.convert_frames(batch)).permute(0, 3, 1, 2))
            .add_sink(3)
            .build(num_threads=THREADS)
        )
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return epoch


PIPELINES: tuple[Callable[[Pictures], Batches], ...] = (
    spdl,
    dali,
    webdataset,
    litdata,
)
IN_ORDER = (spdl, dali)  # of whose own pixels the first batch is looked at


def decoders() -> dict[str, Crop]:
    """Those that are installed, by name; says why others are left out."""
    found = {}
    for decoder in DECODERS:
        try:
            found[decoder.__name__] = decoder()
        except (ImportError, OSError) as error:
            _left_out(decoder, error)
    return found


def looked_at(pictures: Pictures) -> dict[str, Crop]:
    """What gives pixels of its own, by name."""
    found = decoders()
    for pipeline in IN_ORDER:
        try:
            batch = torch.as_tensor(next(iter(pipeline(pictures)()))).clone()
        except (ImportError, OSError, RuntimeError):
            continue  # `more` says so
        found[pipeline.__name__] = lambda pictures, index, batch=batch: batch[index]
    return found


def _left_out(peer: Callable[..., Any], error: Exception) -> None:
    print(f"{peer.__name__} is left out: {str(error)[:100]}", file=sys.stderr)


def more(pictures: Pictures) -> dict[str, Batches]:
    """The contenders: each decoder in two threads, and the pipelines."""
    found: dict[str, Batches] = {}
    for name, crop in decoders().items():
        data = _Cropped(pictures, crop)
        found[f"{name}, 2 threads, stacked"] = lambda crop=crop: stacked_threads(pictures, crop)
        if name == "torchvision":  # as most use it; libvips' threads do not outlive a fork
            found[f"{name}, DataLoader, 2 workers"] = lambda data=data: DataLoader(
                data, BATCH, num_workers=THREADS
            )
    for pipeline in PIPELINES:
        try:
            epoch = pipeline(pictures)
            for _ in epoch():  # whether it works
                pass
        except (ImportError, OSError, RuntimeError) as error:
            _left_out(pipeline, error)
            continue
        found[pipeline.__name__] = epoch
    return found
