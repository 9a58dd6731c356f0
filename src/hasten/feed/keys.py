"""Numbers that follow from (seed, epoch, index) alone: sample keys, orders, random draws.

Everything here is a counter-based hash (the finaliser of splitmix64), so that a number never
depends on who asks for it, in which thread or process, or on which device.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

_WORD_GOLDEN, _WORD_FIRST, _WORD_SECOND = map(np.uint64, (_GOLDEN, _FIRST, _SECOND))
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_TO_24_BITS = np.uint64(40)  # as many as a float32 holds exactly
_UNIT = np.float32(2.0**-24)

ORDER = 0x6F72646572  # purposes, so that an order and a sample never share a key
COLLATE = 0x636F6C6C
WORKERS = 0x776F726B
SAMPLER = 0x73616D70
TRANSFORM = 0x7472616E


def mix(*words: int) -> int:
    """Hash whole numbers (their lowest 64 bits) to one of 64 bits."""
    state = 0
    for word in words:
        state = _finished(state ^ (word & _MASK))
    return state


def _finished(state: int) -> int:
    """splitmix64 of a word of 64 bits."""
    state = (state + _GOLDEN) & _MASK
    state = (state ^ (state >> 30)) * _FIRST & _MASK
    state = (state ^ (state >> 27)) * _SECOND & _MASK
    return state ^ (state >> 31)


@lru_cache(maxsize=16)
def _of_epoch(seed: int, epoch: int) -> int:
    """What all keys of an epoch begin with; threads ask for one a sample."""
    return mix(seed, epoch)


def sample_key(seed: int, epoch: int, index: int) -> int:
    """64 bits for one sample of one epoch: the whole of a sample's randomness."""
    return _finished(_of_epoch(seed, epoch) ^ (index & _MASK))


def sample_keys(seed: int, epoch: int, indices: Indices) -> Words:
    """The same numbers as `sample_key`, for int64 [N] indices at once: uint64 [N]."""
    return _finish(np.uint64(mix(seed, epoch)) ^ indices.astype(np.uint64))


def permutation(count: int, seed: int, epoch: int) -> Indices:
    """The shuffled order of an epoch: int64 [count]."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, ORDER))
    order: Indices = torch.randperm(count, generator=generator, device="cpu").numpy()
    return order


def workers_generator(seed: int, epoch: int) -> torch.Generator:
    """What DataLoader draws its workers' seed from: else it would draw from the global one."""
    return torch.Generator().manual_seed(mix(seed, epoch, WORKERS))


def _finish(words: Words) -> Words:
    """splitmix64 of each word, as in `mix`."""
    words = words + _WORD_GOLDEN  # a new array; the rest is done in place
    words ^= words >> _SHIFTS[0]
    words *= _WORD_FIRST
    words ^= words >> _SHIFTS[1]
    words *= _WORD_SECOND
    words ^= words >> _SHIFTS[2]
    return words


@lru_cache(maxsize=256)
def _draw_words(draw: int, columns: int) -> Words:
    words: Words = np.array([mix(draw, column) for column in range(columns)], dtype=np.uint64)
    words.flags.writeable = False
    return words


class SampleRandom:
    """Random numbers for the samples of one batch, for transforms that run on the device.

    Each is a pure function of (seed, epoch, sample index, number of the draw), so a sample is
    changed in the same way whatever batch, plan or device it came through. They are computed on
    the host, which makes them the same everywhere, and copied; draw a few columns a sample, not
    one a pixel.
    """

    def __init__(self, seed: int, epoch: int, indices: Indices, device: torch.device) -> None:
        self._seed = seed
        self._epoch = epoch
        self._indices = indices
        self._device = device
        self._draws = 0

    def __len__(self) -> int:
        return len(self._indices)

    @cached_property
    def _keys(self) -> Words:
        """uint64 [B]; made when first drawn from, as most transforms draw nothing."""
        return sample_keys(mix(self._seed, TRANSFORM), self._epoch, self._indices)

    def uniform(self, columns: int = 1) -> torch.Tensor:
        """The next draw: float32 [B, columns] in [0, 1), on the batch's device."""
        self._draws += 1
        words = _finish(self._keys[:, None] ^ _draw_words(self._draws, columns))
        values = (words >> _TO_24_BITS).astype(np.float32)
        values *= _UNIT
        return torch.from_numpy(values).to(self._device)
