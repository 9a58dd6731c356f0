"""Plots for files, by matplotlib; the report's own charts are in ``svg``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import HastenError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as _Axes
    from matplotlib.ticker import Locator as _Locator

_COLOURS = ("#2563c9", "#d9542b", "#0f8a6d", "#b98a12", "#7a4fc4", "#5d6b7a")
_LONGEST_LABEL = 64
_WIDTH_IN = 10.0
_ROW_IN = 0.3


@dataclass(frozen=True, kw_only=True)
class PlotRow:
    """One setting of a comparison."""

    label: str
    images_per_s: float
    low: float | None = None
    """Slowest repeat, images a second."""
    high: float | None = None
    """Fastest repeat, images a second."""
    accuracy: float | None = None
    """0 to 1."""
    group: str = ""
    """Rows of one group, such as a device, share a colour."""


def comparison_plot(rows: Sequence[PlotRow], *, png: Path, svg: Path, title: str) -> None:
    """Draw speed as bars and accuracy as dots beside them, one row a setting, first on top.

    Args:
        rows: at least one; values that are not finite leave their place empty.
        png: file to write, 150 dots an inch.
        svg: file to write.
        title: above the plot.

    Raises:
        UsageError: there are no rows.
        HastenError: a file cannot be written.
    """
    if not rows:
        raise UsageError("there is nothing to plot: the comparison has no rows")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, 1.5 + _ROW_IN * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    with_accuracy = any(_finite(row.accuracy) for row in rows)
    if with_accuracy:
        speed, accuracy = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        _draw_accuracy(accuracy, rows)
    else:
        speed = figure.subplots()
    _draw_speed(speed, rows)
    figure.suptitle(title, parse_math=False, fontsize=13, fontweight="bold")
    # File and class names may be in any script; a box for a letter is no reason to warn.
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "hasten"}):
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        for path, options in ((png, {"dpi": 150}), (svg, {"metadata": {"Date": None}})):
            try:
                figure.savefig(path, **options)
            except OSError as error:
                raise HastenError(
                    f"cannot write {path}: {error.strerror or error}; "
                    "check that its folder exists, is writable and has room"
                ) from error


def _draw_speed(axes: _Axes, rows: Sequence[PlotRow]) -> None:
    groups = list(dict.fromkeys(row.group for row in rows))
    places = range(len(rows))
    speeds = [row.images_per_s if _finite(row.images_per_s) else 0.0 for row in rows]
    colours = [_COLOURS[groups.index(row.group) % len(_COLOURS)] for row in rows]
    axes.barh(places, speeds, height=0.7, color=colours, zorder=2)
    tops = [
        row.high if row.high is not None and _finite(row.high) else s
        for row, s in zip(rows, speeds, strict=True)
    ]
    for place, row, speed, top in zip(places, rows, speeds, tops, strict=True):
        if row.low is not None and row.high is not None and row.high > row.low:
            axes.plot([row.low, row.high], [place, place], color="#17202b", linewidth=1.2, zorder=3)
        text = f"{speed:,.0f}" if _finite(row.images_per_s) else "failed"
        axes.annotate(
            text,
            (top, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#17202b",
        )
    axes.set_yticks(places, [_short(row.label) for row in rows], fontsize=8.5)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, (max(tops) or 1.0) * 1.14)
    axes.set_xlabel(
        "images a second"
        + (
            ", with the slowest and fastest repeat"
            if any(row.low is not None for row in rows)
            else ""
        )
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_locator(_few_ticks())
    _plain(axes)
    if len(groups) > 1:
        from matplotlib.patches import Patch

        legend = axes.legend(
            handles=[
                Patch(color=_COLOURS[i % len(_COLOURS)], label=_short(name) or "other")
                for i, name in enumerate(groups)
            ],
            loc="lower right",
            fontsize=8.5,
            framealpha=0.9,
        )
        for entry in legend.get_texts():
            entry.set_parse_math(False)


def _draw_accuracy(axes: _Axes, rows: Sequence[PlotRow]) -> None:
    known = [
        (100 * row.accuracy, place)
        for place, row in enumerate(rows)
        if row.accuracy is not None and _finite(row.accuracy)
    ]
    axes.plot([v for v, _ in known], [p for _, p in known], "o", color="#17202b", zorder=3)
    values = [v for v, _ in known]
    room = max((max(values) - min(values)) * 0.15, 0.5)
    # Room on the right for the figures beside the dots.
    axes.set_xlim(min(values) - room, max(values) + 3.2 * room)
    for value, place in known:
        axes.annotate(
            f"{value:.2f}",
            (value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#17202b",
        )
    axes.set_xlabel("accuracy, %")
    axes.xaxis.set_major_locator(_few_ticks())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value <= 100 else "")
    axes.tick_params(labelleft=False)
    _plain(axes)


def _few_ticks() -> _Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5)


def _plain(axes: _Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#e1e5ea", zorder=0)
    axes.set_axisbelow(True)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _short(label: str) -> str:
    label = "".join(c if c.isprintable() else " " for c in label)
    if len(label) <= _LONGEST_LABEL:
        return label
    # Both ends stay: settings that tell rows apart often come last.
    half = _LONGEST_LABEL // 2
    return f"{label[: half - 1]}…{label[-half:]}"
