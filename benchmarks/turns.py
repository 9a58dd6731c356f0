"""Contenders that take turns, and the table of what they took: for benchmarks of a step's time."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def installed(contenders: Mapping[str, tuple[Any, str | None]]) -> dict[str, Any]:
    """Those whose package is there: each is given with the name of the one it needs, or None."""
    return {
        name: contender
        for name, (contender, package) in contenders.items()
        if package is None or importlib.util.find_spec(package)
    }


def take(contenders: Mapping[str, Callable[[], float]], rounds: int, steps: int) -> list[Row]:
    """Seconds of each contender in turns, as rows of microseconds a step and ratios to the first.

    A first round, which warms up, is not counted. Who follows a heavy one finds a warmer machine,
    so each contender begins a round as often as the others. Ratios are those within a round.
    """
    turns = list(contenders.items())
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        start = number % len(turns)
        for name, contender in turns[start:] + turns[:start]:
            took = contender()
            if number:
                seconds[name].append(took / steps)
    first = seconds[turns[0][0]]
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, first, strict=True)]
        rows.append(
            {
                "contender": name,
                "step_us": statistics.median(times) * 1e6,
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
            }
        )
    return rows


def facts(**more: Any) -> dict[str, Any]:
    """What a reader must know of the machine; printed as the first line."""
    known = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        **more,
    }
    print(", ".join(f"{key} {value}" for key, value in known.items()))
    return known


def show(case: Callable[[], Any], name: str, rows: list[Row], to: str) -> None:
    print(f"\n{name}: {case.__doc__}")
    for row in rows:
        low, high = row["ratio_quartiles"]
        print(
            f"  {row['contender']:<22}{row['step_us']:>10,.0f} us a step"
            f"   {row['ratio']:.3f} x {to}  (quartiles {low:.3f} to {high:.3f})"
        )


def keep(path: Path | None, results: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")
