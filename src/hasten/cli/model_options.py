"""Options of the commands that use a trained model, and loading it as they say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from hasten.cli.train import number_or_auto
from hasten.errors import UsageError

if TYPE_CHECKING:
    from hasten.vision.classify import Classifier

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A run's folder, one checkpoint's folder, or a file of weights.",
        show_default=False,
    ),
]
Which = Annotated[
    str | None, typer.Option(help="Of a run's checkpoints: best or last.  [best]", metavar="WHICH")
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu … (default: auto, or HASTEN_DEVICE)")
]
PrecisionName = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: as trained if the device does it well, else"
        " float32."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="For weights alone: the model they are for. A model made by path/to/file.py:factory"
        " needs it each time, as a checkpoint never runs code by itself.",
        show_default=False,
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(help="For weights alone: how many classes, or a file with one name a line."),
]
ImageSize = Annotated[
    int | None, typer.Option(help="For weights alone: side of the images in pixels.")
]
Channels = Annotated[
    int | None, typer.Option(help="For weights alone: 3 for RGB, 1 for grey.  [3]")
]
Mean = Annotated[
    str | None,
    typer.Option(help="For weights alone: mean of each channel in training, as 0.48,0.46,0.41."),
]
Std = Annotated[
    str | None, typer.Option(help="For weights alone: deviation of each channel in training.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Load a file of torch.save that holds more than weights, by running whatever program"
        " it contains: only for files of your own.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options above, as given."""

    which: str | None
    device: str
    precision: str
    model: str | None
    classes: str | None
    image_size: int | None
    channels: int | None
    mean: str | None
    std: str | None
    trust: bool

    def load(self, checkpoint: str, say: Callable[[str], None]) -> Classifier:
        """Load what the options say, telling which checkpoint and device it is.

        Raises:
            HastenError: as :func:`hasten.vision.classify.load`.
        """
        from hasten.devices import runtime
        from hasten.vision.classify import load
        from hasten.vision.facts import Given
        from hasten.vision.file_names import show

        given = Given(
            model=self.model,
            classes=self.classes,
            image_size=self.image_size,
            channels=self.channels,
            mean=_numbers(self.mean, "--mean"),
            std=_numbers(self.std, "--std"),
            trust=self.trust,
        )
        if self.trust:
            say(
                f"--trust: whatever program {show(checkpoint)} contains is run, with all that you"
                " may do on this machine"
            )
        classifier = load(
            checkpoint, self.device, which=self.which, precision=self.precision, given=given
        )
        say(f"Checkpoint: {show(classifier.path)} ({classifier.about})")
        for note in classifier.notes:
            say(note)
        device = classifier.device
        say(f"Using device: {device} ({runtime.name(device)}), {classifier.precision}")
        return classifier


def worker_count(text: str) -> int | str:
    """What ``--num-workers`` says.

    Raises:
        UsageError: it is neither a whole number from 0 up nor ``auto``.
    """
    workers = number_or_auto(text, "--num-workers")
    if isinstance(workers, int) and workers < 0:
        raise UsageError(f"--num-workers is {workers}: a whole number from 0 up, or auto")
    return workers


def teller(stream: TextIO) -> Callable[[str], None]:
    """A function that prints a line on a stream, with what it cannot encode escaped."""

    def say(text: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)

    return say


def json_name(path: str) -> str:
    """A path as JSON can hold it: bytes that are no UTF-8 are shown escaped."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def standard_input() -> Any:
    """Standard input as bytes.

    Raises:
        UsageError: it is closed.
    """
    if sys.stdin is None:
        raise UsageError("- is for paths on standard input, which is closed")
    return sys.stdin.buffer


def _numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} is a number for each channel, as 0.48,0.46,0.41, not {text!r}"
        ) from None
