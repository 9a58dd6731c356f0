"""`hasten compare`: the same training over a grid of settings, as one table and one plot."""

from __future__ import annotations

import inspect
import shlex
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from hasten.cli import comparison_table, output
from hasten.cli.one_process import refuse_several
from hasten.cli.train import train
from hasten.errors import UsageError

if TYPE_CHECKING:
    from hasten.vision.compared import Comparison

# Options of `hasten train` that are about its run or its processes (a comparison is one), and no
# settings to compare by.
_NOT_AXES = (
    *("context", "name", "runs", "resume", "progress", "tensorboard", "json"),
    *("devices", "batch_size_per_device"),
)
_PLOT = "comparison"
# Where an option means something else here.
_HELP = {
    "data": "digits (the default), fashion-mnist, or a folder with one sub-folder a class.",
    "device": "every, auto, cpu, cuda, cuda:1, mps, xpu ... Those that are absent are left out.",
    "epochs": "Passes over the data; speed is that of all but the first.  [2]",
    "checkpoint_every": "As in hasten train; without this or --keep nothing is saved.",
    "keep": "As in hasten train; without this or --checkpoint-every nothing is saved.",
}


def compare(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A ready grid. device: lr 0.01 x batch 1000, 10000, 20000 x workers 0, 1 x every"
            " device here. workers: workers 0, 1, 2, 4, 8, 16 x batch 100, 1000, 10000. Options"
            " beside it replace its values."
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Runs of each combination, for medians and spread.")
    ] = 3,
    sort: Annotated[bool, typer.Option("--sort", help="Show the fastest first.")] = False,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the comparison's folder. By default data and a hash of the grid."
        ),
    ] = None,
    comparisons: Annotated[Path, typer.Option(help="Folder that comparisons are made in.")] = Path(
        "comparisons"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew what the folder already holds.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write the plot as NAME.png and NAME.svg. By default in the folder."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")
    ] = False,
    **axes: Any,
) -> int:
    """Train every combination of settings and table speed, loss and accuracy.

    The options of `hasten train` take several values with commas between them.
    The same command goes on where it was stopped.

    Examples: `hasten compare --batch-size 100,1000 --precision float32,bfloat16`,
    `hasten compare fashion-mnist --device cpu,cuda --num-workers 0,1,2 --epochs 2`,
    `hasten compare fashion-mnist --preset workers --sort`
    """
    refuse_several("compare")
    from hasten.vision import comparing, grid, kept_rows

    given = {key: value for key, value in axes.items() if value is not None}
    asked = grid.parse(given, preset=preset, repeat=repeat)
    folder = comparisons / _checked_name(name or kept_rows.default_name(asked))
    png, svg = _plot_files(plot or folder / _PLOT)
    for path in (csv, png if plot else None):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"there is no folder {path.parent} to write {path.name} to")
    lines = _Lines(output.people_stream(json))
    try:
        result = comparing.compare(
            asked,
            folder,
            say=lines.say,
            announce=lines.announce,
            fresh=fresh,
            command=_command(context),
        )
    finally:
        lines.clear()
    _report(result, lines.say, sort=sort, csv=csv, png=png, svg=svg, as_json=json)
    return 1 if result.failed else 0


def _axes() -> list[inspect.Parameter]:
    """The settings of `hasten train` as options that take several values."""
    found = []
    for name, parameter in inspect.signature(train, eval_str=True).parameters.items():
        if name in _NOT_AXES:
            continue
        kind, info = typing.get_args(parameter.annotation)[:2]
        text = _HELP.get(name, info.help)
        if isinstance(info, typer.models.ArgumentInfo):
            option: Any = typer.Argument(help=text, metavar=name.upper())
        else:
            words = "on,off" if bool in typing.get_args(kind) else "A,B,..."
            option = typer.Option(help=text, metavar=words)
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, option],
            )
        )
    return found


def _with_axes(command: Any) -> None:
    """Give a command the axes as options, where typer looks for them."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [own[0], *_axes(), *(p.replace(kind=p.KEYWORD_ONLY) for p in own[1:])]
    command.__signature__ = signature.replace(parameters=own)
    command.__annotations__ = {p.name: p.annotation for p in own}


_with_axes(compare)


def _report(
    result: Comparison,
    say: Callable[[str], None],
    *,
    sort: bool,
    csv: Path | None,
    png: Path,
    svg: Path,
    as_json: bool,
) -> None:
    """Show the table and what it says; write the files."""
    from hasten.vision.findings import findings

    rows = result.sorted(fastest_first=sort)
    if result.ran == 0 and not result.failed:
        say("Every run was done already (--fresh measures anew).")
    comparison_table.show(output.console(as_json), rows, result.varying)
    for line in findings(result):
        say(line)
    written = []
    if csv is not None:
        comparison_table.write_csv(csv, result, rows)
        written.append(csv)
    if result.first is not None:
        _draw(result, rows, png, svg)
        written += [png, svg]
    if written:
        say(f"Written: {', '.join(map(str, written))}")
    if result.failed:
        count = len(result.failed)
        again = "it" if count == 1 else "them"
        say(f"{count} of {len(rows)} settings failed; the same command tries {again} again.")
    if as_json:
        output.print_json(result.to_json(fastest_first=sort))


def _draw(result: Comparison, rows: Any, png: Path, svg: Path) -> None:
    from hasten.observe.plots import PlotRow, comparison_plot

    shown = [
        PlotRow(
            label=f"{row.number}: {row.trial.label}",
            images_per_s=row.images_per_s,
            low=spread[0] if (spread := row.speed_spread) else None,
            high=spread[1] if spread else None,
            accuracy=row.accuracy,
            group=row.trial.settings.device,
        )
        for row in rows
    ]
    data = ", ".join(dict.fromkeys(row.trial.settings.data for row in rows))
    comparison_plot(shown, png=png, svg=svg, title=f"{data}: training speed and accuracy")


def _plot_files(name: Path) -> tuple[Path, Path]:
    """NAME.png and NAME.svg, also where the name has one of these endings already."""
    stem = name.name.removesuffix(".png").removesuffix(".svg")
    return name.with_name(f"{stem}.png"), name.with_name(f"{stem}.svg")


def _checked_name(name: str) -> str:
    if name in (".", "..") or Path(name).name != name:
        raise UsageError(f"--name is one folder name, not {name!r}; use --comparisons for the path")
    return name


def _command(context: typer.Context) -> str:
    """The command line as it was given, without --fresh: it goes on with what there is."""
    words = ["hasten", "compare"]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name == "fresh" or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif value is True:
            words.append(parameter.opts[0])
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)


class _Lines:
    """Lines of text for people; on a terminal also one that the next line replaces."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._announced = False

    def say(self, text: str) -> None:
        """Print a line."""
        self._write(f"{self._printable(text)}\n")

    def announce(self, text: str) -> None:
        """Show what is under way, on a terminal."""
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns  # a folded line could not be taken back
            self._write(self._printable(text)[: width - 1])
            self._announced = True

    def clear(self) -> None:
        """Take back what is announced, so that what others write stands on a line of its own."""
        if self._announced:
            self._write("")

    def _printable(self, text: str) -> str:
        return comparison_table.printable(text, self._stream.encoding or "utf-8")

    def _write(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._announced else "") + text)
        self._stream.flush()
        self._announced = False
