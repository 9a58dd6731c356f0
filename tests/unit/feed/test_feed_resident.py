"""The plan `resident`, on a simulated accelerator: an epoch there is that of the host."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

import hasten
from hasten.feed import Loader


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_an_epoch_ends_and_gives_what_the_host_gives(shuffle: bool, shard: tuple[int, int]) -> None:
    rows = TensorDataset(torch.arange(43.0))
    with hasten.Loader(rows, batch_size=8, shuffle=shuffle) as loader:
        loader.shard(*shard)
        host = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    with (
        hasten.simulate(),
        hasten.Loader(rows, batch_size=8, shuffle=shuffle) as loader,
    ):
        loader.shard(*shard)
        device = loader.to("cuda")
        assert device.plan.name == "resident"
        epochs = [[b[0].cpu().tolist() for b in islice(device, 20)] for _ in range(2)]
        loader.load_state_dict({"epoch": 1, "batch": 4, "seed": 0})
        rest = [b[0].cpu().tolist() for b in islice(device, 20)]
    assert epochs == host
    assert rest == host[1][4:]


def test_it_is_said_that_resident_is_for_another_device() -> None:
    loader = Loader(TensorDataset(torch.arange(10)), 4, plan="resident")
    assert loader.plan.name == "gather"
    assert "resident is for batches on another device" in loader.explain()
    assert "resident" not in Loader(TensorDataset(torch.arange(10)), 4).explain()
