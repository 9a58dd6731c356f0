"""Charts as inline SVG that take their colours from the page's CSS variables.

Each function gives one ``<svg>`` element as text, with every label escaped. The page defines
``--s1`` to ``--s4`` (series), ``--good``, ``--bad``, ``--ink``, ``--muted`` and ``--line``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 36
_MOST_BARS = 40
_FAINT_STROKE, _FAINT_FILL = ' stroke-opacity=".45"', ' fill-opacity=".45"'

_Place = Callable[[float, float], tuple[float, float]]
_Height = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line or the parts of bars of one colour."""

    name: str
    colour: str
    """The name of a CSS variable, such as ``--s1``."""
    points: tuple[tuple[float, float], ...]
    """x and y; a y that is not finite leaves a gap."""
    dots: bool = True
    """Whether each point is marked, with its value as a tooltip."""


def line_chart(label: str, series: Sequence[Series], *, x_label: str, percent: bool = False) -> str:
    """Lines over a common x. ``label`` is what a screen reader says.

    Args:
        label: the chart in words.
        series: drawn in this order, the last on top.
        x_label: under the axis.
        percent: y is a share, 0 to 1, shown in per cent.
    """
    drawn = [(x, y) for s in series for x, y in s.points if math.isfinite(y)]
    if not drawn:
        return _frame(label, _note("no finite values to show"))
    low, high = _y_range(series, percent)
    ticks = nice_ticks(low, high, 5)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    left, right = min(x for x, _ in drawn), max(x for x, _ in drawn)
    if left == right:
        left, right = left - 1, right + 1
    # So large that a step more or less is the same number, there is no width or height.
    width, height = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / width
        up = (min(max(y, low), high) - low) / height
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [_grid(ticks, lambda y: place(left, y)[1], percent)]
    x_ticks = [t for t in nice_ticks(left, right, 6, whole=True) if left <= t <= right]
    parts += [_text(place(t, low)[0], _HEIGHT - _BOTTOM + 16, number(t), "middle") for t in x_ticks]
    parts.append(_axis_name(x_label))
    for s in series:
        parts += _line(s, place, percent)
    parts.append(_legend(series))
    return _frame(label, "".join(parts))


def stacked_bars(
    label: str, columns: Sequence[str], series: Sequence[Series], *, x_label: str
) -> str:
    """One bar a column, made of a part of each series; seconds.

    Args:
        label: the chart in words.
        columns: the name under each bar.
        series: ``points[i][1]`` is the height of its part in column ``i``.
        x_label: under the axis.
    """
    if not columns:
        return _frame(label, _note("nothing was timed"))
    heights = [
        [p if math.isfinite(p := s.points[i][1]) and p > 0 else 0.0 for s in series]
        for i in range(len(columns))
    ]
    ticks = nice_ticks(0, max(map(sum, heights)) or 1.0, 5)
    high = ticks[-1]
    span, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = span / len(columns)
    wide = min(step * 0.72, 46)
    parts = [_grid(ticks, lambda y: _HEIGHT - _BOTTOM - y / high * tall, False, unit=" s")]
    # A name takes so much room; where there is less, every second or third column has one.
    named = max(1, math.ceil(len(columns) * (7.5 * max(map(len, columns)) + 10) / span))
    for i, column in enumerate(columns):
        x = _LEFT + step * (i + 0.5)
        y = float(_HEIGHT - _BOTTOM)
        for s, seconds in zip(series, heights[i], strict=True):
            size = seconds / high * tall
            y -= size
            if size > 0.05:
                tip = escape(f"{x_label} {column}, {s.name}: {seconds:,.2f} s")
                parts.append(
                    f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                    f'height="{size:.1f}" fill="var({s.colour})"><title>{tip}</title></rect>'
                )
        if i % named == 0:
            parts.append(_text(x, _HEIGHT - _BOTTOM + 16, column, "middle"))
    parts.append(_axis_name(x_label))
    parts.append(_legend(series))
    return _frame(label, "".join(parts))


def grouped(epochs: int) -> list[range]:
    """Groups of epochs, at most forty, as evenly filled as whole numbers allow."""
    size = max(1, math.ceil(epochs / _MOST_BARS))
    return [range(start, min(start + size, epochs)) for start in range(0, epochs, size)]


def nice_ticks(low: float, high: float, wanted: int, *, whole: bool = False) -> list[float]:
    """Round values that cover ``low`` to ``high``, about as many as wanted."""
    span = high - low
    if not span > 0:
        return [low, low + 1]
    rough = span / max(wanted - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's text: ``0.25``, ``1,000``, ``3e-05``."""
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _y_range(series: Sequence[Series], percent: bool) -> tuple[float, float]:
    kept: list[float] = []
    for s in series:
        values = sorted(y for _, y in s.points if math.isfinite(y))
        # A line without dots is raw: a few spikes must not flatten everything else.
        kept += values if s.dots else values[: max(1, math.ceil(0.98 * len(values)))]
    low, high = min(kept), max(kept)
    if percent:
        # One epoch, or epochs all alike, still get an axis with some height.
        room = max((high - low) * 0.1, 0.01)
        return max(0.0, low - room), min(1.0, high + room)
    if 0 <= low < 0.5 * high:
        low = 0.0
    return (low, high) if high > low else (min(0.0, low), max(low, 1.0) if low <= 0 else low * 1.1)


def _line(s: Series, place: _Place, percent: bool) -> list[str]:
    path, gap = [], True
    dots = []
    for x, y in s.points:
        if not math.isfinite(y):
            gap = True
            continue
        px, py = place(x, y)
        path.append(f"{'M' if gap else 'L'}{px:.1f} {py:.1f}")
        gap = False
        if s.dots and len(s.points) <= 200:
            value = f"{y:.2%}" if percent else f"{y:.4f}"
            tip = escape(f"{s.name}, {number(x)}: {value}")
            radius = 3.5 if len(s.points) <= 40 else 1.5
            dots.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius}" fill="var({s.colour})">'
                f"<title>{tip}</title></circle>"
            )
    width, faint = ("2", "") if s.dots else ("1.2", _FAINT_STROKE)
    line = (
        f'<path d="{"".join(path)}" fill="none" stroke="var({s.colour})" stroke-width="{width}" '
        f'stroke-linejoin="round" stroke-linecap="round"{faint}/>'
    )
    return [line, *dots]


def _grid(ticks: Sequence[float], height: _Height, percent: bool, unit: str = "") -> str:
    parts = []
    for tick in ticks:
        y = height(tick)
        name = f"{number(round(100 * tick, 6))}%" if percent else number(tick) + unit
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="var(--line)"/>{_text(_LEFT - 8, y + 4, name, "end")}'
        )
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "--muted") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var({colour})">'
        f"{escape(text)}</text>"
    )


def _axis_name(text: str) -> str:
    return _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, text, "middle")


def _legend(series: Sequence[Series]) -> str:
    parts, x = [], float(_LEFT)
    for s in series:
        parts.append(
            f'<rect x="{x:.0f}" y="8" width="11" height="11" rx="2" fill="var({s.colour})"'
            f"{'' if s.dots else _FAINT_FILL}/>{_text(x + 16, 18, s.name, 'start', '--ink')}"
        )
        x += 16 + 7.6 * len(s.name) + 14
    return "".join(parts)


def _note(text: str) -> str:
    return _text(_WIDTH / 2, _HEIGHT / 2, text, "middle")


def _frame(label: str, body: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}"><title>{escape(label)}</title>{body}</svg>'
    )
