"""Running a comparison: each trial of a grid in turn, kept as it ends, gone on with later."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from hasten import devices
from hasten.devices import runtime
from hasten.errors import HastenError, Interrupted, UsageError
from hasten.vision import models, recipe
from hasten.vision.compared import Comparison, Epoch, Measured, rows_of
from hasten.vision.data import ImageData
from hasten.vision.data.image_data import from_tensors
from hasten.vision.grid import Grid, Trial, option
from hasten.vision.kept_rows import KeptRows, Machine
from hasten.vision.recipe import Surroundings
from hasten.vision.settings import TrainSettings

RunOne = Callable[[TrainSettings], Measured]
Say = Callable[[str], None]

_DATA_KEPT = 3  # loaded data sets held at a time, for trials that differ in them


def compare(
    grid: Grid,
    folder: Path,
    *,
    say: Say = print,
    announce: Say | None = None,
    fresh: bool = False,
    command: str = "the same command",
    run_one: RunOne | None = None,
) -> Comparison:
    """Train every trial of a grid ``grid.repeat`` times, the first time of all before the second.

    Each run's measurement is in ``folder`` as soon as it ends, so that a call that was stopped
    goes on where it was. A run that failed before is tried again.

    Args:
        grid: what to compare.
        folder: made if it is not there.
        say: told what is compared and what was left out, and a line when a run has ended.
        announce: told a line when a run begins.
        fresh: forget what the folder holds of an earlier comparison.
        command: how to go on, told when it is stopped.
        run_one: trains with settings and measures; tests have their own.

    Raises:
        UsageError: the folder holds another grid, or measurements of another machine; a model or
            a data set cannot be used.
        DeviceUnavailable: none of the devices is here.
        DataError: the data is missing or broken.
        Interrupted: Ctrl-C or SIGTERM; says how to go on.
        HastenError: the folder cannot be written.
    """
    trials, left_out = grid.trials()
    with KeptRows(folder, grid, _machine(trials), command=command, fresh=fresh) as kept:
        say(f"Comparison: {folder}, {grid.extent}")
        for item in left_out:
            say(f"Left out {item.device}: {item.reason}")
        session = _Session(trials, grid.repeat, kept, say, announce)
        try:
            session.go(run_one or Runner(say, save=grid.saves).prepared(session.wanted()))
        except (KeyboardInterrupt, Interrupted) as stop:
            _stopped(stop, session, folder, command)
        runs = {t.number: kept.measured(t.settings, grid.repeat) for t in trials}
    return Comparison(
        rows=rows_of(trials, runs, session.failed),
        left_out=tuple(left_out),
        varying=grid.varying,
        folder=folder,
        ran=session.ran,
    )


class _Session:
    """The runs of one call."""

    def __init__(
        self,
        trials: Sequence[Trial],
        repeat: int,
        kept: KeptRows,
        say: Say,
        announce: Say | None,
    ) -> None:
        self.ran = 0
        self.failed: dict[int, str] = {}
        self.total = len(trials) * repeat
        self._trials, self._repeat, self._kept = trials, repeat, kept
        self._say, self._announce = say, announce

    def wanted(self) -> list[Trial]:
        """Trials with a run that is not there yet."""
        repeats = range(1, self._repeat + 1)
        return [t for t in self._trials if any(not self._kept.has(t.settings, r) for r in repeats)]

    @property
    def done(self) -> int:
        """Runs that are there."""
        return sum(len(self._kept.measured(t.settings, self._repeat)) for t in self._trials)

    def go(self, run_one: RunOne) -> None:
        place = 0
        for repeat in range(1, self._repeat + 1):
            for trial in self._trials:
                place += 1
                # What failed once would likely fail again, and cost its time again.
                if trial.number in self.failed or self._kept.has(trial.settings, repeat):
                    continue
                name = f"[{place}/{self.total}] {trial.label}"
                if self._announce is not None:
                    self._announce(f"{name} ...")
                self._say(f"{name}: {self._run(trial, repeat, run_one)}")

    def _run(self, trial: Trial, repeat: int, run_one: RunOne) -> str:
        try:
            measured = run_one(trial.settings)
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - a model's own code may raise anything; kept, told
            reason = _reason(error)
        else:
            self._kept.add(trial.settings, repeat, measured)
            self.ran += 1
            speed = f"{measured.images_per_s:,.0f} images/s"
            accuracy = measured.epochs[-1].accuracy
            return speed if accuracy is None else f"{speed}, {100 * accuracy:.1f} %"
        self._kept.add_failure(trial.settings, repeat, reason)
        self.failed[trial.number] = reason
        # Only now is the error, whose frames held the run's tensors, gone.
        _release(trial.settings)
        return f"failed: {reason.splitlines()[0]}"


class Runner:
    """Trains with settings, silently, and measures; data is loaded once for the trials that share
    it, and each device is warmed up before its first run.

    Args:
        say: told what loading the data has to tell.
        save: whether the runs save checkpoints, in a folder that is removed after each.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        say: Say = print,
        *,
        save: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._say, self._save, self._clock = say, save, clock
        self._data: OrderedDict[tuple[Any, ...], ImageData] = OrderedDict()
        self._warm: set[str] = set()

    def prepared(self, trials: Sequence[Trial]) -> Runner:
        """Load the data and build each model once, so that what cannot be is said before anything
        is trained.

        Raises:
            UsageError: a model or a data set cannot be used.
            DataError: the data is missing or broken.
        """
        checked = set()
        for trial in trials:
            settings = trial.settings
            key = (settings.model, *_data_key(settings))
            if key in checked:
                continue
            checked.add(key)
            data = self._load(settings)
            channels, size, _ = data.shape
            try:
                models.create(
                    settings.model,
                    classes=len(data.classes),
                    channels=channels,
                    image_size=size,
                )
            except UsageError as error:
                raise UsageError(f"{option('model')} {settings.model}: {error}") from error
        return self

    def __call__(self, settings: TrainSettings) -> Measured:
        """Train once.

        Raises:
            HastenError: of any kind that training raises.
        """
        data = self._load(settings)
        self._warm_up(settings.device)
        if settings.compile:
            # Models of earlier trials are in the compiler's caches; past a few of them it would
            # go on uncompiled without a word.
            torch.compiler.reset()
        try:
            with tempfile.TemporaryDirectory(prefix="hasten-compare-") as scratch:
                folder = Path(scratch) / "run" if self._save else None
                around = Surroundings(folder=folder, progress="off", say=_quiet)
                begin = self._clock()
                trained = recipe.train(settings, around, data)
                seconds = self._clock() - begin
            return measured(trained, seconds)
        finally:
            _release(settings)

    def _load(self, settings: TrainSettings) -> ImageData:
        key = _data_key(settings)
        if key not in self._data:
            self._data[key] = recipe.load_data(settings, self._say)
            self._say(f"Data: {self._data[key].describe()}")
            if len(self._data) > _DATA_KEPT:
                self._data.popitem(last=False)
        self._data.move_to_end(key)
        return self._data[key]

    def _warm_up(self, device: str) -> None:
        """Train a moment on random images, so that the first trial on a device does not pay for
        what is done once: contexts, libraries, imports."""
        if device in self._warm:
            return
        self._warm.add(device)
        images = torch.randint(0, 256, (64, 1, 16, 16), dtype=torch.uint8)
        part = (images, torch.arange(64) % 2)
        data = from_tensors("warm-up", part, part, classes=("0", "1"), augment=[], image_size=None)
        settings = TrainSettings(
            device=device, epochs=1, batch_size=16, precision="float32", channels_last="off"
        )
        with suppress(HastenError):  # a device that fails here fails in the trial, which tells
            recipe.train(settings, Surroundings(progress="off", say=_quiet), data)


def measured(trained: recipe.Trained, seconds: float) -> Measured:
    """The figures of a run that took ``seconds`` in all."""
    result = trained.result
    return Measured(
        epochs=tuple(
            Epoch(
                epoch=record.epoch,
                loss=record.loss,
                val_loss=record.val_loss,
                accuracy=record.val_accuracy,
                seconds=record.seconds,
                images_per_s=record.images_per_s,
            )
            for record in result.history
        ),
        run_seconds=seconds,
        precision=result.precision.name,
        channels_last=result.precision.channels_last,
        batch_size=trained.batch_size,
        feed=result.feed,
        train_images=sum(trained.data.train_counts),
        val_images=sum(trained.data.val_counts),
        saturation=result.saturation,
        peak_memory_bytes=max(
            (r.peak_memory_bytes for r in result.history if r.peak_memory_bytes), default=None
        ),
    )


def _machine(trials: Sequence[Trial]) -> Machine:
    names = dict.fromkeys(trial.settings.device for trial in trials)
    return Machine(
        torch=torch.__version__,
        cores=runtime.cores(),
        devices={name: runtime.name(devices.device(name)) for name in names},
    )


def _data_key(settings: TrainSettings) -> tuple[Any, ...]:
    """What loading the data depends on."""
    return (
        settings.data,
        settings.data_dir,
        settings.image_size,
        settings.val_fraction,
        settings.augment,
        settings.cache,
        settings.cache_bytes,
        settings.seed,
    )


def _release(settings: TrainSettings) -> None:
    """Give back the memory of a run that ended, so that the next one has all of it."""
    gc.collect()
    runtime.empty_cache(devices.device(settings.device))


def _stopped(stop: BaseException, session: _Session, folder: Path, command: str) -> NoReturn:
    text = (
        f"stopped; {session.done} of {session.total} runs are done and kept in {folder}\n"
        f"Go on with: {command}"
    )
    if isinstance(stop, Interrupted):
        raise Interrupted(text, stop.signal_number) from stop
    raise Interrupted(text) from stop


def _reason(error: Exception) -> str:
    """Why a run failed; hasten's own messages stand alone, others need their kind before them."""
    text, kind = str(error).strip(), type(error).__name__
    if not text:
        return kind
    return text if isinstance(error, HastenError) else f"{kind}: {text}"


def _quiet(text: str) -> None:
    """Say nothing."""
