"""Feeding 60,000 images of 28x28 from memory: Loader against a hand-written loop and DataLoader.

Runs alternate and medians are printed with their spread, beside ratios to the hand-written
loop of the same batch size. One process; nothing else should run on the machine.

    python benchmarks/feed.py [--repeats 5] [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.feed import Loader

SAMPLES = 60_000


def by_hand(data: TensorDataset, batch_size: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = data.tensors
    order = torch.randperm(SAMPLES)
    for start in range(0, SAMPLES, batch_size):
        index = order[start : start + batch_size]
        yield images.index_select(0, index), labels.index_select(0, index)


def contenders(data: TensorDataset, batch_size: int) -> dict[str, Callable[[], Iterable[object]]]:
    loader = Loader(data, batch_size, shuffle=True)
    found: dict[str, Callable[[], Iterable[object]]] = {
        "index_select by hand": lambda: by_hand(data, batch_size),
        "hasten.Loader": lambda: loader,
        "hasten.Loader.to(cpu)": lambda: loader.to("cpu"),
    }
    for workers in (0, 1, 2):
        plain = DataLoader(data, batch_size, shuffle=True, num_workers=workers)
        found[f"DataLoader, {workers} workers"] = lambda plain=plain: plain
    return found


def epoch_s(batches: Iterable[object]) -> float:
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def compare(batch_size: int, repeats: int) -> list[dict[str, object]]:
    data = TensorDataset(
        torch.randint(0, 256, (SAMPLES, 28, 28), dtype=torch.uint8),
        torch.randint(0, 10, (SAMPLES,)),
    )
    makers = contenders(data, batch_size)
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(repeats + 1):
        for name, make in makers.items():
            # DataLoader takes seconds; the others are repeated, as a single epoch is too short.
            rounds = 1 if name.startswith("DataLoader") else 10
            times[name] += [epoch_s(make()) for _ in range(rounds)]
    rows: list[dict[str, object]] = []
    medians = {name: statistics.median(t[len(t) // (repeats + 1) :]) for name, t in times.items()}
    for name, all_times in times.items():
        measured = all_times[len(all_times) // (repeats + 1) :]  # the first round warms up
        rows.append(
            {
                "batch_size": batch_size,
                "feed": name,
                "epoch_ms": medians[name] * 1e3,
                "least_ms": min(measured) * 1e3,
                "most_ms": max(measured) * 1e3,
                "samples_per_s": SAMPLES / medians[name],
                "ratio": medians[name] / medians["index_select by hand"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0 leaves its default")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = [row for size in (64, 1000) for row in compare(size, arguments.repeats)]
    if arguments.json:
        print(json.dumps(rows))
        return
    print(
        f"hasten {hasten.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(
        f"{'batch':>5}  {'feed':<22} {'epoch ms':>9} {'(least-most)':>17} {'samples/s':>11} ratio"
    )
    for row in rows:
        spread = f"({row['least_ms']:.1f}-{row['most_ms']:.1f})"
        print(
            f"{row['batch_size']:>5}  {row['feed']:<22} {row['epoch_ms']:>9.1f} {spread:>17} "
            f"{row['samples_per_s']:>11,.0f} {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
