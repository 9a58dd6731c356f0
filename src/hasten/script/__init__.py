"""Other people's scripts: rules that read them, rehearsal that runs them without a GPU."""

from __future__ import annotations

from hasten.script.findings import Finding, Related, merge

__all__ = ["Finding", "Related", "merge"]
