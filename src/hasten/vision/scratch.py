"""Memory for what a thread needs for a moment only, used again for its next picture.

The kernel hands out fresh memory page by page, zeroed: a decoded picture of 500x375 takes 140 of
them where the allocator has none left to give again.
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 16 << 20
"""More is not kept: a thread's memory stays with it, and of larger pictures there are few."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.blocks: dict[str, NDArray[np.uint8]] = {}


_of_thread = _OfThread()


def empty(purpose: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uninitialised memory that is the caller's until this thread asks for the same purpose again.

    Returns:
        uint8 of that shape, contiguous, writeable.
    """
    size = math.prod(shape)
    if size > KEPT_BYTES:
        return np.empty(shape, np.uint8)
    block = _of_thread.blocks.get(purpose)
    if block is None or block.size < size:
        block = _of_thread.blocks[purpose] = np.empty(min(size + size // 2, KEPT_BYTES), np.uint8)
    return block[:size].reshape(shape)
