"""What a comparison came to: measurements of runs, a row for each trial, and what they say."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.vision.grid import LeftOut, Trial

Spread = tuple[float, float]

_LEAST_DROP = 0.005  # of accuracy, that matters at all
_SURE = 2.5  # standard errors of the difference


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of a run, or of a trial: the medians over its runs."""

    epoch: int
    """Counted from 1."""
    loss: float
    """Mean training loss over the epoch's samples."""
    val_loss: float | None
    """Mean over the validation samples."""
    accuracy: float | None
    """Of the validation samples, 0 to 1."""
    seconds: float
    """Of the epoch's training, without validation."""
    images_per_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run measured."""

    epochs: tuple[Epoch, ...]
    """At least one."""
    run_seconds: float
    """Wall time of the whole run: building the model, starting workers, all epochs, validation;
    not loading the data."""
    precision: str
    """That was computed at, also where ``auto`` chose it."""
    channels_last: bool
    batch_size: int
    """Samples at once."""
    feed: str
    """How samples became batches, and why."""
    train_images: int
    val_images: int
    saturation: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def steady(self) -> tuple[Epoch, ...]:
        """The epochs that speed is taken from: all but the first, which starts workers and warms
        caches up; or that one where there is no other."""
        return self.epochs[1:] or self.epochs

    @property
    def epoch_seconds(self) -> float:
        """Median over the steady epochs."""
        return statistics.median(epoch.seconds for epoch in self.steady)

    @property
    def images_per_s(self) -> float:
        """Median over the steady epochs."""
        return statistics.median(epoch.images_per_s for epoch in self.steady)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, but for numbers that are not finite."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Measured:
        """What :meth:`to_json` gave; fields that this version does not know are passed over.

        Raises:
            TypeError: a field is missing.
            KeyError: there are no epochs.
        """
        names = {field.name for field in dataclasses.fields(Measured)}
        kept = {key: value for key, value in content.items() if key in names}
        epochs = [{**epoch, "loss": _number(epoch["loss"])} for epoch in content["epochs"]]
        return Measured(**{**kept, "epochs": tuple(Epoch(**epoch) for epoch in epochs)})


@dataclass(frozen=True, kw_only=True)
class Row:
    """A trial and its runs."""

    trial: Trial
    runs: tuple[Measured, ...]
    """Those that succeeded, in the order of the repeats."""
    failed: str | None = None
    """Why a run of this trial failed."""
    ratio: float | None = None
    """Images a second over those of the first row that has any."""

    @property
    def number(self) -> int:
        """The trial's."""
        return self.trial.number

    @property
    def images_per_s(self) -> float:
        """Median over the runs; NaN without one."""
        return self._median(lambda run: run.images_per_s)

    @property
    def epoch_seconds(self) -> float:
        """Of training in an epoch, median over the runs; NaN without one."""
        return self._median(lambda run: run.epoch_seconds)

    @property
    def run_seconds(self) -> float:
        """Of a whole run, median over the runs; NaN without one."""
        return self._median(lambda run: run.run_seconds)

    @property
    def loss(self) -> float:
        """Mean training loss of the last epoch, median over the runs; NaN without one."""
        return self._median(lambda run: run.epochs[-1].loss)

    @property
    def accuracy(self) -> float | None:
        """After the last epoch, 0 to 1, median over the runs."""
        known = [e for run in self.runs if (e := run.epochs[-1].accuracy) is not None]
        return statistics.median(known) if known else None

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Each epoch: the medians over the runs."""
        return tuple(_middle(same) for same in zip(*(run.epochs for run in self.runs), strict=True))

    @property
    def precision(self) -> str:
        """What was computed at; all of them where ``auto`` did not choose alike each time."""
        return (
            _each(r.precision + (", channels last" if r.channels_last else "") for r in self.runs)
            or self.trial.settings.precision
        )

    @property
    def batch_size(self) -> int | str:
        """Samples at once: the median over the runs where ``auto`` chose them."""
        sizes = [run.batch_size for run in self.runs]
        return statistics.median_high(sizes) if sizes else self.trial.settings.batch_size

    def spread(self, of: Callable[[Measured], float | None]) -> Spread | None:
        """Smallest and largest over the runs; None with fewer than two."""
        known = [value for run in self.runs if (value := of(run)) is not None]
        return (min(known), max(known)) if len(known) > 1 else None

    @property
    def speed_spread(self) -> Spread | None:
        """Of images a second."""
        return self.spread(lambda run: run.images_per_s)

    def to_json(self) -> dict[str, Any]:
        """The row for machines: the settings with what was chosen for ``auto``, the figures, and
        under ``settings`` what was asked for."""
        settings = dataclasses.asdict(self.trial.settings)
        chosen: dict[str, Any] = {}
        if self.runs:
            chosen = {
                "precision": _each(run.precision for run in self.runs),
                "channels_last": _each("on" if run.channels_last else "off" for run in self.runs),
                "batch_size": self.batch_size,
            }
        figures: dict[str, Callable[[Measured], float | None]] = {
            "epoch_seconds": lambda run: run.epoch_seconds,
            "run_seconds": lambda run: run.run_seconds,
            "images_per_s": lambda run: run.images_per_s,
            "loss": lambda run: run.epochs[-1].loss,
            "accuracy": lambda run: run.epochs[-1].accuracy,
        }
        return {
            "run": self.number,
            **settings,
            **chosen,
            "epoch_seconds": self.epoch_seconds,
            "run_seconds": self.run_seconds,
            "images_per_s": self.images_per_s,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "ratio": self.ratio,
            "spread": {name: self.spread(of) for name, of in figures.items()},
            "repeats": len(self.runs),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
            "feed": self.runs[-1].feed if self.runs else None,
            "peak_memory_bytes": max(
                (run.peak_memory_bytes for run in self.runs if run.peak_memory_bytes), default=None
            ),
            "failed": self.failed,
            "settings": settings,
        }

    def _median(self, of: Callable[[Measured], float]) -> float:
        return statistics.median(map(of, self.runs)) if self.runs else math.nan


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, in the order of the grid."""

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    varying: tuple[str, ...]
    folder: Path
    ran: int
    """Runs of this session; the others were there already."""

    @property
    def first(self) -> Row | None:
        """The first row with figures: what the others are compared with."""
        return next((row for row in self.rows if row.runs), None)

    @property
    def fastest(self) -> Row | None:
        """The row with the most images a second."""
        return _fastest(self.rows)

    @property
    def best(self) -> Row | None:
        """The fastest row that does not learn clearly less than the first."""
        return _fastest([row for row in self.rows if not learns_less(row, self.first)])

    @property
    def failed(self) -> tuple[Row, ...]:
        """Rows of which a run failed."""
        return tuple(row for row in self.rows if row.failed is not None)

    def sorted(self, *, fastest_first: bool) -> tuple[Row, ...]:
        """The rows in the order of the grid, or by speed with those that failed last."""
        if not fastest_first:
            return self.rows
        return tuple(sorted(self.rows, key=lambda row: -row.images_per_s if row.runs else math.inf))

    def to_json(self, *, fastest_first: bool = False) -> dict[str, Any]:
        """For machines."""
        return {
            "rows": [row.to_json() for row in self.sorted(fastest_first=fastest_first)],
            "best": self.best.to_json() if self.best else None,
            "left_out": [item.to_json() for item in self.left_out],
            "folder": str(self.folder),
        }


def rows_of(
    trials: Sequence[Trial],
    runs: Mapping[int, Sequence[Measured]],
    failed: Mapping[int, str],
) -> tuple[Row, ...]:
    """A row for each trial, with its ratio to the first that has figures.

    Args:
        trials: in the order of the grid.
        runs: measurements by the trial's number.
        failed: reasons by the trial's number.
    """
    rows = [
        Row(trial=t, runs=tuple(runs.get(t.number, ())), failed=failed.get(t.number))
        for t in trials
    ]
    first = next((row.images_per_s for row in rows if row.runs), math.nan)
    return tuple(
        dataclasses.replace(row, ratio=row.images_per_s / first if row.runs and first else None)
        for row in rows
    )


def learns_less(row: Row, first: Row | None) -> bool:
    """Whether a row's accuracy is below the first's by more than chance on as many images."""
    if first is None or not row.runs or row.accuracy is None or first.accuracy is None:
        return False
    variance = sum(
        r.accuracy * (1 - r.accuracy) / max(r.runs[-1].val_images, 1)
        for r in (row, first)
        if r.accuracy is not None
    )
    return first.accuracy - row.accuracy > max(_LEAST_DROP, _SURE * math.sqrt(variance))


def as_fast(row: Row, fastest: Row) -> bool:
    """Whether a row's spread reaches into the fastest's: which is faster is then not settled."""
    mine, its = row.speed_spread, fastest.speed_spread
    return mine is not None and its is not None and mine[1] >= its[0]


def _fastest(rows: Sequence[Row]) -> Row | None:
    return max((row for row in rows if row.runs), key=lambda row: row.images_per_s, default=None)


def _middle(same: Sequence[Epoch]) -> Epoch:
    def median(of: Callable[[Epoch], float | None]) -> float | None:
        known = [value for epoch in same if (value := of(epoch)) is not None]
        return statistics.median(known) if known else None

    return Epoch(
        epoch=same[0].epoch,
        loss=median(lambda e: e.loss) or 0.0,
        val_loss=median(lambda e: e.val_loss),
        accuracy=median(lambda e: e.accuracy),
        seconds=median(lambda e: e.seconds) or 0.0,
        images_per_s=median(lambda e: e.images_per_s) or 0.0,
    )


def _each(words: Iterable[str]) -> str:
    """Each different word once."""
    return " / ".join(dict.fromkeys(words))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
