"""The run's report: one self-contained HTML page, made from plain data.

Nothing is fetched and nothing is run: styles, charts and images are in the file, and the page's
own content security policy forbids the rest.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from hasten.errors import HastenError, UsageError
from hasten.observe import confusion, svg
from hasten.observe.progress import duration_text, rate_text
from hasten.observe.records import EpochRecord, StepRecord, finite
from hasten.observe.verdict import Verdict

NAME = "report.html"
_MOST_STEP_POINTS = 400
_COMPUTE = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class SamplePrediction:
    """One image that the model was shown."""

    png: bytes
    label: str
    """The true class."""
    predicted: str
    probability: float
    """Of the predicted class, 0 to 1."""
    name: str = ""
    """Of the file or the index in the data set."""

    @property
    def right(self) -> bool:
        """Whether the model was right."""
        return self.label == self.predicted


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page shows; what is not known is left out of it."""

    run: str
    """The run's name."""
    model: str
    dataset: str
    device: str
    epochs: Sequence[EpochRecord] = ()
    steps: Sequence[StepRecord] = ()
    planned_epochs: int = 0
    seconds: float = math.nan
    """Of the whole run."""
    images_per_s: float = math.nan
    """Of training."""
    saturation: float | None = None
    val_accuracy: float | None = None
    """Of the model that the run ends with, 0 to 1."""
    val_loss: float | None = None
    parameters: int | None = None
    train_images: int | None = None
    val_images: int | None = None
    classes: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] | None = None
    """``confusion[true][predicted]`` counts validation images."""
    samples: Sequence[SamplePrediction] = ()
    verdict: Verdict | None = None
    feed: str = ""
    """The feed's plan in one line."""
    precision: str = ""
    stopped: str = ""
    """Why the run ended early, if it did: one line."""
    notes: Sequence[str] = ()
    """Lines worth telling: files skipped, checkpoints passed over, what ``auto`` chose."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package to version; that of ``hasten`` is also named at the page's foot."""
    command: str = ""
    """The exact command that makes this run again."""
    resume_command: str = ""
    finished: str = ""
    """Date and time for people."""

    def __post_init__(self) -> None:
        if self.confusion is None:
            return
        size = len(self.classes)
        if len(self.confusion) != size or any(len(row) != size for row in self.confusion):
            raise UsageError(
                f"the confusion matrix of a report must be {size} by {size}, as many as there are "
                f"classes; it has {len(self.confusion)} rows"
            )


def write_report(folder: Path, data: ReportData) -> Path:
    """Write ``report.html`` in a run's folder, whole or not at all.

    A folder that was removed under the run is made again: its training is not lost by that.

    Returns:
        The page's path.

    Raises:
        HastenError: the page cannot be written; the message names it and says why.
    """
    path = Path(folder) / NAME
    temporary = path.with_name(f".{NAME}.{os.getpid()}.tmp")
    page = render(data)
    try:
        try:
            _put(page, temporary, path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            _put(page, temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to show
            temporary.unlink()
        raise HastenError(
            f"cannot write {path}: {error.strerror or error}; "
            "the run's other files are not touched: make room or mend the folder"
        ) from error
    return path


def _put(page: str, temporary: Path, path: Path) -> None:
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def render(data: ReportData) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": _percent,
        "figure": lambda value: f"{value:.4f}" if _known(value) else "–",
        "count": lambda value: f"{value:,}",
        "rate": rate_text,
        "duration": _duration,
        "setting": _setting,
    }
    home = files(__package__)
    page = environment.from_string((home / "report.html.j2").read_text(encoding="utf-8"))
    matrix = data.confusion
    names = list(data.classes)
    return page.render(
        d=data,
        css=Markup((home / "report.css").read_text(encoding="utf-8")),
        maker=f"hasten {data.versions.get('hasten', '')}".strip(),
        loss_chart=Markup(_loss_chart(data)),
        accuracy_chart=Markup(_accuracy_chart(data)),
        time_chart=Markup(_time_chart(data)),
        split=_split(data.epochs),
        metrics=list(dict.fromkeys(name for e in data.epochs for name in e.metrics)),
        matrix=Markup(confusion.picture(matrix, names) if matrix else ""),
        per_class=confusion.per_class(matrix, names) if matrix else [],
        pairs=confusion.worst_pairs(matrix, names, 10) if matrix else [],
        most_classes=confusion.MOST_CLASSES,
        right=[_image(s) for s in data.samples if s.right],
        wrong=[_image(s) for s in data.samples if not s.right],
        best=max(
            (e for e in data.epochs if _known(e.val_accuracy)),
            key=lambda e: e.val_accuracy or 0.0,
            default=None,
        ),
        known=_known,
    )


def _loss_chart(data: ReportData) -> str:
    if not data.epochs and not data.steps:
        return ""
    done = data.epochs[-1] if data.epochs else None
    # Steps and epochs share one axis, in epochs, where a finished epoch tells how long one is.
    scale = done.epoch / done.step if done is not None and done.step > 0 else 1.0
    raw = tuple((s.step * scale, s.loss) for s in _thinned(data.steps))
    train = tuple((e.epoch, e.loss) for e in data.epochs)
    validation = tuple((e.epoch, e.val_loss) for e in data.epochs if e.val_loss is not None)
    series = [
        svg.Series(name="each log point", colour="--s1", points=raw, dots=False),
        svg.Series(name="training", colour="--s1", points=train),
        svg.Series(name="validation", colour="--s2", points=validation),
    ]
    last = f"; training loss ends at {done.loss:.4f}" if done is not None else ""
    return svg.line_chart(
        f"Loss over {len(data.epochs)} epochs{last}",
        [s for s in series if s.points],
        x_label="epoch" if done is not None else "step",
    )


def _accuracy_chart(data: ReportData) -> str:
    points = tuple((e.epoch, e.val_accuracy) for e in data.epochs if e.val_accuracy is not None)
    if not points:
        return ""
    return svg.line_chart(
        f"Validation accuracy over {len(points)} epochs; ends at {points[-1][1]:.2%}",
        [svg.Series(name="validation accuracy", colour="--s2", points=points)],
        x_label="epoch",
        percent=True,
    )


def _parts(record: EpochRecord) -> tuple[float, float, float, float]:
    """Seconds of an epoch: waiting, copying, computing, the rest."""
    spent = {name: s if _known(s) else 0.0 for name, s in record.phases.items()}
    compute = sum(spent.get(name, 0.0) for name in _COMPUTE)
    return spent.get("wait", 0.0), spent.get("copy", 0.0), compute, spent.get("other", 0.0)


_PARTS = (
    ("waiting for data", "--s3"),
    ("copy", "--s4"),
    ("compute", "--s1"),
    ("other", "--muted"),
)


def _time_chart(data: ReportData) -> str:
    timed = [e for e in data.epochs if e.phases]
    if not timed:
        return ""
    groups = svg.grouped(len(timed))
    spent = [_parts(e) for e in timed]
    means = [[sum(spent[i][p] for i in g) / len(g) for p in range(len(_PARTS))] for g in groups]
    names = [
        str(timed[g.start].epoch)
        if len(g) == 1
        else f"{timed[g.start].epoch}–{timed[g.stop - 1].epoch}"
        for g in groups
    ]
    split = ", ".join(f"{name} {share:.0%}" for name, _, share in _split(timed))
    return svg.stacked_bars(
        f"Seconds of each epoch: {split}",
        names,
        [
            svg.Series(
                name=name, colour=colour, points=tuple((i, m[p]) for i, m in enumerate(means))
            )
            for p, (name, colour) in enumerate(_PARTS)
        ],
        x_label="epoch" if len(groups) == len(timed) else "epochs, mean of each group",
    )


def _split(epochs: Sequence[EpochRecord]) -> list[tuple[str, str, float]]:
    """Name, colour and share of each part of the time over all epochs."""
    sums = [sum(part) for part in zip(*map(_parts, epochs), strict=True)]
    whole = sum(sums)
    if not whole > 0:
        return []
    return [(name, colour, s / whole) for (name, colour), s in zip(_PARTS, sums, strict=True)]


def _thinned(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    every = math.ceil(len(steps) / _MOST_STEP_POINTS)
    return steps[::every] if every > 1 else steps


def _image(sample: SamplePrediction) -> dict[str, Any]:
    wide = _png_width(sample.png)
    return {
        "sample": sample,
        "src": "data:image/png;base64," + base64.b64encode(sample.png).decode(),
        # A small image is enlarged with its pixels seen; a photograph is scaled smoothly.
        "pixelated": 0 < wide <= 64,
    }


def _png_width(png: bytes) -> int:
    """Pixels, from the PNG header; 0 where there is none."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or len(png) < 24:
        return 0
    return int(struct.unpack(">I", png[16:20])[0])


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _percent(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}%}" if value is not None and math.isfinite(value) else "–"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if 0 <= seconds < 60 else duration_text(seconds)


def _setting(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_setting(item)}" for key, item in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(_setting(item) for item in value) or "–"
    value = finite(value)
    return "–" if value is None or value == "" else str(value)
