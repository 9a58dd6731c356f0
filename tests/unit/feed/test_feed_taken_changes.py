"""A DataLoader of whole tensors taken over, whose data set the loop changes: as it would see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from feed_datasets import same
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

import hasten
from hasten.errors import DataError, UsageError
from hasten.feed import Loader


class Held(Dataset):
    """Tensors or lists in attributes."""

    def __init__(self, labels: Any) -> None:
        self.data = torch.arange(46.0).reshape(23, 2)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index], self.labels[index]


KINDS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: Held(torch.arange(23)),
    "a list": lambda: Held(list(range(23))),
    "subset": lambda: Subset(Held(list(range(23))), [*range(5, 23), 3]),
    "concat": lambda: ConcatDataset([Held(list(range(23))), Held(list(range(23)))]),
}


def _held(dataset: Any) -> Any:
    while not isinstance(dataset, Held):
        dataset = dataset.dataset if isinstance(dataset, Subset) else dataset.datasets[0]
    return dataset


def other_labels(dataset: Any) -> None:
    held = _held(dataset)
    held.labels = [int(label) + 100 for label in held.labels]


def one_label(dataset: Any) -> None:
    for number in (3, 17):
        _held(dataset).labels[number] += 1000


def pixels(dataset: Any) -> None:
    _held(dataset).data.mul_(2)


def loop(batches: Any, dataset: Any, change: Any, *, within: bool) -> Any:
    seen = []
    for _ in range(3):
        for number, batch in enumerate(batches):
            seen.append(batch)
            if within and number == 2:
                change(dataset)
        if not within:
            change(dataset)
    return seen


def writes_to_tensors(kind: str, change: Any) -> bool:
    return change is pixels or (change is one_label and kind == "tensors")


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("workers", [0, 2, "2, persistent"])
@pytest.mark.parametrize("change", [other_labels, one_label, pixels])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loop_changes_comes_when_the_original_would_have_it(
    kind: str, change: Any, workers: Any, within: bool
) -> None:
    options: Any = {"num_workers": workers}
    if isinstance(workers, str):
        options = {"num_workers": 2, "persistent_workers": True}
    here, there = KINDS[kind](), KINDS[kind]()
    expected = loop(DataLoader(here, 4, **options), here, change, within=within)
    with Loader.from_dataloader(DataLoader(there, 4, **options)) as loader:
        assert loader.plan.name == "gather"
        stale = options.get("persistent_workers") or (workers and within)
        if stale and writes_to_tensors(kind, change):  # the old values are nowhere any more
            with pytest.raises(DataError, match=r"2 worker processes.*would not have seen yet"):
                loop(loader, there, change, within=within)
            return
        assert same(loop(loader, there, change, within=within), expected)


def test_with_worker_processes_of_its_own_what_is_written_is_not_seen_either() -> None:
    here, there = TensorDataset(torch.arange(23.0)), TensorDataset(torch.arange(23.0))

    def change(dataset: Any) -> None:
        dataset.tensors[0].mul_(2)

    expected = loop(DataLoader(here, 4, num_workers=2), here, change, within=True)
    with Loader.from_dataloader(DataLoader(there, 4, num_workers=2), plan="processes") as loader:
        assert same(loop(loader, there, change, within=True), expected)


def test_tensors_that_processes_share_may_be_written_to() -> None:
    dataset = TensorDataset(torch.arange(23.0).share_memory_())
    with Loader.from_dataloader(DataLoader(dataset, 4, num_workers=2)) as loader:
        seen = loop(loader, dataset, lambda d: d.tensors[0].add_(100), within=True)
    assert [batch[0][0].item() for batch in seen[:4]] == [0, 4, 8, 112]


def test_on_a_device_a_copy_of_the_data_set_is_not_believed_once_it_is_written_to() -> None:
    def change(dataset: Any) -> None:
        dataset.tensors[0].mul_(2)

    here, there = TensorDataset(torch.arange(23.0)), TensorDataset(torch.arange(23.0))
    expected = loop(DataLoader(here, 4), here, change, within=True)
    original = DataLoader(there, 4)
    with hasten.simulate(), Loader.from_dataloader(original, plan="resident") as loader:
        batches = loader.to("cuda")
        assert batches.plan.name == "resident"
        seen = loop(batches, there, change, within=True)
        assert all(batch.is_cuda for (batch,) in seen)
        seen = [[batch.cpu()] for (batch,) in seen]
        assert "the loop changes the data set between batches" in batches.explain()
    assert same(seen, expected)


class Drawing(Held):
    """Samples that draw."""

    def __getitem__(self, index: int) -> Any:
        return self.data[index] + torch.rand(2), self.labels[index]


class Numbers(IterableDataset):
    """A stream that its workers share."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 23, info.num_workers if info else 1))


def first_half(samples: Any) -> Any:
    return torch.utils.data.default_collate(samples[: len(samples) // 2])


SETTINGS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 2, "prefetch_factor": 2},
    "no workers": {"num_workers": 0, "prefetch_factor": None},
    "one worker": {"num_workers": 1},
    "collate_fn": {"collate_fn": first_half},
    "generator": {"generator": torch.Generator().manual_seed(3)},
}


@pytest.mark.parametrize("make", [Held, Drawing])
@pytest.mark.parametrize(
    ("workers", "lasting", "settings"),
    [
        (0, False, "workers"),
        (0, False, "collate_fn"),
        (0, False, "generator"),
        (1, False, "workers"),
        (2, False, "no workers"),
        (2, False, "collate_fn"),
        (2, True, "no workers"),
        (2, True, "one worker"),
        (2, True, "collate_fn"),
    ],
)
def test_attributes_that_are_set_between_epochs(
    make: Any, workers: int, lasting: bool, settings: str
) -> None:
    def epochs(feed: Callable[[Any], Any]) -> Any:
        torch.manual_seed(1)
        given = DataLoader(
            make(torch.arange(23)), 4, True, num_workers=workers, persistent_workers=lasting
        )
        fed, seen = feed(given), []
        seen.append((list(fed), torch.rand(1)))
        for name, value in SETTINGS[settings].items():
            setattr(given, name, value)
        if given.generator is not None:
            given.generator.manual_seed(3)
        seen += [(list(fed), torch.rand(1)) for _ in range(2)]
        if isinstance(fed, Loader):
            fed.close()
        return seen

    assert same(epochs(Loader.from_dataloader), epochs(lambda given: given))


def test_an_iteration_under_way_goes_on_by_what_was() -> None:
    given = DataLoader(Held(torch.arange(23)), 4)
    batches = iter(Loader.from_dataloader(given))
    first = next(batches)
    given.collate_fn = len
    assert same([first, *batches], list(DataLoader(Held(torch.arange(23)), 4)))


def test_a_position_of_other_workers_than_were_set_since_is_refused() -> None:
    given = DataLoader(Drawing(torch.arange(23)), 4)
    with Loader.from_dataloader(given) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        given.num_workers, given.prefetch_factor = 2, 2
        with pytest.raises(UsageError, match="saved with num_workers=0"):
            iter(loader)


@pytest.mark.parametrize("lasting", [False, True])
def test_the_size_of_a_streams_batches_that_is_set_between_epochs(lasting: bool) -> None:
    given = DataLoader(Numbers(), 4, num_workers=2, persistent_workers=lasting)
    with Loader.from_dataloader(given) as loader:
        list(loader)
        given.batch_sampler.batch_size = 3  # type: ignore[union-attr]
        if lasting:
            with pytest.raises(UsageError, match=r"is 3 now, and .* batches of 4"):
                iter(loader)
            loader.close()
        found = list(loader)
    assert same(found, list(DataLoader(Numbers(), 3, num_workers=2)))


class Fails(Dataset):
    """Has one sample that cannot be read."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise ValueError("damaged")
        return index


class DrawsEach(Sampler):
    """Draws once for each index, when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        for index in range(60):
            torch.rand(1)
            yield index


@pytest.mark.parametrize("plan", ["auto", "processes", "inline"])
def test_a_failing_sample_leaves_the_generators_as_the_workers_of_a_dataloader_do(
    plan: str,
) -> None:
    def after(taken: bool) -> torch.Tensor:
        loader: Any = DataLoader(Fails(), 4, sampler=DrawsEach(), num_workers=1)
        if taken:
            loader = Loader.from_dataloader(loader, plan=plan)
        torch.manual_seed(1)
        with pytest.raises(ValueError, match="damaged"):
            list(loader)
        return torch.get_rng_state()

    assert torch.equal(after(taken=True), after(taken=False))


class Counting(Dataset[Any]):
    """How often its class was asked, in this process."""

    asked = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        Counting.asked += 1
        return Counting.asked


DRAWS = np.random.default_rng(0)


class OfVariable(Counting):
    def __getitem__(self, index: int) -> Any:
        return DRAWS.random()


@pytest.mark.parametrize("kind", [Counting, OfVariable])
def test_workers_played_here_share_no_classes_and_variables(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They went on from epoch to epoch, where new worker processes begin as the loop's is."""
    monkeypatch.setattr(Counting, "asked", 0)
    played = Loader.from_dataloader(DataLoader(kind(), 4, num_workers=2), plan="inline")
    with played, pytest.raises(DataError, match="what its workers share"):
        list(played)
    expected = [list(DataLoader(kind(), 4, num_workers=2)) for _ in range(2)]
    with Loader.from_dataloader(DataLoader(kind(), 4, num_workers=2)) as loader:
        assert [list(map(torch.Tensor.tolist, loader)) for _ in range(2)] == [
            [batch.tolist() for batch in epoch] for epoch in expected
        ]
