"""`hasten evaluate`: how well a trained model does on labelled images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli import model_options as options
from hasten.cli import output
from hasten.cli.one_process import refuse_several

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hasten.vision.classify import Classifier
    from hasten.vision.evaluating import Measured

_SQUARE = 20  # classes up to which the confusion matrix is shown
_MISTAKES = 10  # shown instead for more classes
_NAMED = 5  # skipped files that are named
_SHORT = 6  # characters of a class name that heads a column


def evaluate(
    context: typer.Context,
    checkpoint: options.Checkpoint,
    data: Annotated[
        str | None,
        typer.Argument(
            help="digits, fashion-mnist, or a folder with one sub-folder a class. By default the"
            " images that the run was validated with.",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Where Fashion-MNIST's files are or are downloaded to.")
    ] = None,
    which: options.Which = None,
    device: options.Device = "auto",
    precision: options.PrecisionName = "auto",
    batch_size: Annotated[int, typer.Option(help="Images at once.")] = 256,
    num_workers: Annotated[
        str, typer.Option(help="Worker processes that load data, or auto.")
    ] = "auto",
    progress: Annotated[str, typer.Option(help="auto, bar, plain or off.")] = "auto",
    model: options.Model = None,
    classes: options.Classes = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    mean: options.Mean = None,
    std: options.Std = None,
    trust: options.Trust = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, last, on standard output.")
    ] = False,
) -> None:
    """Measure a trained model: accuracy, loss, each class's figures, the confusion matrix.

    Examples: `hasten evaluate runs/NAME`, `hasten evaluate runs/NAME photos/`,
    `hasten evaluate runs/NAME fashion-mnist --which last`.
    """
    refuse_several("evaluate")
    from hasten.vision.classify import check_count
    from hasten.vision.evaluating import measure

    workers = options.worker_count(num_workers)
    check_count(batch_size, "--batch-size")
    stream = output.people_stream(json)
    say = options.teller(stream)
    classifier = options.ModelOptions(
        **{key: context.params[key] for key in options.ModelOptions.__dataclass_fields__}
    ).load(checkpoint, say)
    measured = measure(
        classifier,
        data,
        data_dir=data_dir,
        batch_size=batch_size,
        num_workers=workers,
        progress=progress,
        stream=stream,
        say=say,
    )
    say(f"Data: {measured.data}")
    _print(measured, classifier.classes, output.console(json))
    if json:
        output.print_json(as_json(measured, classifier))


def as_json(measured: Measured, classifier: Classifier) -> dict[str, Any]:
    """The measurement for machines; a share without a denominator is null."""
    evaluation = measured.evaluation
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "images": evaluation.samples,
        "per_class": [
            {
                "class": figures.name,
                "images": figures.images,
                "accuracy": figures.recall,
                "precision": figures.precision,
                "recall": figures.recall,
            }
            for figures in measured.classes
        ],
        "confusion": measured.confusion,
        "checkpoint": options.json_name(str(classifier.path)),
        "data": measured.data,
        "device": str(classifier.device),
        "precision": classifier.precision.name,
        "skipped": [{"file": name, "reason": why} for name, why in measured.skipped.items()],
    }


def _print(measured: Measured, classes: tuple[str, ...], console: Console) -> None:
    from hasten.observe.confusion import worst_pairs

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    evaluation, confusion = measured.evaluation, measured.confusion
    right = sum(confusion[k][k] for k in range(len(confusion)))
    if evaluation.accuracy is not None:
        line(f"Accuracy: {evaluation.accuracy:.2%} ({right:,} of {evaluation.samples:,} images)")
    line(f"Loss: {evaluation.loss:.4f}")
    console.print(_per_class(measured, console))
    if len(classes) <= _SQUARE:
        line("Confusion matrix: a row for each true class, a column for what the model says")
        console.print(_matrix(confusion, classes, console))
    else:
        pairs = worst_pairs(confusion, classes, _MISTAKES)
        if pairs:
            line("Most frequent mistakes")
        for true, said, images in pairs:
            line(f"  {images:,} × {_shown(true)} taken for {_shown(said)}")
    for name, why in list(measured.skipped.items())[:_NAMED]:
        line(f"Skipped {_shown(name)}: {why}")
    if len(measured.skipped) > _NAMED:
        line(f"Skipped {len(measured.skipped):,} files in all")


def _table(console: Console) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.ROUNDED if console.is_terminal else None, pad_edge=False)


def _per_class(measured: Measured, console: Console) -> Table:
    from rich.text import Text

    table = _table(console)
    table.add_column("class", overflow="fold")
    for name in ("images", "right", "precision", "recall"):
        table.add_column(name, justify="right", no_wrap=True)
    for k, figures in enumerate(measured.classes):
        table.add_row(
            Text(_shown(figures.name)),
            f"{figures.images:,}",
            f"{measured.confusion[k][k]:,}",
            _percent(figures.precision),
            _percent(figures.recall),
        )
    return table


def _matrix(confusion: list[list[int]], classes: tuple[str, ...], console: Console) -> Table:
    """Long names do not fit over columns: there, a class's number stands for it."""
    from rich.text import Text

    names = [_shown(name) for name in classes]
    short = all(len(name) <= _SHORT for name in names)
    table = _table(console)
    table.add_column("true", overflow="fold")
    for k, name in enumerate(names):
        table.add_column(Text(name if short else f"#{k + 1}"), justify="right", no_wrap=True)
    for k, (name, row) in enumerate(zip(names, confusion, strict=True)):
        head = name if short else f"#{k + 1} {name}"
        table.add_row(Text(head), *(str(count) if count else "." for count in row))
    return table


def _percent(share: float) -> str:
    return "-" if share != share else f"{share:.1%}"


def _shown(text: str) -> str:
    from hasten.vision.file_names import show

    return show(text)
