"""Feeding a folder of JPEGs as 224x224 training crops: Loader against its peers and the decoder.

The yardstick is two threads that do nothing but decode whole pictures, from memory, which nobody
who decodes them whole can pass. It is measured right before and after each contender, as other
programs take part of the machine; rounds alternate, and medians are printed. All take the same
part of the same picture, mirrored or not, and give uint8 batches of 64; "float" normalises them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import peak_memory
import pictures
from hasten.feed import Loader
from hasten.vision.data.folder import ImageFolderDataset
from hasten.vision.data.preparation import Preparation, random_crop
from hasten.vision.transforms import Normalize

SIZE, BATCH, THREADS = 224, 64, 2
MEAN, STD = (0.48, 0.45, 0.4), (0.23, 0.22, 0.23)
SETS = {"500x375": (2000, 375, 500), "2000x1500": (300, 1500, 2000)}
YARDSTICK = "decode, 2 threads"
Batches = Callable[[], Iterable[Any]]
Crop = Callable[["Pictures", int], torch.Tensor]  # of a picture: uint8 [3, SIZE, SIZE]
MOST_OFF = 4.0  # of 255, the mean over a picture: more is another crop, or not antialiased


@dataclass(frozen=True)
class Pictures:
    """One set of files; `key` is what each one's random part follows from."""

    root: Path
    files: list[Path]

    def key(self, index: int) -> int:
        return index * 0x9E3779B97F4A7C15 + 1

    def hasten(self) -> ImageFolderDataset:
        paths = [str(file.relative_to(self.root)) for file in self.files]
        return ImageFolderDataset(
            self.root, paths, [0] * len(paths), preparation=Preparation(size=SIZE), augment=True
        )


class PillowImages(Dataset[Any]):
    """As a person writes it with Pillow (torchvision's transforms do the same)."""

    def __init__(self, pictures: Pictures, *, floats: bool = False) -> None:
        self.pictures = pictures
        self.floats = floats
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.pictures.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.pictures.files[index]) as image:
            pixels = pillow(image.convert("RGB"), self.pictures.key(index))
        images = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if self.floats:
            images = images.float().div_(255).sub_(self.mean).div_(self.std)
        return images, 0


def pillow(image: Image.Image, key: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    part = random_crop(image.height, image.width, key)
    box = (part.left, part.top, part.left + part.width, part.top + part.height)
    square = image.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if part.mirror:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(square)


def simple(pictures: Pictures, index: int) -> torch.Tensor:
    """As a person writes it with simplejpeg: whole picture, cut, resized by torch."""
    return decoded(pictures, index, pictures.files[index].read_bytes())


def decoded(pictures: Pictures, index: int, raw: bytes) -> torch.Tensor:
    """The crop of a picture, of its file's content."""
    return cut(pictures, index, simplejpeg.decode_jpeg(raw, "RGB"))


def cut(pictures: Pictures, index: int, pixels: Any) -> torch.Tensor:
    """The crop of a picture that is decoded whole, [H, W, 3]."""
    part = random_crop(pixels.shape[0], pixels.shape[1], pictures.key(index))
    inner = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
    images = torch.from_numpy(inner).permute(2, 0, 1)[None]
    square = torch.nn.functional.interpolate(images, (SIZE, SIZE), mode="bilinear", antialias=True)
    return (square.flip(3) if part.mirror else square)[0]


def stacked_threads(pictures: Pictures, crop: Crop = simple) -> Iterator[torch.Tensor]:
    with ThreadPoolExecutor(THREADS) as pool:
        done = pool.map(lambda index: crop(pictures, index), range(len(pictures.files)))
        batch: list[torch.Tensor] = []
        for image in done:
            batch.append(image)
            if len(batch) == BATCH:
                yield torch.stack(batch)
                batch = []
        if batch:
            yield torch.stack(batch)


def torchdata_nodes(pictures: Pictures) -> Iterable[torch.Tensor]:
    from torchdata import nodes

    source = nodes.IterableWrapper(range(len(pictures.files)))
    made = nodes.ParallelMapper(
        source, lambda index: simple(pictures, index), num_workers=THREADS, method="thread"
    )
    batches = nodes.Batcher(made, BATCH, drop_last=False)
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(batches, torch.stack), 2))


def spdl_simplejpeg(pictures: Pictures) -> Iterator[torch.Tensor]:
    from spdl.pipeline import PipelineBuilder

    pipeline = (
        PipelineBuilder()
        .add_source(range(len(pictures.files)))
        .pipe(lambda index: simple(pictures, index), concurrency=THREADS)
        .aggregate(BATCH)
        .pipe(torch.stack)
        .add_sink(3)
        .build(num_threads=THREADS)
    )
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def contenders(pictures: Pictures, peers: str = "some") -> dict[str, Batches]:
    data = pictures.hasten()
    options: dict[str, Any] = {"plan": "threads", "num_workers": THREADS}
    plain = Loader(data, BATCH, shuffle=True, **options)
    auto = Loader(data, BATCH, shuffle=True)
    normalised = Loader(data, BATCH, shuffle=True, device_transform=Normalize(MEAN, STD), **options)
    found: dict[str, Batches] = {
        "hasten, threads": lambda: plain,
        "hasten, no option set": lambda: auto,
        "hasten, threads, float": lambda: normalised.to("cpu"),
        "simplejpeg, 2 threads, stacked": lambda: stacked_threads(pictures),
    }
    for floats, kind in ((False, ""), (True, ", float")):
        images = PillowImages(pictures, floats=floats)
        for workers in (0, 1, 2):
            found[f"DataLoader + Pillow, {workers} workers{kind}"] = (
                lambda images=images, workers=workers: DataLoader(
                    images, BATCH, shuffle=True, num_workers=workers
                )
            )
    for name, make in (
        ("torchdata nodes + simplejpeg", torchdata_nodes),
        ("SPDL + simplejpeg", spdl_simplejpeg),
    ):
        if installed(name):
            found[name] = lambda make=make: make(pictures)
    if peers == "all":
        found |= importlib.import_module("image_peers").more(pictures)
    return found


def installed(name: str) -> bool:
    """Whether a peer is here; says why where it is not."""
    try:
        importlib.import_module("torchdata.nodes" if "torchdata" in name else "spdl.pipeline")
    except ImportError as error:
        print(f"left out: {name}: {str(error)[:100]}", file=sys.stderr)
        return False
    return True


class Yardstick:
    """Pictures decoded whole a second, by two threads that do nothing else.

    Attributes:
        cpu: seconds of processor time for 1,000 pictures, of each measurement.
    """

    def __init__(self, pictures: Pictures, seconds: float = 0.4) -> None:
        count = 200 if len(pictures.files) > 1000 else 24
        self._contents = [file.read_bytes() for file in pictures.files[:count]]
        self._seconds = seconds
        self.cpu: list[float] = []

    def measure(self) -> float:
        counts = [0] * THREADS
        begin, cpu_before = time.perf_counter(), cpu_seconds()

        def decode(which: int) -> None:
            while time.perf_counter() - begin < self._seconds:
                for content in self._contents[which::THREADS][:8]:
                    simplejpeg.decode_jpeg(content, "RGB")
                counts[which] += len(self._contents[which::THREADS][:8])

        threads = [threading.Thread(target=decode, args=(which,)) for which in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.cpu.append(1000 * (cpu_seconds() - cpu_before) / sum(counts))
        return sum(counts) / (time.perf_counter() - begin)


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def differences(
    pictures: Pictures, make: Callable[[int], torch.Tensor], count: int = 40
) -> tuple[float, float]:
    """Of a crop's pixels from Pillow's for the same part: mean, and that of the worst picture."""
    found = []
    for index in range(count):
        ours = make(index).permute(1, 2, 0).numpy().astype(int)
        with Image.open(pictures.files[index]) as image:
            theirs = pillow(image.convert("RGB"), pictures.key(index))
        found.append(float(np.abs(ours - theirs).mean()))
    return statistics.mean(found), max(found)


def off_pillow(pictures: Pictures, peers: str) -> dict[str, tuple[float, float]]:
    """`differences`, by how the names of those begin who give such pixels.

    Raises:
        SystemExit: one is so far off that it does other work.
    """
    ours = pictures.hasten()
    by_us = differences(pictures, lambda index: ours.fetch(index, pictures.key(index))[0])
    found = {"hasten": by_us}
    if peers == "all":
        for name, crop in importlib.import_module("image_peers").looked_at(pictures).items():
            found[name] = differences(pictures, functools.partial(crop, pictures))
    wrong = [name for name, (_, worst) in found.items() if worst > MOST_OFF]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: other pixels than Pillow's: {found}")
    return found


def compare(pictures: Pictures, rounds: int, peers: str) -> list[dict[str, Any]]:
    yardstick = Yardstick(pictures)
    makers = contenders(pictures, peers)
    count = len(pictures.files)
    rates: dict[str, list[float]] = {name: [] for name in makers}
    shares: dict[str, list[float]] = {name: [] for name in makers}
    cpu: dict[str, list[float]] = {name: [] for name in makers}
    decoded: list[float] = []
    for _ in range(rounds):
        for name, make in makers.items():
            before, cpu_before, begin = yardstick.measure(), cpu_seconds(), time.perf_counter()
            for _batch in make():
                pass
            seconds, used = time.perf_counter() - begin, cpu_seconds() - cpu_before
            after = yardstick.measure()
            decoded += [before, after]
            rates[name].append(count / seconds)
            shares[name].append(count / seconds / ((before + after) / 2))
            cpu[name].append(1000 * used / count)
    medians = {name: statistics.median(each) for name, each in shares.items()}
    best = {
        floats: max(
            share
            for name, share in medians.items()
            if "Pillow" in name and ("float" in name) == floats
        )
        for floats in (False, True)
    }
    rows = [
        {
            "name": YARDSTICK,
            "images_per_s": statistics.median(decoded),
            "cpu_seconds_per_1000": statistics.median(yardstick.cpu),
            "share_of_decode": 1.0,
            "ratio": 1 / best[False],
        }
    ]
    for name in makers:
        rows.append(
            {
                "name": name,
                "images_per_s": statistics.median(rates[name]),
                "cpu_seconds_per_1000": statistics.median(cpu[name]),
                "share_of_decode": medians[name],
                "ratio": medians[name] / best["float" in name],
            }
        )
    return rows


def pictures_of(name: str, place: Path | None) -> Pictures:
    """A set of pictures; made where they are not there yet."""
    count, height, width = SETS[name]
    root = (place or Path(tempfile.gettempdir()) / "hasten-benchmark-pictures") / name
    return Pictures(root, pictures.folder(root, count, height, width))


def run(
    rounds: int,
    *,
    place: Path | None = None,
    sets: Iterable[str] = tuple(SETS),
    memory: bool = True,
    peers: str = "some",
) -> list[Any]:
    """Measure; one row a contender and set.

    Each has `set`, `name`, `images_per_s`, `cpu_seconds_per_1000`, `share_of_decode` (of the
    yardstick's images/s beside it), `ratio` (of that share to that of the best DataLoader with
    Pillow that gives the same, bytes or floats), and where it was looked at `difference` from
    Pillow's pixels, of 255: mean, worst picture. `memory_bytes` is what each takes at most in a
    process of its own, the loop holding one batch.
    """
    torch.set_num_threads(1)  # the contenders bring their own
    rows = []
    where = ["--place", str(place)] if place else []
    for name in sets:
        found = pictures_of(name, place)
        off_by = off_pillow(found, peers)
        compared = compare(found, rounds, peers)
        if memory:
            taking = [row for row in compared if row["name"] != YARDSTICK]
            peak_memory.add_to(taking, __file__, *where, "--peers", peers, "--alone", name)
        for row in compared:
            row["set"] = f"{name}, {pictures.mean_bytes(found.files) // 1000} kB"
            off = [by for start, by in off_by.items() if row["name"].startswith(start)]
            if off:
                row["difference"] = off[0]
            rows.append(row)
    return rows


def show(rows: list[Any]) -> None:
    """Print rows for a person."""
    last = None
    for row in rows:
        if row["set"] != last:
            last = row["set"]
            print(f"\nJPEGs of about {last} a file, to {SIZE}x{SIZE}, {os.cpu_count()} cores")
            print(
                f"{'':<38} {'images/s':>9} {'CPU s/1000':>10} {'of decode':>9} {'Pillow x':>8} "
                f"{'MB':>5}"
            )
        taken = row.get("memory_bytes")
        size = f"{taken / 1e6:.0f}" if taken is not None else ""
        off = row.get("difference")
        quality = f"  off Pillow's by {off[0]:.2f} of 255, at most {off[1]:.2f}" if off else ""
        print(
            f"{row['name']:<38} {row['images_per_s']:>9,.0f} {row['cpu_seconds_per_1000']:>10.2f} "
            f"{row['share_of_decode']:>9.2f} {row['ratio']:>8.2f} {size:>5}{quality}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", type=Path, help="where pictures are made; kept for next time")
    parser.add_argument("--set", choices=tuple(SETS), action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-memory", action="store_true", help="leave that column out")
    parser.add_argument("--peers", choices=("some", "all"), default="some")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        torch.set_num_threads(1)
        peak_memory.in_child(
            contenders(pictures_of(arguments.alone[0], arguments.place), arguments.peers)[
                arguments.alone[1]
            ]
        )
        return
    rows = run(
        arguments.rounds,
        place=arguments.place,
        sets=arguments.set or SETS,
        memory=not arguments.no_memory,
        peers=arguments.peers,
    )
    if arguments.json:
        print(json.dumps(rows))
    else:
        show(rows)


if __name__ == "__main__":
    main()
