"""The folder of a comparison: its grid, and a line for each run as it ends; for going on later."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hasten.errors import HastenError, UsageError
from hasten.observe.records import finite
from hasten.train.folder import write_json
from hasten.vision.compared import Measured
from hasten.vision.grid import Grid, option, text_of
from hasten.vision.settings import TrainSettings

GRID = "grid.json"
ROWS = "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What measurements must have in common to be compared."""

    torch: str
    """Version."""
    cores: int
    """Of the CPU, that may be used."""
    devices: Mapping[str, str]
    """Name of each device's make, by device."""

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """What another machine (as JSON) has differently; devices that only one has do not count.

        Raises:
            KeyError: ``other`` is no machine.
        """
        found = [
            f"{name} {other[name]} then, {getattr(self, name)} now"
            for name in ("torch", "cores")
            if other[name] != getattr(self, name)
        ]
        return found + [
            f"{device} was {other['devices'][device]}, is {make}"
            for device, make in self.devices.items()
            if other["devices"].get(device, make) != make
        ]


class KeptRows:
    """A comparison's folder, open: ``grid.json`` and ``rows.jsonl``.

    Args:
        folder: made if it is not there.
        grid: must be the one that the folder holds, if it holds any.
        machine: likewise.
        command: that makes this comparison; kept for the reader.
        fresh: forget what the folder holds.

    Raises:
        UsageError: the folder holds another grid, or rows of another machine; the path is a file.
        HastenError: the folder cannot be read or written.
    """

    def __init__(
        self, folder: Path, grid: Grid, machine: Machine, *, command: str, fresh: bool
    ) -> None:
        self.folder = folder
        self._measured: dict[tuple[str, int], Measured] = {}
        self._file: FileIO | None = None
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; a comparison needs a folder: give another name")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                for name in (ROWS, GRID):
                    (folder / name).unlink(missing_ok=True)
            devices = self._check(grid, machine)
            self._read()
            self._file = (folder / ROWS).open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        write_json(
            folder / GRID,
            {
                "hasten": _version(),
                "command": command,
                "repeat": grid.repeat,
                "axes": grid.to_json(),
                "machine": {
                    "torch": machine.torch,
                    "cores": machine.cores,
                    "devices": {**devices, **machine.devices},
                },
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, settings: TrainSettings, repeat: int) -> bool:
        """Whether this run is measured already."""
        return (_key(settings), repeat) in self._measured

    def measured(self, settings: TrainSettings, repeats: int) -> list[Measured]:
        """The measurements of a trial, of at most so many repeats."""
        key = _key(settings)
        found = (self._measured.get((key, repeat)) for repeat in range(1, repeats + 1))
        return [run for run in found if run is not None]

    def add(self, settings: TrainSettings, repeat: int, run: Measured) -> None:
        """Keep a measurement.

        Raises:
            HastenError: it cannot be written.
        """
        self._measured[_key(settings), repeat] = run
        self._append({**_head(settings, repeat), "measured": run.to_json()})

    def add_failure(self, settings: TrainSettings, repeat: int, reason: str) -> None:
        """Keep why a run failed; it counts as not done.

        Raises:
            HastenError: it cannot be written.
        """
        self._append({**_head(settings, repeat), "failed": reason})

    def _append(self, content: dict[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps(finite(content), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            os.fsync(self._file.fileno())
            if os.fstat(self._file.fileno()).st_nlink == 0:
                # A removed file takes writes without complaint and all of them are lost.
                raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile")
        except OSError as error:
            raise _cannot_write(self.folder / ROWS, error) from error

    def _check(self, grid: Grid, machine: Machine) -> Mapping[str, str]:
        """Refuse to go on with something else; gives the devices of the rows that are there."""
        path, rows = self.folder / GRID, self.folder / ROWS
        if not path.exists():
            if rows.exists() and rows.stat().st_size:
                raise UsageError(
                    f"{self.folder} has rows but has lost its {GRID}; give --fresh to start anew,"
                    " or another --name"
                )
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            axes, before = content["axes"], content["machine"]
            changed = machine.differences(before)
            devices: Mapping[str, str] = before["devices"]
            others = [
                f"{option(name)} {_values(axes.get(name))} there, {_values(now)} here"
                for name, now in grid.to_json().items()
                if axes.get(name) != now
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"cannot read {path} ({error}); give --fresh to start anew, or another --name"
            ) from error
        if others:
            raise UsageError(
                f"{self.folder} holds another comparison: {'; '.join(others)}. Give another --name,"
                " or --fresh to start anew"
            )
        if changed and rows.exists() and rows.stat().st_size:
            raise UsageError(
                f"{self.folder} holds measurements that these cannot stand beside:"
                f" {'; '.join(changed)}. Give --fresh to start anew, or another --name"
            )
        return {} if changed else devices

    def _read(self) -> None:
        """Read the rows that are there; a last one that a kill cut in half is cut away."""
        path = self.folder / ROWS
        if not path.exists():
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.decode(errors="replace").split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                if "measured" in row:
                    key = _text(row["settings"]), int(row["repeat"])
                    self._measured[key] = Measured.from_json(row["measured"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise HastenError(
                    f"{path}, line {number}: not a run of a comparison ({error}); remove that line"
                    " and its run is done again, or give --fresh to start anew"
                ) from error
        if len(whole) < len(content):
            os.truncate(path, len(whole))


def default_name(grid: Grid) -> str:
    """A folder's name for a grid: its data and eight characters that are the same for the same
    grid, so that the same command again goes on."""
    data = "-".join(Path(name).name for name in grid.axes["data"])
    digest = hashlib.sha256(_text(grid.to_json()).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', data).strip('.')[:60] or 'data'}-{digest}"


def _head(settings: TrainSettings, repeat: int) -> dict[str, Any]:
    return {"repeat": repeat, "settings": dataclasses.asdict(settings)}


def _key(settings: TrainSettings) -> str:
    return _text(dataclasses.asdict(settings))


def _text(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


def _values(values: Any) -> str:
    return ",".join(map(text_of, values)) if isinstance(values, list) else "nothing"


def _version() -> str:
    import hasten

    return hasten.__version__


def _cannot_write(path: Path, error: OSError) -> HastenError:
    return HastenError(
        f"cannot write {path}: {error.strerror or error}; see to its disk and permissions, then"
        " give the same command again: it goes on where it was"
    )
