"""Findings as annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.script.findings import Finding

_LEVEL = {"error": "error", "warning": "warning", "suggestion": "notice"}


def github(findings: Sequence[Finding]) -> str:
    """One workflow command a finding; "" without findings."""
    return "".join(f"{_line(finding)}\n" for finding in findings)


def _line(finding: Finding) -> str:
    message = finding.message + (f"\nfix: {finding.fix}" if finding.fix else "")
    for place in finding.related:
        message += f"\n{place.file}:{place.line}: {place.note}"
    fields = {
        "file": finding.file,
        "line": str(finding.line),
        "col": str(finding.column),
        "title": f"{finding.code} {finding.name}",
    }
    listed = ",".join(f"{key}={_property(value)}" for key, value in fields.items())
    return f"::{_LEVEL[finding.severity]} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
