"""Findings as the one object that `hasten check --format json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hasten.script.findings import Finding, fails

SCHEMA = 1


def report(
    findings: Sequence[Finding],
    *,
    script: str,
    steps: int = 0,
    devices: int = 0,
    exit_status: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The object, ready for JSON.

    Args:
        findings: what was found, in order.
        script: what was checked.
        steps: optimizer steps that a rehearsal ran; 0 for reading alone.
        devices: simulated devices; 0 for reading alone.
        exit_status: 0, 1 or 2; by the findings when not given.
        more: further keys.
    """
    from hasten import __version__

    status = exit_status if exit_status is not None else int(fails(findings))
    return {
        "hasten": __version__,
        "schema": SCHEMA,
        "script": script,
        "findings": [finding.to_json() for finding in findings],
        "steps": steps,
        "devices": devices,
        "exit": status,
        **more,
    }


def as_json(findings: Sequence[Finding], *, script: str, **more: Any) -> str:
    """`report` as text, on one line."""
    return json.dumps(report(findings, script=script, **more), ensure_ascii=False)
