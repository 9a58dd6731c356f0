"""The one simulation that runs in this process, if any, and what each thread is doing in it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.simulate.session import Session

session: Session | None = None


class _Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.device = 0
        """The current device's index."""
        self.counted = False
        """Whether the wait of the print under way has been counted."""
        self.reason: str | None = None
        """Why the host is about to wait, when a caller knows better than the operator."""
        self.backward = False
        """Whether a backward pass is under way."""
        self.error: Exception | None = None
        """What a hook of that backward pass has raised."""
        self.repairing = False
        """Whether the call under way may be made again with its operands moved."""
        self.streams: dict[int, Any] = {}
        """The current stream of each device, where it is not the default stream."""


thread = _Thread()


def require() -> Session:
    """The running simulation.

    Raises:
        RuntimeError: none runs; a tensor has outlived its simulation.
    """
    if session is None:
        raise RuntimeError(
            "there is no accelerator here: the simulation that the device was part of has ended; "
            "copy what is needed afterwards to the CPU inside `with hasten.simulate():`"
        )
    return session
