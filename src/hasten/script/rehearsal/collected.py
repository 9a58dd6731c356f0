"""Findings while the script runs: the same fault at the same line is one, with a count."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hasten.script.findings import Finding, Related, Severity, in_order

_RELATED = 6  # other places that one finding names


class Collected:
    """All findings of a rehearsal so far."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._findings: dict[tuple[str, str, int], Finding] = {}

    def add(
        self,
        code: str,
        file: str,
        line: int,
        message: str,
        *,
        fix: str = "",
        severity: Severity = "error",
        count: int = 1,
        related: tuple[tuple[str, int, str], ...] = (),
    ) -> None:
        """Add a finding, or count it once more where it is known."""
        places = tuple(Related(self.shown(f), n, note) for f, n, note in related)
        key = code, self.shown(file), line
        known = self._findings.get(key)
        if known is None:
            self._findings[key] = Finding(
                code=code,
                severity=severity,
                file=key[1],
                line=line,
                message=message,
                fix=fix,
                found_by="rehearsal",
                count=count,
                related=tuple(p for p in places if (p.file, p.line) != (key[1], line)),
            )
            return
        seen = {(place.file, place.line) for place in known.related} | {(key[1], line)}
        more = tuple(place for place in places if (place.file, place.line) not in seen)
        self._findings[key] = dataclasses.replace(
            known, count=known.count + count, related=(known.related + more)[:_RELATED]
        )

    def shown(self, file: str) -> str:
        """A path as people write it: relative where it lies below the working folder."""
        path = Path(file)
        if path.is_relative_to(self._folder):
            return os.path.relpath(file, self._folder)
        return file

    def all(self) -> list[Finding]:
        """The findings in order of file and line."""
        return in_order(self._findings.values())
