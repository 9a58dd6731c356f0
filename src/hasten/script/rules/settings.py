"""Which rules a check uses: `[tool.hasten]` in pyproject.toml, or given by the caller."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.errors import UsageError
from hasten.script.findings import Finding

_CODE = re.compile(r"(HST\d{0,3}|ALL)\Z")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which findings are wanted.

    Attributes:
        select: codes or their beginnings (``HST1``); empty for all.
        ignore: codes or their beginnings that are left out; goes before `select`.
        per_file: a pattern of paths to codes that are left out there.
        root: the folder that the patterns are relative to.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    root: Path | None = None

    def __post_init__(self) -> None:
        for code in (*self.select, *self.ignore, *(c for v in self.per_file.values() for c in v)):
            if not isinstance(code, str) or not _CODE.match(code):
                raise UsageError(f"{code!r} is no rule code; they read HST101, or HST1 for a group")

    def wants(self, code: str, path: str) -> bool:
        """Whether findings of this code in this file are wanted."""
        if _matches(code, self.ignore) or (self.select and not _matches(code, self.select)):
            return False
        return not any(
            _matches(code, codes) and self._fits(path, pattern)
            for pattern, codes in self.per_file.items()
        )

    def _fits(self, path: str, pattern: str) -> bool:
        name = Path(path)
        if self.root is not None and name.resolve().is_relative_to(self.root):
            name = name.resolve().relative_to(self.root)
        return fnmatch.fnmatch(name.as_posix(), pattern) or fnmatch.fnmatch(name.name, pattern)

    def kept(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those that are wanted; that a file cannot be read is always said."""
        return [f for f in findings if f.code == "HST100" or self.wants(f.code, f.file)]


def _matches(code: str, wanted: Iterable[str]) -> bool:
    return any(one == "ALL" or code.startswith(one) for one in wanted)


def settings_for(path: Path) -> Settings:
    """The settings of the nearest pyproject.toml with a `[tool.hasten]`; defaults without one.

    Raises:
        UsageError: the table has an unknown key or a value of the wrong kind.
    """
    for folder in path.resolve().parents:
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                table = (
                    tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("hasten")
                )
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
                raise UsageError(f"{file} cannot be read: {error}") from None
            if table is not None:
                return from_table(table, file)
    return Settings()


def from_table(table: Any, file: Path) -> Settings:
    """Settings from the table as pyproject.toml has it.

    Raises:
        UsageError: as in `settings_for`.
    """
    known = {"select", "ignore", "per-file-ignores"}
    if not isinstance(table, dict) or table.keys() - known:
        odd = ", ".join(sorted(table.keys() - known)) if isinstance(table, dict) else "no table"
        raise UsageError(f"[tool.hasten] in {file}: {odd}; it takes {', '.join(sorted(known))}")
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise UsageError(f"[tool.hasten] in {file}: per-file-ignores is a table of lists")
    return Settings(
        select=_codes(table.get("select", []), "select", file),
        ignore=_codes(table.get("ignore", []), "ignore", file),
        per_file={k: _codes(v, "per-file-ignores", file) for k, v in per_file.items()},
        root=file.parent.resolve(),
    )


def _codes(value: Any, key: str, file: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"[tool.hasten] in {file}: {key} is a list of codes")
    return tuple(value)
