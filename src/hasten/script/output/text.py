"""Findings as text for people: one paragraph each, with the lines of code it speaks of."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from hasten.script.findings import Finding

_COLOURS = {"error": "31", "warning": "33", "suggestion": "36"}
_BY = {"static": "read", "rehearsal": "run", "both": "read and run"}
_CELL = re.compile(r"(.*\.ipynb)\[(\d+)\]\Z")
Lines = Callable[[str], Sequence[str]]


def text(
    findings: Sequence[Finding],
    *,
    lines_of: Lines | None = None,
    colour: bool = False,
    width: int = 100,
) -> str:
    """The findings as paragraphs, in the order given; "" without findings.

    Args:
        findings: what was found.
        lines_of: gives the lines of a file by its name; read from disk when not given.
        colour: with ANSI colours, for a terminal.
        width: characters a line.
    """
    get = lines_of or _Files().lines
    return "\n".join(_paragraph(finding, get, colour, width) for finding in findings)


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning` and so on; `nothing found` without findings."""
    parts = []
    for severity in _COLOURS:
        number = sum(finding.severity == severity for finding in findings)
        if number:
            parts.append(f"{number} {severity}{'s' if number > 1 else ''}")
    return ", ".join(parts) or "nothing found"


def _paragraph(finding: Finding, get: Lines, colour: bool, width: int) -> str:
    severity = _painted(finding.severity, _COLOURS[finding.severity], colour)
    place = f"{finding.file}:{finding.line}:{finding.column}"
    times = f", {finding.count} times" if finding.count > 1 else ""
    head = f"{_painted(place, '1', colour)}: {severity} {finding.code} {finding.name}"
    out = [f"{head} ({_BY[finding.found_by]}{times})"]
    out += _wrapped(finding.message, width)
    out += _frame(finding, get)
    if finding.fix:
        out += _wrapped(f"fix: {finding.fix}", width)
    return "\n".join(out) + "\n"


def _wrapped(message: str, width: int) -> list[str]:
    out: list[str] = []
    for line in message.splitlines():
        out += textwrap.wrap(line, width - 2, initial_indent="  ", subsequent_indent="  ") or [""]
    return out


def _frame(finding: Finding, get: Lines) -> list[str]:
    """The line with a mark under its column, and the related lines, in order."""
    places = {(finding.file, finding.line): ""}
    for related in finding.related:
        places.setdefault((related.file, related.line), related.note)
    digits = max(len(str(line)) for _, line in places)
    out: list[str] = []
    last_file = finding.file
    for (file, line), note in sorted(places.items(), key=lambda p: (p[0][0] != finding.file, p[0])):
        source = get(file)
        if not 0 < line <= len(source):
            if note:
                out.append(f"  {file}:{line}: {note}")
            continue
        if file != last_file:
            out.append(f"  {file}")
            last_file = file
        code = source[line - 1].rstrip().expandtabs(4)
        out.append(f"  {line:>{digits}} | {code}")
        if (file, line) == (finding.file, finding.line):
            before = len(source[line - 1][: finding.column - 1].expandtabs(4))
            out.append(f"  {'':>{digits}} | {' ' * before}^")
        if note:
            indent = len(code) - len(code.lstrip())
            out.append(f"  {'':>{digits}} | {' ' * indent}= {note}")
    return out


def _painted(what: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{what}\x1b[0m" if colour else what


class _Files:
    """Lines of files by name, each read once; a name may say a notebook's cell."""

    def __init__(self) -> None:
        self._known: dict[str, Sequence[str]] = {}

    def lines(self, name: str) -> Sequence[str]:
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Sequence[str]:
        from hasten.script.rules.sources import Unreadable, read

        cell = _CELL.match(name)
        try:
            source = read(Path(cell[1] if cell else name))
        except Unreadable:
            return ()
        lines = source.text.splitlines()
        if cell is None:
            return lines
        starts = {number: first for first, number in source.cells}
        first = starts.get(int(cell[2]), len(lines) + 1)
        later = [start for start in starts.values() if start > first]
        return lines[first - 1 : min(later, default=len(lines) + 1) - 1]
