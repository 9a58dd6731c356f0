"""What worker processes may do with the simulated device, as with CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import hasten
from hasten.feed import Loader


class Fresh(Dataset[Any]):
    """Samples that are made on the device by whoever asks for them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index), device="cuda")


def to_host(samples: list[torch.Tensor]) -> torch.Tensor:
    return default_collate([sample.cpu() for sample in samples])


def stacked_to_host(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).cpu()


def collated_to_host(samples: list[torch.Tensor]) -> torch.Tensor:
    return default_collate(samples).cpu()


@pytest.mark.parametrize("collate", [to_host, stacked_to_host, collated_to_host])
@pytest.mark.parametrize("kind", [DataLoader, Loader])
def test_workers_bring_samples_from_the_device_to_the_host(collate: Any, kind: Any) -> None:
    """Of a process that had not used the device: its forks may."""
    with hasten.simulate():
        batches = list(kind(Fresh(), 3, num_workers=1, collate_fn=collate, timeout=60))
    expected = torch.arange(6.0).reshape(2, 3, 1).expand(2, 3, 4)
    assert torch.equal(torch.stack(batches), expected)


def test_default_collate_in_a_worker_stacks_into_memory_of_the_device() -> None:
    with hasten.simulate():
        sample = torch.ones(4, device="cuda")
        storage = sample._typed_storage()._new_shared(8, device=sample.device)
        out = sample.new(storage).resize_(2, 4)
        assert out.is_cuda
        assert torch.equal(torch.stack([sample, sample], 0, out=out).cpu(), torch.ones(2, 4))
        host = torch.ones(4)
        shared = host._typed_storage()._new_shared(4, device=host.device)
        assert shared._is_shared()
