"""Which findings of a rehearsal are wanted: ignore comments and `[tool.hasten]`, as for rules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from hasten.script.findings import Finding
from hasten.script.rules.settings import settings_for
from hasten.script.rules.sources import Unreadable, read


def wanted(findings: Iterable[Finding]) -> list[Finding]:
    """Those that neither a comment on their line nor the settings of their file leave out."""
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        by_file.setdefault(finding.file, []).append(finding)
    kept: list[Finding] = []
    for name, mine in by_file.items():
        path = Path(name)
        with contextlib.suppress(Unreadable):  # a file that was removed since has no comments
            mine = read(path).not_ignored(mine)
        kept += settings_for(path).kept(mine)
    return kept
