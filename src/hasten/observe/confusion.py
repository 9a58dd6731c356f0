"""The confusion matrix: what it says of each class, and its picture as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_NUMBERED = 20  # up to so many classes the cells hold their counts
_NAMED = 60  # ... each row and column has its name
MOST_CLASSES = 200  # ... and the matrix can be drawn at all
_LEVELS = 8

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """What the matrix says of one class; a share without a denominator is NaN."""

    name: str
    images: int
    recall: float
    """Of the class's images, the share that was recognised."""
    precision: float
    """Of the images taken for the class, the share that is."""
    f1: float
    confused_with: str
    """The class that its images are most often taken for; empty if none."""
    confused_count: int


def per_class(matrix: Matrix, names: Sequence[str]) -> list[ClassFigures]:
    """The figures of each class.

    Args:
        matrix: ``matrix[true][predicted]`` counts images.
        names: one a class.
    """
    predicted = [sum(row[k] for row in matrix) for k in range(len(names))]
    figures = []
    for k, name in enumerate(names):
        row, hit = matrix[k], matrix[k][k]
        images = sum(row)
        others = [(count, -j) for j, count in enumerate(row) if j != k and count]
        count, other = max(others, default=(0, 0))
        figures.append(
            ClassFigures(
                name=name,
                images=images,
                recall=_share(hit, images),
                precision=_share(hit, predicted[k]),
                f1=_share(2 * hit, images + predicted[k]),
                confused_with=names[-other] if count else "",
                confused_count=count,
            )
        )
    return figures


def worst_pairs(matrix: Matrix, names: Sequence[str], most: int) -> list[tuple[str, str, int]]:
    """The most frequent mistakes as (true, predicted, images), most frequent first."""
    pairs = [
        (count, i, j)
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    return [(names[i], names[j], count) for count, i, j in pairs[:most]]


def picture(matrix: Matrix, names: Sequence[str]) -> str:
    """The matrix as an ``<svg>``; rows are true classes, columns predicted ones.

    Each cell's strength is its share of its row. Above 200 classes there is nothing to see, and
    the result is empty.
    """
    classes = len(names)
    if not 0 < classes <= MOST_CLASSES:
        return ""
    cell = max(4.0, min(38.0, 620 / classes))
    every = 1 if classes <= _NAMED else math.ceil(classes / 40)
    longest = max(min(len(name), 22) for name in names[::every])
    font = min(12.0, max(7.0, cell * every * 0.8))
    margin = longest * font * 0.6 + 12
    side = cell * classes
    body = _cells(matrix, names, margin, cell)
    upright = longest * font * 0.6 < cell * every - 2
    for k in range(0, classes, every):
        middle = margin + cell * (k + 0.5)
        name = escape(_short(names[k]))
        body += (
            f'<text x="{margin - 6:.1f}" y="{middle + font * 0.35:.1f}" text-anchor="end">{name}'
            "</text>"
        )
        if upright:
            place = f'x="{middle:.1f}" y="{margin - 6:.1f}" text-anchor="middle"'
        else:
            corner = f"{middle + font * 0.35:.1f} {margin - 6:.1f}"
            place = f'transform="translate({corner}) rotate(-90)"'
        body += f"<text {place}>{name}</text>"
    size = margin + side + 4
    label = f"Confusion matrix of {classes} classes; rows are true, columns predicted"
    return (
        f'<svg class="matrix" viewBox="0 0 {size:.0f} {size:.0f}" role="img" '
        f'style="max-width:{max(size, 300):.0f}px" font-size="{font:.1f}" fill="var(--muted)" '
        f'aria-label="{label}"><title>{label}</title>{body}'
        f'<rect x="{margin:.1f}" y="{margin:.1f}" width="{side:.1f}" height="{side:.1f}" '
        'fill="none" stroke="var(--line)"/></svg>'
    )


def _cells(matrix: Matrix, names: Sequence[str], margin: float, cell: float) -> str:
    if len(names) > _NAMED:
        return _cells_by_level(matrix, margin, cell)
    parts = []
    for i, row in enumerate(matrix):
        whole = sum(row)
        for j, count in enumerate(row):
            if not count:
                continue
            x, y, strength = margin + cell * j, margin + cell * i, _strength(count, whole)
            tip = escape(f"{names[i]} taken for {names[j]}: {count:,} of {whole:,}")
            parts.append(
                f'<g><title>{tip}</title><rect x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" '
                f'height="{cell:.1f}" fill="var({_colour(i, j)})" fill-opacity="{strength:.2f}"/>'
            )
            if len(names) <= _NUMBERED:
                digits = len(str(count))
                ink = "--on" if strength > 0.6 else "--ink"
                size = min(12.0, cell * 1.3 / max(digits, 1), cell * 0.45)
                parts.append(
                    f'<text x="{x + cell / 2:.1f}" y="{y + cell / 2 + size * 0.36:.1f}" '
                    f'text-anchor="middle" font-size="{size:.1f}" fill="var({ink})">{count}</text>'
                )
            parts.append("</g>")
    return "".join(parts)


def _cells_by_level(matrix: Matrix, margin: float, cell: float) -> str:
    """Cells of a large matrix as one path a colour and strength, or the page grows by megabytes."""
    paths: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(matrix):
        whole = sum(row)
        for j, count in enumerate(row):
            if count:
                level = max(1, round(_strength(count, whole) * _LEVELS))
                corner = f"M{margin + cell * j:.1f} {margin + cell * i:.1f}"
                square = f"{corner}h{cell:.1f}v{cell:.1f}h-{cell:.1f}z"
                paths.setdefault((_colour(i, j), level), []).append(square)
    return "".join(
        f'<path d="{"".join(squares)}" fill="var({colour})" fill-opacity="{level / _LEVELS:.3f}"/>'
        for (colour, level), squares in sorted(paths.items())
    )


def _colour(true: int, predicted: int) -> str:
    return "--good" if true == predicted else "--bad"


def _strength(count: int, whole: int) -> float:
    # The root lets a mistake of one in a hundred be seen beside a diagonal near one.
    return max(0.12, 0.85 * math.sqrt(count / whole))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"
