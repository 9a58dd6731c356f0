"""Rehearsals in processes that are forked from one that has torch imported."""

from __future__ import annotations

import pytest

import warm
from hasten.script.rehearsal import launch


@pytest.fixture(autouse=True)
def quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test marked ``fresh`` rehearses in fresh processes, as people do."""
    if request.node.get_closest_marker("fresh") is None:
        monkeypatch.setattr(launch, "subprocess", warm.subprocesses())
