"""What is known of a trained model beside its weights: classes, sizes, pixels; checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.errors import CheckpointError, UsageError
from hasten.train.precision import Precision
from hasten.vision import models, transforms
from hasten.vision.data import BUILT_IN, Preparation
from hasten.vision.file_names import show
from hasten.vision.models.external import names_a_file
from hasten.vision.transforms import Normalize, Transform

_NAMES_LIMIT_BYTES = 1 << 24  # of a file of class names
_CUT_FROM = 128  # pixels


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a person says of a model; needed where the weights come without it.

    Raises:
        UsageError: mean and std do not go together.
    """

    model: str | None = None
    """A model's name; also the permission to run ``path/to/file.py:factory`` again."""
    classes: int | str | Path | Sequence[str] | None = None
    """How many, their names, or a text file with one name a line."""
    image_size: int | None = None
    """Side of the images, in pixels."""
    channels: int | None = None
    """3 for RGB (also None), 1 for grey."""
    mean: Sequence[float] | None = None
    """That was subtracted in training, a channel, of pixels scaled to 0..1; None is 0."""
    std: Sequence[float] | None = None
    """That was divided by in training, a channel; None is 1."""
    trust: bool = False
    """Whether a file of ``torch.save`` may run whatever program it holds."""

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError("--mean and --std go together: give both or neither")

    def told(self) -> list[str]:
        """Options given that describe weights (all but ``--model``)."""
        names = ("classes", "image_size", "channels", "mean", "std")
        return [_option(name) for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is needed beside the weights to use a model."""

    architecture: dict[str, Any]
    """From :func:`hasten.vision.models.describe`."""
    classes: tuple[str, ...]
    preparation: Preparation
    """From image files to uint8 [C, S, S]."""
    transform: Transform
    """From uint8 batches to what the model takes."""
    precision: Precision | None = None
    """As it was trained; None where that is not known."""
    device: str | None = None
    """On which it was trained."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the training; empty where they are not known."""


def from_config(
    config: Mapping[str, Any], *, precision: object, device: object, source: str
) -> Facts:
    """What ``hasten train`` keeps in checkpoints and in ``config.json``, checked.

    Args:
        config: as the recipe wrote it, read from JSON that nobody vouches for.
        precision: JSON of a :class:`Precision`, or None.
        device: its name, or None.
        source: the file, for messages.

    Raises:
        CheckpointError: something in it is missing or of the wrong form.
    """
    try:
        classes = config["classes"]
        architecture = dict(config["architecture"])
        channels, height, width = config["shape"]
        settings = config.get("settings", {})
        if not (isinstance(classes, list) and classes and all(isinstance(c, str) for c in classes)):
            raise TypeError(f"its classes are {classes!r:.100}")
        if len(set(classes)) != len(classes):
            raise TypeError("two of its classes have the same name")
        if not isinstance(settings, dict):
            raise TypeError(f"its settings are {settings!r:.100}")
        sizes = {"classes": len(classes), "channels": channels, "image_size": height}
        if height != width or any(architecture.get(key) != size for key, size in sizes.items()):
            raise TypeError(f"its model {architecture!r:.200} does not fit its classes and shape")
        kept = config.get("preparation")
        return Facts(
            architecture=architecture,
            classes=tuple(classes),
            preparation=_preparation(kept, height, channels, settings.get("data")),
            transform=transforms.from_config(config["transform"]),
            precision=Precision.from_json(precision) if isinstance(precision, dict) else None,
            device=device if isinstance(device, str) else None,
            settings=settings,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except KeyError as error:
        raise CheckpointError(
            f"{source} says nothing of the model's {error.args[0]}; use another copy"
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source} describes its model wrongly: {error}") from error


def from_given(given: Given, source: str) -> Facts:
    """What a person says of weights that come alone.

    Raises:
        UsageError: not enough was said, or it cannot be.
    """
    needed = ("model", "classes", "image_size")
    missing = [_option(name) for name in needed if getattr(given, name) is None]
    if missing:
        raise UsageError(
            f"{source} holds weights and nothing of the model they are for: give"
            f" {', '.join(missing)} too (--model NAME, --classes a number or a file of names,"
            " --image-size PIXELS; --channels 1 for grey images; --mean and --std if the training"
            " normalised), or give the run's folder that it came from"
        )
    assert given.model is not None and given.image_size is not None  # just looked at
    preparation = Preparation(
        size=given.image_size, channels=3 if given.channels is None else given.channels
    )
    classes = class_names(given.classes)
    mean, std = given.mean or (0.0,), given.std or (1.0,)
    if given.mean is None or given.std is None:
        mean, std = (0.0,) * preparation.channels, (1.0,) * preparation.channels
    if len(mean) != preparation.channels:
        raise UsageError(
            f"--mean has {len(mean)} values and the images {preparation.channels} channels"
        )
    return Facts(
        architecture=models.describe(
            given.model,
            classes=len(classes),
            channels=preparation.channels,
            image_size=preparation.size,
        ),
        classes=classes,
        preparation=preparation,
        transform=Normalize(mean, std),
    )


def allowed_file(facts: Facts, given: Given, source: str) -> str | None:
    """The file that a person lets the model be built from, after a look at what they gave.

    Raises:
        UsageError: they gave what the checkpoint says itself.
    """
    name = facts.architecture.get("name")
    if given.told():
        raise UsageError(
            f"{source} brings its own classes, sizes and pixels: leave out"
            f" {', '.join(given.told())}"
        )
    if given.model is not None and names_a_file(str(name)):
        return given.model
    if given.model is not None and given.model != name:
        raise UsageError(f"{source} holds the model {name}: leave out --model {given.model}")
    return None


def class_names(classes: int | str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """Names of classes from their number ("0", "1", …), a file of names, or names.

    Raises:
        UsageError: there are none, two are the same, or the file cannot be read.
    """
    if isinstance(classes, str) and classes.strip().isdecimal():
        classes = int(classes)
    if isinstance(classes, int):
        if not 1 <= classes <= 1_000_000:
            raise UsageError(f"--classes is {classes}: a number from 1 up, or a file of names")
        return tuple(map(str, range(classes)))
    if isinstance(classes, (str, Path)):
        names, where = _names_in(Path(classes)), f"{show(classes)} "
    else:
        names, where = list(classes or ()), ""
    if not names:
        raise UsageError(f"{where or 'the list of classes '}names no class; write one name a line")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{where}names the class {show(twice)} twice")
    return tuple(names)


def _preparation(kept: Any, size: int, channels: int, data: object) -> Preparation:
    if kept is not None:
        return Preparation.from_config(kept)
    # Runs whose config does not have it: large images of folders were cut as it says here.
    cut = data not in BUILT_IN and size >= _CUT_FROM
    return Preparation(size=size, channels=channels, crop_fraction=0.875 if cut else 1.0)


def _names_in(path: Path) -> list[str]:
    try:
        if not path.is_file():
            raise UsageError(
                f"--classes {show(path)}: there is no such file; give a number of classes, or a"
                " text file with one name a line"
            )
        with path.open("rb") as file:
            text = file.read(_NAMES_LIMIT_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--classes {show(path)} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--classes {show(path)} is no text in UTF-8; write one name a line"
        ) from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
