"""Findings as text with code frames, as JSON, for GitHub and as SARIF: functions of records."""

from __future__ import annotations

from hasten.script.output.github import github
from hasten.script.output.json import as_json, report
from hasten.script.output.sarif import sarif
from hasten.script.output.text import counted, text

__all__ = ["as_json", "counted", "github", "report", "sarif", "text"]
