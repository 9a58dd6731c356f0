"""A power cut for chaos.py: what a run had not flushed to the disk when it was killed is lost.

A killed process leaves all that it wrote to the system, so that kill -9 cannot tell whether a file
was flushed before it was renamed into its place. Here each process notes what it flushes, makes and
renames; when all are dead, files not flushed since they were last written to are cut at random or
filled with zeros, and names not flushed with their folder are put back at random: what a disk may
keep of a machine that lost its power.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

_JOURNAL, _LINKS = "journal.jsonl", "replaced"


def note_in(place: Path) -> None:
    """Note from now on what this process does under a folder; called in the process."""
    journal = os.open(place / _JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    links = place / _LINKS
    links.mkdir(exist_ok=True)
    count = [0]

    def write(*entry: Any) -> None:
        os.write(journal, (json.dumps(entry) + "\n").encode())

    def parent_of(path: str) -> int:
        return Path(path).parent.stat().st_ino

    def here(path: Any) -> str | None:
        text = "" if isinstance(path, int) else str(Path(path).absolute())
        return text if text.startswith(f"{place}/") and "/.ranks/" not in text else None

    def fsync(descriptor: int) -> None:
        before = os.fstat(descriptor)
        real_fsync(descriptor)
        write("flushed", before.st_ino, before.st_size, before.st_mtime_ns)

    def moved(real: Any) -> Any:
        def act(source: Any, target: Any, **options: Any) -> None:
            kept, there = None, here(target)
            if there and Path(there).is_file():
                count[0] += 1
                kept = str(links / f"{os.getpid()}-{count[0]}")
                os.link(there, kept)
            real(source, target, **options)
            if there:
                write("moved", parent_of(there), here(source), there, kept)

        return act

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        real_mkdir(path, *rest, **options)
        there = here(path)
        if there:
            write("made", parent_of(there), there)

    real_fsync, real_mkdir = os.fsync, os.mkdir
    os.fsync, os.mkdir = fsync, mkdir
    os.rename, os.replace = moved(os.rename), moved(os.replace)


def cut(place: Path, chance: random.Random) -> None:
    """Lose what was not flushed; when the processes that noted are dead."""
    journal = place / _JOURNAL
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    _lose_contents(place, entries, chance)
    _lose_names(entries, chance)
    journal.unlink()
    shutil.rmtree(place / _LINKS)


def _lose_contents(place: Path, entries: list[Any], chance: random.Random) -> None:
    flushed = {(e[1], e[2], e[3]) for e in entries if e[0] == "flushed"}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        if not path.is_file() or path.parent == place or path.parent.name == _LINKS:
            continue
        if (status.st_ino, status.st_size, status.st_mtime_ns) in flushed or not status.st_size:
            continue
        kept = chance.randrange(status.st_size)
        with path.open("r+b") as file:
            file.truncate(kept)
            if chance.random() < 0.5:  # the size is known, the blocks were not written
                file.truncate(status.st_size)


def _lose_names(entries: list[Any], chance: random.Random) -> None:
    """Undo, from the last one backwards, what may not be on the disk yet."""
    loose: list[Any] = []
    for entry in entries:
        if entry[0] == "flushed":  # of a folder: it makes the names in it last
            loose = [each for each in loose if each[1] != entry[1]]
        else:
            loose.append(entry)
    for kind, _, source, *rest in reversed(loose[chance.randint(0, len(loose)) :]):
        if kind == "made":
            shutil.rmtree(source, ignore_errors=True)
            continue
        target, kept = rest
        if source is None or os.path.lexists(source) or not os.path.lexists(target):
            continue
        Path(target).rename(source)
        if kept is not None and Path(kept).exists():
            os.link(kept, target)
