"""What `--precision auto` gains over the plain float32 loop, on several models.

    python benchmarks/precision.py [--rounds 9] [--device cpu] [--json FILE]

The plain loop and hasten's Trainer (precision="auto", channels_last="auto", as by default) take
turns on the same batches from the same weights; printed are the medians, the median ratio within
a round, and what auto chose. The time that auto takes to choose is not part of it: it is paid
once for a model, batch and machine, and is printed too.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hasten
import step_overhead
from step_overhead import Batches, optimizer_of, plain

Case = Callable[[], tuple[nn.Module, Batches]]


def cnn() -> tuple[nn.Module, Batches]:
    """The small CNN of `hasten train` on 28x28 images, batch 128."""
    from hasten.vision import models

    ready = [(torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))) for _ in range(20)]
    return models.create("small", classes=10, channels=1, image_size=28), Batches(ready)


def lesson() -> tuple[nn.Module, Batches]:
    """The lesson's two-convolution network, batch 100."""
    from hasten.vision import models

    ready = [(torch.randn(100, 1, 28, 28), torch.randint(0, 10, (100,))) for _ in range(60)]
    return models.create("lesson", classes=10, channels=1, image_size=28), Batches(ready)


CASES: dict[str, Case] = {"cnn": cnn, "lesson": lesson, "mlp": step_overhead.mlp}


def auto(model: nn.Module, batches: Batches) -> tuple[float, hasten.Result]:
    trainer = hasten.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer_of(model),
        device=step_overhead.DEVICE,
        precision="auto",
        channels_last="auto",
        stream=io.StringIO(),
    )
    result = trainer.fit(batches, epochs=1)
    return result.seconds, result


def measure(case: Case, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    model, batches = case()
    before = time.perf_counter()
    took, result = auto(copy.deepcopy(model), batches)
    choosing_s = time.perf_counter() - before - took
    pairs = []
    for number in range(rounds + 1):
        first = plain(copy.deepcopy(model), batches)
        second, result = auto(copy.deepcopy(model), batches)
        if number:  # the first warms up
            pairs.append((first, second))
    ratios = [first / second for first, second in pairs]
    return {
        "plain_ms": statistics.median(p for p, _ in pairs) * 1e3 / len(batches),
        "auto_ms": statistics.median(a for _, a in pairs) * 1e3 / len(batches),
        "times_as_fast": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "chose": str(result.precision),
        "choosing_s": choosing_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    step_overhead.DEVICE = hasten.device(options.device)
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": hasten.devices.runtime.name(step_overhead.DEVICE),
        "load": os.getloadavg()[0],
        "rounds": options.rounds,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    results: dict[str, object] = {"facts": facts}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HASTEN_CACHE_DIR"] = cache  # auto measures here, and remembers nothing older
        for name, case in CASES.items():
            row = results[name] = measure(case, options.rounds)
            low, high = row["quartiles"]  # type: ignore[misc]
            print(f"\n{name}: {case.__doc__}")
            print(f"  plain float32 {row['plain_ms']:.2f} ms a step, auto {row['auto_ms']:.2f} ms")
            print(
                f"  {row['times_as_fast']:.2f} times as fast (quartiles {low:.2f} to {high:.2f});"
                f" choosing took {row['choosing_s']:.1f} s"
            )
            print(f"  chose {row['chose']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
