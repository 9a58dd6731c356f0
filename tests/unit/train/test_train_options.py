"""The options of Run and Trainer are found without reading source, and a wrong one is told."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten
from hasten.errors import UnknownOption, UsageError
from hasten.train import options
from hasten.train.settings import RunSettings

FIELDS = dataclasses.fields(RunSettings)
DOCS = Path(__file__).parents[3] / "docs" / "train.md"
WRITTEN = {"config": "{}", "clock": "time.perf_counter"}


def meanings() -> dict[str, str]:
    """What each option means, out of the one place where that is written."""
    text = inspect.getdoc(RunSettings) or ""
    listed = text.partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def row(field: dataclasses.Field[Any]) -> str:
    default = WRITTEN.get(field.name) or repr(field.default)
    return f"| `{field.name}` | `{default}` | {meanings()[field.name].replace('``', '`')} |"


def test_each_option_has_a_meaning_in_order():
    assert list(meanings()) == [field.name for field in FIELDS]


def test_the_page_has_a_table_of_all_options_with_defaults_and_meanings():
    table = DOCS.read_text(encoding="utf-8").partition("| option | default | meaning |\n")[2]
    rows = table.partition("\n\n")[0].splitlines()[1:]
    assert rows == [row(field) for field in FIELDS]


@pytest.mark.parametrize("kind", [hasten.Run, hasten.Trainer])
def test_help_lists_every_option(kind: type):
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    for name, meaning in meanings().items():
        begins = f"{name}: {meaning}"[:40]
        assert re.search(rf"^ \|      {re.escape(begins)}", text, re.MULTILINE), name
    assert "Unpack" not in text.partition("Methods defined here")[0]
    assert "options: " not in text.partition("Methods defined here")[0]
    parameters = inspect.signature(kind).parameters
    for field in FIELDS:
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.default is not dataclasses.MISSING:
            assert parameters[field.name].default == field.default


def test_without_docstrings_there_is_nothing_to_list(monkeypatch: pytest.MonkeyPatch):
    class Bare:
        def __init__(self, model: int, **options: object) -> None: ...

    monkeypatch.setattr(RunSettings, "__doc__", None)  # as under python -OO
    assert options.shown(Bare).__doc__ is None
    assert list(inspect.signature(Bare).parameters)[:2] == ["model", "device"]


class Mine(hasten.Run):
    """As people make their own."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hasten.Run(precison="auto"),  # type: ignore[call-arg]
            "hasten.Run has no option 'precison' (did you mean precision?); help(hasten.Run) and"
            " docs/train.md list those that there are",
        ),
        (
            lambda: Mine(log_evry=3),  # type: ignore[call-arg]
            "hasten.Run has no option 'log_evry' (did you mean log_every?); help(hasten.Run) and"
            " docs/train.md list those that there are",
        ),
        (
            lambda: hasten.Trainer(
                nn.Linear(1, 1),
                loss=nn.MSELoss(),
                optimiser=torch.optim.SGD,  # type: ignore[call-arg]
            ),
            "hasten.Trainer has no option 'optimiser' (did you mean optimizer?);"
            " help(hasten.Trainer) and docs/train.md list those that there are",
        ),
        (
            lambda: hasten.Run(banana=3),  # type: ignore[call-arg]
            "hasten.Run has no option 'banana'; help(hasten.Run) and docs/train.md list those that"
            " there are",
        ),
    ],
)
def test_an_option_that_there_is_not_is_told_with_the_nearest(make: Any, message: str):
    with pytest.raises(UnknownOption) as told:
        make()
    assert str(told.value) == message
    assert isinstance(told.value, TypeError) and isinstance(told.value, UsageError)
    assert told.value.exit_status == 2
