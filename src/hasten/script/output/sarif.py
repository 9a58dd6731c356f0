"""Findings as SARIF 2.1.0, which code hosts and editors read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from hasten.script.findings import KINDS, Finding

_LEVEL = {"error": "error", "warning": "warning", "suggestion": "note"}


def sarif(findings: Sequence[Finding]) -> str:
    """The findings as one SARIF log with one run."""
    from hasten import __version__

    codes = sorted({finding.code for finding in findings})
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "hasten",
                        "version": __version__,
                        "rules": [_rule(code) for code in codes],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, codes.index(finding.code)) for finding in findings],
            }
        ],
    }
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _rule(code: str) -> dict[str, Any]:
    kind = KINDS.get(code)
    rule: dict[str, Any] = {"id": code}
    if kind is not None:
        rule["name"] = kind.name
        rule["shortDescription"] = {"text": kind.summary}
        rule["defaultConfiguration"] = {"level": _LEVEL[kind.severity]}
    return rule


def _result(finding: Finding, index: int) -> dict[str, Any]:
    message = finding.message + (f"\nFix: {finding.fix}" if finding.fix else "")
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVEL[finding.severity],
        "message": {"text": message},
        "locations": [_location(finding.file, finding.line, finding.column)],
        "properties": {"foundBy": finding.found_by, "count": finding.count},
    }
    if finding.related:
        result["relatedLocations"] = [
            _location(place.file, place.line) | {"id": number, "message": {"text": place.note}}
            for number, place in enumerate(finding.related, 1)
        ]
    return result


def _location(file: str, line: int, column: int | None = None) -> dict[str, Any]:
    region = {"startLine": line} | ({"startColumn": column} if column is not None else {})
    path = PurePath(file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
