"""Batches made ahead for a DataLoader without workers, given up where they gain nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from feed_datasets import same
from torch.utils.data import DataLoader, Dataset

from hasten.feed import Loader, faithful
from hasten.feed.plan import Plan
from hasten.feed.worth import Worth


@pytest.mark.parametrize(
    ("epochs", "none"),
    [
        ([(1.5, 0.2)], False),  # 10 batches of 0.1 s: 1.2 s one by one
        ([(1.5, 0.2), (1.5, 0.2)], True),
        ([(1.5, 0.2), (1.1, 0.2), (1.5, 0.2)], False),
        ([(1.24, 0.2), (1.24, 0.2)], False),
        ([(1.5, 0.6), (1.5, 0.6)], False),
    ],
)
def test_two_epochs_that_take_longer_tell(epochs: list[tuple[float, float]], none: bool) -> None:
    worth = Worth()
    for seconds, work_s in epochs:
        worth.made(0.09)
        worth.made(0.11)
        worth.epoch(seconds, work_s, 10)
        worth._made.clear()
    assert worth.none == none


def test_epochs_of_which_nothing_was_made_here_tell_nothing() -> None:
    worth = Worth()
    for _ in range(3):
        worth.epoch(100.0, 0.0, 1)
    assert not worth.none


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return torch.tensor([float(index)])


@pytest.mark.parametrize(("slow", "name"), [(True, "inline"), (False, "processes")])
def test_what_gains_nothing_is_given_up_between_epochs(
    slow: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(name="processes", reason="", workers=1, prefetch_batches=2)
    monkeypatch.setattr(faithful, "tried", lambda *_: plan)
    seen: list[tuple[int, int]] = []

    def epoch(self: Worth, seconds: float, work_s: float, batches: int) -> None:
        assert seconds > work_s > 0
        seen.append((len(self._made), batches))
        self._later += slow

    monkeypatch.setattr(Worth, "epoch", epoch)
    dataset = Samples()
    wanted, found = DataLoader(dataset, 4), Loader.from_dataloader(DataLoader(dataset, 4))
    with found:
        for _ in range(2):
            assert found.plan.name == "processes"
            assert same(list(found), list(wanted))
        next(iter(found))  # left early: no epoch
        assert seen == [(3, 20), (3, 20)], "of 20 batches, those of 0, 1 and 10 were made here too"
        assert found.plan.name == name
        assert same(list(found), list(wanted))
        assert ("longer with batches made ahead" in found.explain()) == slow
