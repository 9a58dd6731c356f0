"""nn.DataParallel as a strategy, on two simulated devices."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import QUIET, loader, mlp, points, sgd, state

import hasten
from hasten.errors import UsageError


class Watched(nn.Module):
    """Notes the devices that it computes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(str(x.device))
        return self.inner(x)  # type: ignore[no-any-return]


def trained(**options: Any) -> Watched:
    model = Watched()
    trainer = hasten.Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=sgd, **QUIET | {"device": "cpu"} | options
    )
    trainer.fit(loader(points(), batch_size=8), loader(points(12)), epochs=2)
    return model


def test_each_batch_is_cut_among_the_devices_and_the_weights_are_those_of_one() -> None:
    expected = state(trained())
    text = io.StringIO()
    with hasten.simulate(2):
        model = trained(device="cuda", strategy="dp", stream=text, progress="plain")
        found = {name: value.cpu() for name, value in state(model).items()}
        assert set(model.seen) == {"cuda:0", "cuda:1"}
        copied = copy.deepcopy(model)
        copied.seen.clear()
        copied(torch.randn(4, 6, device="cuda"))
        assert copied.seen == ["cuda:0"]
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=1e-6)
    assert "nn.DataParallel over cuda:0, cuda:1. DDP is faster" in text.getvalue()


def test_one_device_is_nothing_to_cut_among() -> None:
    with hasten.simulate(1), pytest.raises(UsageError, match="cuda:0 is the only one"):
        trained(device="cuda", strategy="dp")
    with pytest.raises(UsageError, match="cpu is the only one"):
        trained(strategy="dp")


def test_norms_over_all_processes_need_several() -> None:
    with pytest.raises(UsageError, match="sync_batchnorm is for several processes"):
        hasten.Trainer(mlp(), loss=nn.CrossEntropyLoss(), **QUIET | {"sync_batchnorm": True}).fit(
            loader(), epochs=1
        )
