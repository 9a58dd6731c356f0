"""The table of a comparison: as text, on a terminal of any width, and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.errors import HastenError

if TYPE_CHECKING:
    from rich.console import Console

    from hasten.vision.compared import Comparison, Row

_NOTHING = "-"


class Cell(NamedTuple):
    """One figure or setting of a row, under its title."""

    title: str
    text: str
    number: bool = True
    """Whether it stands to the right."""


def cells(row: Row, varying: Sequence[str]) -> list[Cell]:
    """A row of the table."""
    settings = row.trial.settings
    leading = [Cell("run", str(row.number))]
    if "data" in varying:
        leading.append(Cell("data", settings.data, number=False))
    leading += [
        Cell("device", settings.device, number=False),
        Cell("batch size", _batch_size(row)),
        Cell("workers", str(settings.num_workers)),
        Cell("precision", row.precision, number=False),
    ]
    return leading + _others(row, varying) + _figures(row)


def show(console: Console, rows: Sequence[Row], varying: Sequence[str]) -> None:
    """Print the table: with lines on a terminal, in plain columns elsewhere; where a terminal is
    too narrow for it, a paragraph for each row."""
    from rich.cells import cell_len

    content = [
        [cell._replace(text=printable(cell.text, console.encoding)) for cell in cells(row, varying)]
        for row in rows
    ]
    titles = [cell.title for cell in content[0]]
    widths = [
        max(cell_len(title), *(cell_len(row[place].text) for row in content))
        for place, title in enumerate(titles)
    ]
    if not console.is_terminal:
        _plain(console, content, widths)
    elif sum(widths) + 3 * len(widths) + 1 <= console.width:
        _boxed(console, content)
    else:
        _paragraphs(console, rows, content)


def printable(text: str, encoding: str) -> str:
    """The text with escapes for what a stream cannot show; names may hold anything."""
    safe = "".join(
        c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def write_csv(path: Path, comparison: Comparison, rows: Sequence[Row]) -> None:
    """Write a row a trial: its settings, what was chosen for ``auto``, and all figures.

    Raises:
        HastenError: the file cannot be written.
    """
    flat = [_flat(row.to_json()) for row in rows]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise HastenError(
            f"cannot write {path}: {error.strerror or error}; the measurements are kept in"
            f" {comparison.folder}, so the same command with another --csv writes them at once"
        ) from error


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row without nests: ``images_per_s_min`` and ``_max`` for its spread."""
    spreads = row.pop("spread")
    row["epochs"] = row.pop("settings")["epochs"]
    for name, spread in spreads.items():
        row[f"{name}_min"], row[f"{name}_max"] = spread or (None, None)
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def _others(row: Row, varying: Sequence[str]) -> list[Cell]:
    from hasten.vision.grid import ALWAYS_SHOWN, text_of

    found = []
    for name in varying:
        if name not in ALWAYS_SHOWN and name not in ("data", "epochs"):
            value = getattr(row.trial.settings, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            found.append(Cell(name.replace("_", " "), text_of(value), number=number))
    return found


def _figures(row: Row) -> list[Cell]:
    spread = row.speed_spread
    accuracy = row.accuracy
    return [
        Cell("epoch", str(row.epochs[-1].epoch if row.epochs else row.trial.settings.epochs)),
        Cell("loss", _figure(row.loss, ".4f")),
        Cell("accuracy", _NOTHING if accuracy is None else f"{accuracy:.2%}"),
        Cell("epoch s", _seconds(row.epoch_seconds)),
        Cell("run s", _seconds(row.run_seconds)),
        Cell("images/s", _speed(row.images_per_s)),
        Cell("min-max", _NOTHING if spread is None else "-".join(map(_speed, spread))),
        Cell("ratio", _NOTHING if row.ratio is None else f"{row.ratio:.2f}x"),
    ]


def _plain(console: Console, content: list[list[Cell]], widths: list[int]) -> None:
    from rich.cells import cell_len

    heads = [cell._replace(text=cell.title) for cell in content[0]]
    for row in [heads, *content]:
        padded = []
        for cell, width in zip(row, widths, strict=True):
            room = " " * (width - cell_len(cell.text))
            padded.append(room + cell.text if cell.number else cell.text + room)
        console.out("  ".join(padded).rstrip(), highlight=False)


def _boxed(console: Console, content: list[list[Cell]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for cell in content[0]:
        table.add_column(Text(cell.title), justify="right" if cell.number else "left", no_wrap=True)
    for row in content:
        table.add_row(*(Text(cell.text) for cell in row))
    console.print(table)


def _paragraphs(console: Console, rows: Sequence[Row], content: list[list[Cell]]) -> None:
    from rich.text import Text

    for row, line in zip(rows, content, strict=True):
        by_title = {cell.title: cell.text for cell in line}
        label = printable(row.trial.label, console.encoding)
        console.print(Text(f"{row.number}  {label}"), style="bold")
        if not row.runs:
            console.print("   failed")
            continue
        spread = f" ({by_title['min-max']})" if row.speed_spread else ""
        for part in (
            f"{by_title['images/s']} images/s{spread}, {by_title['ratio']}",
            f"accuracy {by_title['accuracy']}, loss {by_title['loss']}, epoch {by_title['epoch']}",
            f"epoch {by_title['epoch s']} s, run {by_title['run s']} s, {row.precision}",
        ):
            console.print(Text(f"   {part}"))


def _batch_size(row: Row) -> str:
    asked = row.trial.settings.batch_size
    return f"auto ({row.batch_size})" if asked == "auto" and row.runs else str(asked)


def _figure(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else _NOTHING


def _seconds(value: float) -> str:
    return _figure(value, ".0f" if value >= 100 else ".1f" if value >= 10 else ".2f")


def _speed(value: float) -> str:
    return _figure(value, ",.0f" if value >= 10 else ".1f")
