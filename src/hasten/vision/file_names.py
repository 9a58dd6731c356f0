"""File names, which are bytes to the system, as text for people, JSON and labels."""

from __future__ import annotations

import unicodedata
from pathlib import Path


def show(path: str | Path) -> str:
    """Return the path as text that any terminal, log and JSON file can hold.

    Names that are not UTF-8, and control characters (which could rewrite the terminal), are
    shown escaped.
    """
    text = str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def label(folder: str | Path) -> str:
    """Name of the class whose images a folder holds.

    macOS stores an accented letter as two characters, others as one; both give one label.
    """
    return unicodedata.normalize("NFC", show(Path(folder).name))
