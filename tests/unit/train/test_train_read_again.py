"""A batch that gave a bad loss is read again: it is that one, or it is said not to be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten.feed import Loader
from hasten.train.source import Source


class Drawing(Dataset[Any]):
    """Samples with noise from the global generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return (torch.rand(3) + index,)


TABLE = TensorDataset(torch.arange(40.0))

CASES: dict[str, tuple[Callable[[], Any], bool]] = {
    "own": (lambda: Loader(Drawing(), 4, True), True),
    "table": (lambda: Loader(TABLE, 4, True), True),
    "taken": (lambda: Loader.from_dataloader(DataLoader(Drawing(), 4, shuffle=True)), False),
    "taken, workers": (
        lambda: Loader.from_dataloader(DataLoader(Drawing(), 4, shuffle=True, num_workers=1)),
        False,
    ),
    "taken table": (lambda: Loader.from_dataloader(DataLoader(TABLE, 4, shuffle=True)), True),
    "DataLoader": (lambda: DataLoader(Drawing(), 4, shuffle=True), False),
    "DataLoader of a table": (lambda: DataLoader(TABLE, 4, shuffle=True), True),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_batch_that_was_given_or_none(case: str) -> None:
    make, exact = CASES[case]
    torch.manual_seed(3)
    loader = make()
    source = Source(loader, torch.device("cpu"))
    given: list[Any] = []
    batches = source.start(0)
    for number in range(6):
        given.append(next(batches))
        source.batches_done = number + 1
    before = torch.get_rng_state()
    for number in (2, 5):
        again = source.read_again(0, number)
        assert (again is not None) == exact
        assert again is None or torch.equal(again[0], given[number][0])
    assert torch.equal(torch.get_rng_state(), before), "the run goes on with what it had drawn"
    del batches
    source.close()
    if isinstance(loader, Loader):
        loader.close()
