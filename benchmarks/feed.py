"""The feed against its peers: samples/s, processor seconds, and epochs of training, in one run.

Contenders take turns within each round; medians over the rounds are printed, and ratios. The
first epoch of each, which plans, compiles and starts, is shown apart. Nothing else should run on
the machine. (b), folders of pictures, is benchmarks/feed_images.py, and runs with the others.

    python benchmarks/feed.py [--rounds 3] [--only a64,c,d] [--plot benchmarks/results/feed]
    python benchmarks/feed.py --peers all    # those of feed_peers.py and image_peers.py too
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import feed_peers
import hasten
import peak_memory
from feed_cases import Case, Contender, Training, cases, missing, training_on_pictures

Row = dict[str, Any]
_QUICK_EPOCHS, _QUICK_S = 10, 0.05  # epochs of milliseconds are repeated


def processor_s() -> float:
    """Of this process and all its children, those that run included."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    ticks = os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(words[11]) + int(words[12])) / ticks
    return total


def epoch_s(batches: Iterable[Any], step: Callable[[Any], None] | None) -> tuple[float, int]:
    """(seconds, samples) of one epoch."""
    samples = 0
    begin = time.perf_counter()
    for batch in batches:
        samples += len(batch[1])
        if step is not None:
            step(batch)
    return time.perf_counter() - begin, samples


def sums(batches: Iterable[Any]) -> tuple[float, ...]:
    """Of an epoch's inputs and labels: the same for all who feed each sample once."""
    total = [0.0, 0.0]
    for batch in batches:
        for place in (0, 1):
            total[place] += float(batch[place].sum(dtype=torch.float64))
    return tuple(total)


def alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other, strict=True))


def contenders(case: Case, peers: str) -> list[Contender]:
    """hasten, and its peers as far as they are wanted and installed."""
    found = case.contenders()
    if peers == "all":
        further, left_out = feed_peers.more(case)
        found += further
        print("\n".join(left_out), end="\n" if left_out else "", file=sys.stderr)
    return found


def measure(case: Case, rounds: int, *, training: bool, peers: str = "some") -> list[Row]:
    """One row a contender, feeding alone or beside a step of training."""
    batch_s, example = _load_batch(case)
    step = None
    if training:
        wanted = None if case.step_of_load is None else case.step_of_load * batch_s
        step = Training(case.training, example, wanted)
    found = contenders(case, peers)
    times: dict[str, list[float]] = {c.name: [] for c in found}
    used: dict[str, list[float]] = {c.name: [] for c in found}
    bounds: list[tuple[float, float]] = []
    samples = 0
    try:
        for number in range(rounds + 1):
            if training and step is not None:
                bounds.append(_alone(case, step, example))
            for contender in found:
                known = times[contender.name]
                quick = case.quick and not training and number > 0 and known[0] < _QUICK_S
                for _ in range(_QUICK_EPOCHS if quick else 1):
                    gc.collect()
                    before = processor_s()
                    seconds, samples = epoch_s(contender.epoch(), step)
                    times[contender.name].append(seconds)
                    used[contender.name].append(processor_s() - before)
        if not training:
            expected = sums(case.inline())
            for contender in found:
                if not alike(sums(contender.epoch()), expected):
                    raise SystemExit(f"{contender.name} feeds other samples in {case.title}")
    finally:
        for contender in found:
            contender.close()
    step_s, load_s = (
        (statistics.median(b[at] for b in bounds[1:]) for at in (0, 1)) if bounds else (0.0, 0.0)
    )
    return [
        {
            "case": case.key,
            "title": case.title,
            "training": training,
            "name": contender.name,
            "epoch_s": statistics.median(times[contender.name][1:]),
            "least_s": min(times[contender.name][1:]),
            "most_s": max(times[contender.name][1:]),
            "first_epoch_s": times[contender.name][0],
            "samples_per_s": samples / statistics.median(times[contender.name][1:]),
            "cpu_s": statistics.median(used[contender.name][1:]),
            "step_s": step_s,
            "load_s": load_s,
        }
        for contender in found
    ]


def _load_batch(case: Case) -> tuple[float, Any]:
    """(seconds, batch): what loading a batch sample by sample takes."""
    took = []
    batches = iter(case.inline())
    for _ in range(4):
        begin = time.perf_counter()
        batch = next(batches)
        took.append(time.perf_counter() - begin)
    return statistics.median(took[1:]), batch


def _alone(case: Case, step: Training, example: Any) -> tuple[float, float]:
    """(step_s, load_s) of an epoch: the steps with a batch that is there; sample by sample."""
    count = -(-len(case.dataset) // case.batch)
    begin = time.perf_counter()
    for _ in range(count):
        step(example)
    step_s = time.perf_counter() - begin
    return step_s, epoch_s(case.inline(), None)[0]


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Beside each time: of the best hand-picked DataLoader, of the loop by hand, of the bound."""
    for row in rows:
        mates = [r for r in rows if (r["case"], r["training"]) == (row["case"], row["training"])]
        loaders = [r["epoch_s"] for r in mates if r["name"].startswith("DataLoader")]
        by_hand = [r["epoch_s"] for r in mates if r["name"] == "by hand"]
        row["of_best_dataloader"] = row["epoch_s"] / min(loaders)
        row["of_by_hand"] = row["epoch_s"] / by_hand[0] if by_hand else None
        bound = max(row["step_s"], row["load_s"])
        row["of_bound"] = row["epoch_s"] / bound if bound else None
    return rows


def show(rows: list[Row]) -> None:
    """One table a case."""
    last: tuple[Any, ...] = ()
    for row in rows:
        if (row["case"], row["training"]) != last:
            last = (row["case"], row["training"])
            beside = ""
            if row["training"]:
                beside = f": training; steps {row['step_s']:.3f} s, loading {row['load_s']:.3f} s"
            print(f"\n{row['title']}{beside}")
            print(
                f"{'':<34} {'epoch s':>8} {'(least-most)':>15} {'first':>7} {'samples/s':>10} "
                f"{'CPU s':>6} {'of best DL':>10} {'of hand':>8} {'of bound':>8} {'MB':>5}"
            )
        ratios = [
            "" if row[name] is None else f"{row[name]:.2f}"
            for name in ("of_best_dataloader", "of_by_hand", "of_bound")
        ]
        taken = row.get("memory_bytes")
        size = f"{taken / 1e6:.0f}" if taken is not None else ""
        spread = f"({row['least_s']:.3f}-{row['most_s']:.3f})"
        print(
            f"{row['name']:<34} {row['epoch_s']:>8.4f} {spread:>15} {row['first_epoch_s']:>7.3f} "
            f"{row['samples_per_s']:>10,.0f} {row['cpu_s']:>6.2f} "
            f"{ratios[0]:>10} {ratios[1]:>8} {ratios[2]:>8} {size:>5}"
        )


def panels(rows: list[Row], images: list[Row]) -> list[tuple[str, str, list[Row], str, float]]:
    """What is drawn: (title, label, rows, the column to draw, the bound or 0) of each panel."""
    found = []
    for key in dict.fromkeys((row["case"], row["training"]) for row in rows):
        mates = [row for row in rows if (row["case"], row["training"]) == key]
        title, bound = mates[0]["title"], max(mates[0]["step_s"], mates[0]["load_s"])
        if key[1]:
            found.append(
                (f"{title}: training", "s an epoch (less is better)", mates, "epoch_s", bound)
            )
        else:
            found.append((title, "samples/s", mates, "samples_per_s", 0.0))
    for name in dict.fromkeys(row["set"] for row in images):
        mates = [row for row in images if row["set"] == name]
        found.append(
            (f"(b) pictures of {name}, to 224x224", "images/s", mates, "images_per_s", 0.0)
        )
    return found


def plot(rows: list[Row], images: list[Row], path: Path) -> None:
    """PATH.png and PATH.svg: samples/s of each contender, and epochs of training."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"  # text as text: a small file
    from matplotlib import pyplot as plt

    drawn = panels(rows, images)
    figure, axes = plt.subplots(
        -(-len(drawn) // 2), 2, figsize=(12, 2.8 * -(-len(drawn) // 2)), squeeze=False
    )
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    for axis, (title, label, mates, column, bound) in zip(axes.flat, drawn, strict=False):
        colours = ["#c2410c" if row["name"].startswith("hasten") else "#94a3b8" for row in mates]
        values = [row[column] for row in mates]
        axis.barh([row["name"] for row in mates], values, color=colours)
        axis.invert_yaxis()
        if max(values) > 20 * min(values):
            axis.set_xscale("log")
        if bound:
            axis.axvline(bound, color="#334155", lw=0.8, ls="--", label="the longer of steps, load")
            axis.legend(fontsize=6, loc="lower right")
        axis.set_xlabel(label, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=80)
    plt.close(figure)


def feed_alone(key: str, name: str, peers: str) -> None:
    """One contender of a case, for `peak_memory` to watch."""
    case = next(case for case in cases() if case.key == key)
    found = {contender.name: contender for contender in contenders(case, peers)}
    try:
        peak_memory.in_child(found[name].epoch)
    finally:
        for contender in found.values():
            contender.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one that warms up")
    parser.add_argument("--only", default="", help="cases, such as a64,a1000,b,c,d,e")
    parser.add_argument("--no-training", action="store_true", help="feed alone")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0 leaves its default")
    parser.add_argument("--json", action="store_true", help="print one object, last")
    parser.add_argument("--plot", type=Path, help="write PATH.png and PATH.svg")
    parser.add_argument("--no-memory", action="store_true", help="leave that column out")
    parser.add_argument("--peers", choices=("some", "all"), default="some")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.alone:
        feed_alone(*arguments.alone, arguments.peers)
        return
    only = set(filter(None, arguments.only.split(",")))
    print(
        f"hasten {hasten.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads"
    )
    for name in missing():
        print(f"{name} is not installed: left out (pip install --no-deps {name})")
    rows: list[Row] = []
    began = time.perf_counter()
    wanted = [case for case in cases() if not only or case.key in only]
    if not arguments.no_training and (not only or "b" in only):
        wanted.append(training_on_pictures())
    for case in wanted:
        for training in (False, True)[not case.alone : 1 + (not arguments.no_training)]:
            rows_of = measure(case, arguments.rounds, training=training, peers=arguments.peers)
            found = _with_ratios(rows_of)
            if not training and not arguments.no_memory:
                alone = ["--threads", str(arguments.threads), "--peers", arguments.peers]
                alone += ["--alone", case.key]
                peak_memory.add_to(found, __file__, *alone)
            show(found)
            sys.stdout.flush()
            rows += found
    images: list[Any] = []
    if not only or "b" in only:
        module = importlib.import_module("feed_images")
        images = module.run(arguments.rounds, memory=not arguments.no_memory, peers=arguments.peers)
        module.show(images)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if arguments.plot is not None:
        plot(rows, images, arguments.plot)
    if arguments.json:
        print(json.dumps({"rows": rows, "images": images}))


if __name__ == "__main__":
    main()
