"""Accelerators that are in the machine while PyTorch cannot use them, and how to mend that."""

from __future__ import annotations


def advice() -> list[str]:
    """One line for each, ready to be shown."""
    return []
