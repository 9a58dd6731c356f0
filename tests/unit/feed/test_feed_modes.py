"""Modes that a loop is in (autocast, no_grad, a default device): samples are made within them, by
whoever makes them, and what the feed makes for itself lies on the host in any of them."""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hasten.feed import Loader, sizing
from hasten.feed.measure import Measured

WEIGHTS = torch.nn.Linear(2, 2)
SCALE = contextvars.ContextVar("SCALE", default=1)


class Of(Dataset[Any]):
    """What a function gives for each index."""

    def __init__(self, give: Callable[[int], Any]) -> None:
        self.give = give

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


class Fetching(Of):
    def fetch(self, index: int, key: int) -> Any:
        return self.give(index)


def dtype(index: int) -> str:
    return str((torch.ones(2, 2) * index).mm(torch.eye(2)).dtype)


def gradients(index: int) -> tuple[int, int]:
    return int(WEIGHTS(torch.ones(2)).requires_grad), int(torch.is_inference_mode_enabled())


def place(index: int) -> str:
    return str(torch.ones(1).device)


def digits(index: int) -> str:
    return str(decimal.Decimal(1) / decimal.Decimal(7))


def divided(index: int) -> int:
    try:
        np.float64(1) + np.float64("inf") - np.float64("inf")
    except FloatingPointError:
        return -1
    return 1


def scaled(index: int) -> int:
    return index * SCALE.get()


@contextmanager
def scaling() -> Iterator[None]:
    before = SCALE.set(10)
    try:
        yield
    finally:
        SCALE.reset(before)


MODES = [
    (lambda: torch.autocast("cpu", torch.bfloat16), dtype),
    (torch.no_grad, gradients),
    (torch.inference_mode, gradients),
    (lambda: torch.device("meta"), place),
    (lambda: decimal.localcontext(prec=4), digits),
    (lambda: np.errstate(all="raise"), divided),
    (scaling, scaled),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Of, {"plan": "threads"}),
        (Fetching, {"plan": "threads", "num_workers": 2}),
        (Of, {"plan": "processes"}),
    ],
)
@pytest.mark.parametrize(("mode", "give"), MODES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_samples_are_made_in_the_modes_of_the_loop(
    mode: Callable[[], AbstractContextManager[Any]],
    give: Callable[[int], Any],
    kind: type[Of],
    options: Any,
) -> None:
    dataset = kind(give)
    collate: Any = list
    usual = list(Loader(dataset, 4, collate_fn=collate, plan="inline"))
    with Loader(dataset, 4, collate_fn=collate, **options) as loader:
        assert list(loader) == usual
        with mode():
            wanted = list(Loader(dataset, 4, collate_fn=collate, plan="inline"))
            assert list(loader) == wanted != usual
        assert list(loader) == usual, "they ended with their block"


def test_workers_that_last_are_started_anew_in_other_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Measured(samples=9, seconds=0.25, cpu_seconds=0.25, free=0.0, bytes=8)
    monkeypatch.setattr(sizing, "measure_apart", lambda *_, **__: cost)
    monkeypatch.setattr(sizing, "_MOST_HEAD", 0)
    with Loader(Of(gradients), 4, collate_fn=list) as loader:
        assert loader.plan.kept
        with torch.no_grad():
            assert {sample for batch in loader for sample in batch} == {(0, 0)}
        assert {sample for batch in loader for sample in batch} == {(1, 0)}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("options", [{}, {"plan": "threads"}, {"plan": "processes"}])
def test_what_the_feed_makes_lies_on_the_host_whatever_the_default_device(
    options: Any, shuffle: bool
) -> None:
    """With `torch.set_default_device("cuda")`, the order was drawn there; "meta" shows the same."""
    values = torch.arange(24.0).reshape(12, 2)
    rows = TensorDataset(values) if not options else Of(lambda index: values[index] * 1)

    def epochs() -> list[Any]:
        with Loader(rows, 5, shuffle=shuffle, **options) as loader:
            return [part for _ in range(2) for batch in loader for part in batch]

    wanted = epochs()
    with torch.device("meta"):
        found = epochs()
    assert all(map(torch.equal, found, wanted))
    assert len(found) == len(wanted)
