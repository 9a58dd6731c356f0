"""The feed on a real accelerator: the batches of the host, in order, while the device computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hasten.devices import runtime
from hasten.feed import Loader

DEVICE = runtime.accelerator()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="no accelerator that PyTorch can use"),
]


class Decoding(Dataset):
    """Samples of a megabyte, whose content is a function of the key."""

    def __len__(self) -> int:
        return 96

    def fetch(self, index: int, key: int) -> Any:
        generator = torch.Generator().manual_seed(key)
        return torch.randint(0, 256, (4, 512, 512), dtype=torch.uint8, generator=generator), index

    def __getitem__(self, index: int) -> Any:
        return torch.full((4, 512, 512), index, dtype=torch.uint8), index


class Indexed(Decoding):
    fetch = None  # type: ignore[assignment]


def _table() -> TensorDataset:
    images = torch.arange(96, dtype=torch.uint8)[:, None, None, None].expand(96, 4, 256, 256)
    return TensorDataset(images.contiguous(), torch.arange(96))


CASES = [
    ("resident", _table()),
    ("gather", _table()),
    ("threads", Decoding()),
    ("processes", Indexed()),
    ("inline", Indexed()),
]


@pytest.mark.parametrize(("plan", "dataset"), CASES, ids=[plan for plan, _ in CASES])
@pytest.mark.parametrize("pin", ["auto", False])
def test_batches_are_those_of_the_host(plan: str, dataset: Any, pin: Any) -> None:
    assert DEVICE is not None
    options: Any = {"batch_size": 8, "shuffle": True, "seed": 4}
    expected = [
        (images.to(torch.int64).sum(), labels)
        for images, labels in Loader(dataset, plan="inline", **options)
    ]
    heavy = torch.randn(2048, 2048, device=DEVICE)
    sums, places = [], []
    with Loader(dataset, plan=plan, pin_memory=pin, **options) as loader:
        feed = loader.to(DEVICE)
        for images, labels in feed:
            assert images.device == labels.device == DEVICE
            for _ in range(4):  # the device is behind: copies run while it computes
                heavy = (heavy @ heavy).clamp_(-1, 1)
            sums.append(images.to(torch.int64).sum())
            places.append(labels.clone())
            del images, labels
        if plan != "resident":
            assert feed.copy_seconds > 0
    assert len(sums) == len(expected)
    for found, labels, (total, expected_labels) in zip(sums, places, expected, strict=True):
        assert found.item() == total.item()
        assert torch.equal(labels.cpu(), expected_labels)


def test_the_plan_on_the_device() -> None:
    assert DEVICE is not None
    plan = Loader(_table(), 8).to(DEVICE).plan
    assert plan.name == "resident"
    plan = Loader(_table(), 8, plan="gather").to(DEVICE).plan
    assert plan.pinned == runtime.can_pin(DEVICE)
    assert bool(plan.ahead_batches) == runtime.can_overlap(DEVICE)


def test_draws_are_those_of_the_host() -> None:
    assert DEVICE is not None

    def draw(batch: Any, rng: Any) -> Any:
        return rng.uniform(3)

    options: Any = {"batch_size": 8, "shuffle": True, "device_transform": draw}
    host = list(Loader(_table(), **options).to("cpu"))
    for found, expected in zip(Loader(_table(), **options).to(DEVICE), host, strict=True):
        assert found.device == DEVICE
        assert torch.equal(found.cpu(), expected)


def test_a_resident_data_set_that_changes_is_copied_anew() -> None:
    assert DEVICE is not None
    dataset = TensorDataset(torch.zeros(32))
    with Loader(dataset, 8, plan="resident") as loader:
        feed = loader.to(DEVICE)
        assert sum(batch[0].sum().item() for batch in feed) == 0
        dataset.tensors[0].fill_(1)
        assert sum(batch[0].sum().item() for batch in feed) == 32


def test_resuming_in_the_middle() -> None:
    assert DEVICE is not None
    options: Any = {"batch_size": 8, "shuffle": True}
    for plan in ("resident", "gather"):
        with Loader(_table(), plan=plan, **options) as loader:
            whole = [labels.tolist() for _, labels in loader.to(DEVICE)]
        with Loader(_table(), plan=plan, **options) as loader:
            feed = loader.to(DEVICE)
            batches = iter(feed)
            next(batches), next(batches), next(batches)
            state = feed.state_dict()
            batches.close()
        assert state["batch"] == 3, "not what is on its way, but what the loop has had"
        with Loader(_table(), plan=plan, **options) as loader:
            loader.load_state_dict(state)
            assert [labels.tolist() for _, labels in loader.to(DEVICE)] == whole[3:]


def test_how_many_engines_copy_is_known_of_nvidia_s() -> None:
    assert DEVICE is not None
    engines = runtime.copy_engines(DEVICE)
    assert (engines is not None) == (torch.version.cuda is not None)
