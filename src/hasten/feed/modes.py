"""The modes that the loop's thread is in as an epoch begins, for threads that make its samples.

Modes of PyTorch (gradients, inference, autocast, the default device) and context variables (those
of `np.errstate` and `decimal.localcontext` among them) belong to a thread. A process that is forked
has those of the thread that it was forked by; a new thread has none of them.
"""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from hasten.devices import runtime


class Modes:
    """Those of the thread that this is made in."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._autocast = runtime.autocasts()
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()

    @property
    def key(self) -> tuple[object, ...]:
        """PyTorch's, to be compared with those of another moment."""
        return self._gradients, self._inference, str(self._device), str(self._autocast)

    def during(self, work: Callable[[], None]) -> None:
        """Do this within them, in another thread."""
        self._context.copy().run(self._within, work)  # one cannot be entered by two threads

    def _within(self, work: Callable[[], None]) -> None:
        with ExitStack() as modes:
            if self._inference:
                modes.enter_context(torch.inference_mode())
            modes.enter_context(torch.set_grad_enabled(self._gradients))
            for kind, dtype in self._autocast.items():
                # Without its cache, which would keep what weights were when the epoch began.
                modes.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            if self._device.type != "cpu":
                modes.enter_context(self._device)
            work()


def ambient() -> tuple[object, ...]:
    """What samples follow from beside objects, as it is in this thread: to be compared later."""
    exact = decimal.getcontext()
    return Modes().key, torch.get_default_dtype(), np.geterr(), exact.prec, exact.rounding


@contextmanager
def one_thread() -> Iterator[None]:
    """In here, PyTorch computes in the thread that asks (to change that takes 0.1 µs)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
