"""`hasten predict`: the most probable classes of images, by a trained model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli import model_options as options
from hasten.cli.one_process import refuse_several
from hasten.cli.output import print_json
from hasten.errors import UsageError

if TYPE_CHECKING:
    from hasten.vision.predicting import Answer

_TOP = 5


def predict(
    context: typer.Context,
    checkpoint: options.Checkpoint,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…",
            help="Image files, folders of them, or - for paths on standard input.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int | None, typer.Option(help=f"Classes to give for each.  [{_TOP}]")] = None,
    null: Annotated[
        bool, typer.Option("-0", "--null", help="Paths on standard input end with a NUL byte.")
    ] = False,
    which: options.Which = None,
    device: options.Device = "auto",
    precision: options.PrecisionName = "auto",
    batch_size: Annotated[int, typer.Option(help="Images at once.")] = 64,
    num_workers: Annotated[
        str, typer.Option(help="Threads that decode images, or auto: one a core.")
    ] = "auto",
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
    """Say what images show: a line for each file, the most probable classes first.

    A file that cannot be read is named on standard error and skipped; the exit status is then 1.

    Examples: `hasten predict runs/NAME cat.jpg photos/`,
    `find . -name '*.jpg' -print0 | hasten predict runs/NAME -0 -`.
    """
    refuse_several("predict")
    if not files:
        raise UsageError(
            "no files to predict for: give image files, folders, or - for paths on standard input"
            " (hasten predict CKPT FILE…)"
        )
    if null and "-" not in files:
        raise UsageError("-0 is for paths on standard input: give - among the files")
    listed = options.standard_input() if "-" in files else None

    from hasten.vision import predicting
    from hasten.vision.classify import check_count

    workers = options.worker_count(num_workers)
    wanted = _TOP if top is None else top
    check_count(wanted, "--top")
    check_count(batch_size, "--batch-size")
    warn = options.teller(sys.stderr)
    classifier = options.ModelOptions(
        **{key: context.params[key] for key in options.ModelOptions.__dataclass_fields__}
    ).load(checkpoint, warn)
    known = len(classifier.classes)
    if top is not None and top > known:
        warn(f"--top {top}: the model knows {known} classes; all of them are given")
    answers = predicting.predict(
        classifier,
        predicting.expand(files, listed=listed, null=null),
        top=wanted,
        batch_size=batch_size,
        num_workers=workers,
    )
    say = options.teller(sys.stdout)
    predictions: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for answer in answers:
        name = options.json_name(answer.file)
        if answer.problem is not None:
            skipped.append({"file": name, "reason": answer.problem})
            warn(f"skipped {_line(answer)}")
        elif json:
            predictions.append({"file": name, "top": [guess.to_json() for guess in answer.top]})
        else:
            say(_line(answer))
    if json:
        print_json(
            {
                "checkpoint": options.json_name(str(classifier.path)),
                "predictions": predictions,
                "skipped": skipped,
            }
        )
    if skipped:
        files_text = "1 file" if len(skipped) == 1 else f"{len(skipped):,} files"
        warn(f"{files_text} could not be used")
        raise typer.Exit(1)


def _line(answer: Answer) -> str:
    from hasten.vision.file_names import show

    if answer.problem is not None:
        return f"{show(answer.file)}: {answer.problem}"
    guesses = ", ".join(f"{show(guess.label)} {guess.probability:.1%}" for guess in answer.top)
    return f"{show(answer.file)}  {guesses}"
