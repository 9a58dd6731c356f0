"""Periods in steps, time or epochs."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.errors import UsageError
from hasten.train.schedule import Every


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("1 steps", Every(steps=1)),
        ("10 min", Every(seconds=600)),
        ("10min", Every(seconds=600)),
        ("1.5 h", Every(seconds=5400)),
        ("2 hours", Every(seconds=7200)),
        ("90 s", Every(seconds=90)),
        ("90 sec", Every(seconds=90)),
        ("3 Minutes", Every(seconds=180)),
        ("2 epochs", Every(epochs=2)),
        (" 1 epoch ", Every(epochs=1)),
        ("never", Every()),
        ("Never", Every()),
        (None, Every()),
        (Every(steps=3), Every(steps=3)),
    ],
)
def test_words(text: Any, expected: Every):
    assert Every.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "steps",
        "0 steps",
        "0 s",
        "1.5 steps",
        "0.5 epochs",
        "-3 steps",
        "5 days",
        "1 step 2",
    ],
)
def test_what_cannot_be_read_says_how_to_write_it(text: str):
    with pytest.raises(UsageError, match=r"cannot read the period .* write it like '500 steps'"):
        Every.parse(text)


def test_one_part_only_and_positive():
    for parts in ({"steps": 1, "seconds": 2.0}, {"steps": 0}, {"seconds": -1.0}, {"epochs": 0}):
        with pytest.raises(UsageError, match="one positive part"):
            Every(**parts)  # type: ignore[arg-type]


def test_due():
    assert not Every(steps=3).due(steps=2, seconds=1e9)
    assert Every(steps=3).due(steps=3, seconds=0)
    assert not Every(seconds=60).due(steps=999, seconds=59.9)
    assert Every(seconds=60).due(steps=0, seconds=60)
    assert not Every(epochs=1).due(steps=999, seconds=1e9)
    assert not Every().due(steps=999, seconds=1e9)
