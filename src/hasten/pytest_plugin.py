"""The pytest plugin: the fixture `simulated_accelerator`. It imports torch only when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hasten.simulate import Simulation


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known that gives the fixture its settings."""
    config.addinivalue_line(
        "markers",
        "simulated_accelerator(devices=1, **settings): what the fixture of this name gives to "
        "hasten.simulate()",
    )


@pytest.fixture
def simulated_accelerator(request: pytest.FixtureRequest) -> Iterator[Simulation]:
    """The test runs in ``hasten.simulate()``; the marker of the same name gives its settings."""
    from hasten.simulate import simulate

    marker = request.node.get_closest_marker("simulated_accelerator")
    with simulate(*marker.args, **marker.kwargs) if marker else simulate() as simulation:
        yield simulation
