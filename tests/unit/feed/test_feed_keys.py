from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.feed import SampleRandom, sample_key, sample_keys
from hasten.feed.keys import permutation

WORDS = st.integers(0, 2**64 - 1)
CPU = torch.device("cpu")


@given(WORDS, st.integers(0, 2**40), st.lists(st.integers(0, 2**62), min_size=1, max_size=9))
def test_keys_of_many_are_the_keys_of_each(seed: int, epoch: int, indices: list[int]) -> None:
    many = sample_keys(seed, epoch, np.array(indices, dtype=np.int64))
    assert many.dtype == np.uint64
    assert many.tolist() == [sample_key(seed, epoch, index) for index in indices]


def test_keys_are_frozen() -> None:
    """A checkpoint of one version must resume in the next."""
    assert sample_key(0, 0, 0) == 0x238275BC38FCBE91
    assert permutation(8, 0, 0).tolist() == [7, 3, 6, 5, 0, 2, 1, 4]


def test_keys_differ_by_seed_epoch_and_index() -> None:
    keys = {
        sample_key(seed, epoch, index)
        for seed in range(10)
        for epoch in range(10)
        for index in range(100)
    }
    assert len(keys) == 10_000


def test_orders_are_permutations_that_differ_by_epoch_and_seed() -> None:
    orders = [permutation(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == permutation(50, 0, 0).tolist()


@given(st.integers(0, 100), st.integers(1, 4))
def test_draws_do_not_depend_on_the_batch(split: int, columns: int) -> None:
    indices = np.arange(100)
    whole = SampleRandom(7, 2, indices, CPU)
    parts = [SampleRandom(7, 2, part, CPU) for part in (indices[:split], indices[split:])]
    for _ in range(3):
        expected = whole.uniform(columns)
        assert torch.equal(expected, torch.cat([part.uniform(columns) for part in parts]))


def test_draws_are_uniform_and_independent() -> None:
    rng = SampleRandom(0, 0, np.arange(20_000), CPU)
    first, second = rng.uniform(3), rng.uniform(3)
    for values in (first, second):
        assert values.dtype == torch.float32
        assert values.shape == (20_000, 3)
        assert values.min() >= 0
        assert values.max() < 1
        counts = torch.histc(values, 10, 0, 1)
        assert ((counts - 6000).abs() < 400).all()  # more than five standard deviations
    columns = torch.cat([first, second], 1).T
    correlation = torch.corrcoef(columns) - torch.eye(6)
    assert correlation.abs().max() < 0.04


def test_draws_have_their_own_keys() -> None:
    """Numbers of a transform on the device do not repeat those of the sample's own transforms."""
    assert SampleRandom(0, 0, np.array([5]), CPU)._keys[0] != np.uint64(sample_key(0, 0, 5))
