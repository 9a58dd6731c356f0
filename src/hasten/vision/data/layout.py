"""Which folders are classes and which files are in them; no file is opened here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hasten.errors import DataError, UsageError
from hasten.vision.file_names import label, show

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test")
"""The first that is there is used."""

SUFFIXES = frozenset(
    {".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe"}
    | {".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
)
"""Names that promise an image: a file of such a name that holds none is reported."""

_PASSED_OVER = frozenset({"__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini"})
_ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
_NAMED = 5

Identity = tuple[int, int]


@dataclass(kw_only=True)
class Part:
    """The files of one part of the data, by class."""

    folder: str
    files: list[str] = field(default_factory=list)
    """Paths from the root, by class and then by name."""
    labels: list[int] = field(default_factory=list)
    """Of each file: its place in ``Layout.classes``."""
    dead_links: list[str] = field(default_factory=list)
    """Symbolic links that lead nowhere, as paths from the root."""


@dataclass(kw_only=True)
class Layout:
    """What a folder of images holds."""

    root: Path
    classes: tuple[str, ...]
    train: Part
    val: Part | None
    """None where the data is not parted."""
    notes: list[str] = field(default_factory=list)
    """What was passed over and should be known, a line of text each."""


def promises_image(path: str) -> bool:
    """Whether the name of a file says that it is an image."""
    return os.path.splitext(path)[1].lower() in SUFFIXES  # noqa: PTH122 - a million of them


def find_layout(root: str | Path) -> Layout:
    """Find the parts, the classes and the files of a folder of images.

    Raises:
        UsageError: it is not a folder.
        DataError: its folders are not one a class, or cannot be read.
    """
    root = Path(root)
    check_folder(root)
    walk = _Walk(root)
    train, val = _parts(walk)
    classes = _class_folders(walk, train)
    if len(classes) == 1:
        raise DataError(
            f"{walk.show(train)} has images of one class only, {next(iter(classes))!r}; a "
            "classifier needs two or more, each in its own sub-folder"
        )
    val_classes = {} if val is None else _class_folders(walk, val)
    if val is not None:
        _check_agreement(walk, (train, classes), (val, val_classes))
    walk.claim([train, *([] if val is None else [val]), *classes.values(), *val_classes.values()])
    return Layout(
        root=root,
        classes=tuple(classes),
        train=walk.part(train, classes),
        val=None if val is None else walk.part(val, {name: val_classes[name] for name in classes}),
        notes=walk.notes,
    )


def find_labelled(root: str | Path, classes: tuple[str, ...]) -> Layout:
    """Find images of known classes, to measure a trained model with.

    Of a folder with ``train/`` and ``val/`` these are the ``val/`` images, else all of them. Its
    classes may be some of the known ones only.

    Raises:
        UsageError: it is not a folder.
        DataError: it has a class that is not known, or its folders cannot be read.
    """
    root = Path(root)
    check_folder(root)
    walk = _Walk(root)
    train, val = _parts(walk)
    part = train if val is None else val
    found = _class_folders(walk, part)
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"{walk.show(part)} has classes that the model does not know: {listed(unknown)}; it "
            f"knows {listed(classes)}"
        )
    walk.claim([part, *found.values()])
    known = {name: found[name] for name in classes if name in found}
    images = walk.part(part, known)
    places = [classes.index(name) for name in known]
    images.labels = [places[each] for each in images.labels]
    return Layout(root=root, classes=classes, train=images, val=None, notes=walk.notes)


def check_folder(root: Path) -> None:
    """Refuse what is no folder.

    Raises:
        UsageError: it is absent or a file.
    """
    if root.is_dir():
        return
    if not os.path.lexists(root):
        raise UsageError(f"there is no folder {show(root)}")
    remedy = "give a folder with one sub-folder a class"
    if root.suffix.lower() in _ARCHIVES:
        remedy = "unpack it, and give the folder"
    raise UsageError(f"{show(root)} is not a folder; {remedy}")


def listed(names: Iterable[str]) -> str:
    """The first few of the names, for a message."""
    names = [show(each) for each in names]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _parts(walk: _Walk) -> tuple[str, str | None]:
    """Folders, from the root, of the training and the validation images; "" is the root."""
    by_name = {each.lower(): each for each in reversed(walk.folders(""))}
    train = next((by_name[name] for name in TRAIN_NAMES if name in by_name), None)
    vals = [by_name[name] for name in VAL_NAMES if name in by_name]
    others = set(by_name.values()) - {train, *vals}
    if train is None or not walk.folders(train):
        if (train or vals) and not others and not any(map(walk.folders, vals)):
            raise DataError(
                f"{walk.show(train or vals[0])} has no sub-folders; it needs one for each class, "
                "with the images of that class in it"
            )
        return "", None
    val = next(filter(walk.folders, vals), None)
    if val is None and others:
        return "", None  # "train" is a class among others
    unused = sorted({*others, *vals} - {val})
    if unused:
        walk.notes.append(f"left out beside {show(train)}: {listed(unused)}")
    return train, val


def _class_folders(walk: _Walk, part: str) -> dict[str, str]:
    """Folder, from the root, of each class, sorted by the class's name."""
    classes: dict[str, str] = {}
    for name in walk.folders(part):
        if label(name) in classes:
            raise DataError(f"{walk.show(part)} has two folders for the class {label(name)!r}")
        classes[label(name)] = os.path.join(part, name)  # noqa: PTH118
    if classes:
        return dict(sorted(classes.items()))
    if any(map(promises_image, walk.files(part))):
        raise DataError(
            f"the images lie directly in {walk.show(part)}; put them into one sub-folder a class: "
            "it is from the folder that an image gets its class"
        )
    raise DataError(f"{walk.show(part)} has no sub-folders; it needs one a class, with images")


def _check_agreement(
    walk: _Walk, train: tuple[str, dict[str, str]], val: tuple[str, dict[str, str]]
) -> None:
    differences = [
        f"only in {walk.show(here[0])}: {listed(sorted(set(here[1]) - set(there[1])))}"
        for here, there in ((train, val), (val, train))
        if set(here[1]) - set(there[1])
    ]
    if differences:
        raise DataError(f"the classes for training and validation differ; {'; '.join(differences)}")


class _Walk:
    """Reads folders, each real one once, whatever symbolic links lead to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notes: list[str] = []
        self._visited = {_identity(root)}

    def show(self, folder: str) -> str:
        return show(self.root / folder)

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        return [each.name for each in self._entries(folder) if _is_folder(each)]

    def files(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted."""
        return [each.name for each in self._entries(folder) if not _is_folder(each)]

    def claim(self, folders: list[str]) -> None:
        """Note folders that must be different ones and that no link may lead into.

        Raises:
            DataError: two of them are the same.
        """
        seen = {_identity(self.root): ""}
        for folder in filter(None, folders):
            same = seen.setdefault(_identity(self.root / folder), folder)
            if same != folder:
                raise DataError(
                    f"{self.show(folder)} and {self.show(same)} are the same folder by a symbolic "
                    "link; its images would be counted twice"
                )
        self._visited |= seen.keys()

    def part(self, folder: str, classes: dict[str, str]) -> Part:
        """The files of a part, by class."""
        part = Part(folder=folder)
        for place, top in enumerate(classes.values()):
            files = sorted(self._below(top, part.dead_links))
            part.files += files
            part.labels += [place] * len(files)
        return part

    def _below(self, top: str, dead_links: list[str]) -> Iterator[str]:
        pending = [top]
        while pending:
            folder = pending.pop()
            for entry in self._entries(folder):
                path = os.path.join(folder, entry.name)  # noqa: PTH118 - a million of them
                try:
                    if entry.is_file():
                        yield path
                    elif entry.is_dir():
                        identity = _identity(self.root / path)
                        if identity in self._visited:
                            self.notes.append(
                                f"{show(path)} leads to a folder that is read already (a "
                                "symbolic-link loop?) and is left out"
                            )
                        else:
                            self._visited.add(identity)
                            pending.append(path)
                    elif entry.is_symlink():
                        dead_links.append(path)
                except OSError:  # a link to itself, or through what may not be read
                    dead_links.append(path)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root / folder) as entries:
                seen = [each for each in entries if not _is_passed_over(each.name)]
        except OSError as error:
            raise DataError(
                f"the folder {self.show(folder)} cannot be read: {error.strerror or error}"
            ) from error
        return sorted(seen, key=lambda each: each.name)


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or name in _PASSED_OVER


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _identity(folder: Path) -> Identity:
    status = folder.stat()
    return status.st_dev, status.st_ino
