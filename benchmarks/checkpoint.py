"""How long a checkpoint stops training: written in the background against written at once.

    python benchmarks/checkpoint.py [--megabytes 200] [--rounds 9] [--folder DIR] [--threads N]
        [--json FILE]

A model with its optimizer, whose checkpoint has the size asked for, takes steps of its own. In
each round three saves take turns, each after the disk has come to rest: none at all, one in the
background, one that is waited for. What is told is the *stall*: the time from the first step
after the save is asked for, to the end of the step, less the median of the steps without a save;
and the *cost*: how much longer all steps take until the checkpoint is on the disk, since the
writing shares the processor's cores. Medians over the rounds, and of the ratios within a round.
The very first save takes memory from the system and is told apart.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten


class Endless:
    """The same batch again and again."""

    def __init__(self, features: int) -> None:
        self.batch = (torch.randn(64, features), torch.randint(0, 10, (64,)))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.batch


def model_of(megabytes: int) -> nn.Module:
    """Two parts: one that a step works with, and one that only has to be saved."""
    worked = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    # Adam keeps two tensors beside each parameter: a checkpoint is three times the model.
    count = megabytes * 10**6 // 12 - sum(p.numel() for p in worked.parameters())
    held = nn.ParameterList(nn.Parameter(torch.randn(count // 20)) for _ in range(20))
    worked.register_module("held", held)
    return worked


class Working(nn.Module):
    """Gives the held part gradients once, so that the optimizer has its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        out = data
        for name, layer in self.inner.named_children():
            if name != "held":
                out = layer(out)
        return out


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, object]:
    run = hasten.Run(
        device="cpu",
        precision="float32",
        folder=folder,
        checkpoint_every="never",
        keep=1,
        stream=io.StringIO(),
    )
    inner = model_of(megabytes)
    model = Working(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    run.prepare(model, optimizer)
    loss_of = nn.CrossEntropyLoss()
    found: dict[str, list[float]] = {name: [] for name in ("none", "background", "waited for")}
    cost: list[float] = []
    turns = ["background", *list(found) * rounds]
    first: float | None = None
    size = 0
    for parameter in inner.held:  # type: ignore[union-attr]
        parameter.grad = torch.zeros_like(parameter)
    for _ in run.epochs(1):
        batches = iter(run.batches(Endless(256)))

        def step(batches: Iterator[Any] = batches) -> float:
            began = time.perf_counter()
            data, labels = next(batches)
            run.backward(loss_of(model(data), labels))
            run.step(optimizer)
            return time.perf_counter() - began

        for _ in range(30):
            step()
        for turn in turns:
            writer = run._writer
            assert writer is not None
            writer.settle()
            os.sync()
            quiet = statistics.median(step() for _ in range(30))
            began = time.perf_counter()
            if turn != "none":
                run.save(wait=turn == "waited for")
            step()
            stall = time.perf_counter() - began - quiet
            if first is None:
                first = stall
                writer.settle()
                kept = run.last_good
                assert kept is not None
                size = sum(file.stat().st_size for file in kept.iterdir())
                continue
            found[turn].append(stall)
            if turn == "background":
                extra = 0.0
                while writer.busy:
                    extra += step() - quiet
                cost.append(stall + extra)
        break
    run.close()
    ratios = [b / w for b, w in zip(found["background"], found["waited for"], strict=True)]
    return {
        "checkpoint_bytes": size,
        "median_stall_s": {name: statistics.median(values) for name, values in found.items()},
        "first_background_stall_s": first,
        "median_cost_s": statistics.median(cost),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    place = Path(tempfile.mkdtemp(prefix="hasten-checkpoint-", dir=options.folder))
    try:
        found = measure(place / "run", options.megabytes, options.rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    found |= {
        "hasten": hasten.__version__,
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "folder": str(place.parent),
        "rounds": options.rounds,
    }
    stalls = found["median_stall_s"]
    assert isinstance(stalls, dict)
    print(f"checkpoint: {found['checkpoint_bytes']:,} bytes, {options.rounds} rounds")
    print(f"{'':24} stall of a step, ms")
    for name, seconds in stalls.items():
        print(f"{name:24} {1e3 * seconds:8.1f}")
    print(f"{'background, the first':24} {1e3 * found['first_background_stall_s']:8.1f}")  # type: ignore[operator]
    print(f"ratio of background to waited for: {found['ratio']:.3f}")
    print(f"all steps until it is on the disk: {1e3 * found['median_cost_s']:.0f} ms longer")  # type: ignore[operator]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
