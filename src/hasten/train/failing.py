"""A process that ends by an error tells the others which, before they lose it.

What fails outside of an agreement (a sample that only one process reads, memory that only one
lacks, an exception in somebody's loop) leaves the others waiting in a collective until the
connection closes. The text is left where the processes met, for them to find then; and where all
fail alike, the first one says it for all.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hasten.errors import HastenError, Interrupted
from hasten.train import stacks

_WAIT_S = 2.0  # for the first process to say the same
_POLL_S = 0.05
_LONGEST = 2000
_early: Any = None  # where processes can tell each other something before they have met


def post(rank: int, error: BaseException) -> None:
    """Leave what this process fails with where the others can find it."""
    store = _store()
    if store is not None:
        _try(lambda: store.set(_key(rank), words(error)[:_LONGEST]))


def found(size: int) -> tuple[int, str] | None:
    """The first of the processes that has left word of its failure, and what it failed with."""
    store = _store()
    for rank in range(size if store is not None else 0):
        text = _read(store, rank)
        if text is not None:
            return rank, text
    return None


def first_says_too(error: BaseException, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether the first process fails with the same; it is waited for a moment."""
    store, end, said = _store(), clock() + _WAIT_S, words(error)[:_LONGEST]
    while store is not None:
        text = _read(store, 0)
        if text is not None:
            return text == said
        if clock() >= end:
            break
        time.sleep(_POLL_S)
    return False


def tell(rank: int, size: int, error: BaseException) -> bool:
    """Tell the others of an error that is going to end this process.

    Returns:
        Whether there is nothing to say here, for the first process says it.
    """
    if getattr(error, "silent", False):
        return True
    if isinstance(error, Interrupted):  # all are, at the same step
        return rank != 0
    if getattr(error, "told", False) or not isinstance(error, Exception) or lost_a_peer(error):
        return False
    post(rank, error)
    return rank != 0 and size > 1 and first_says_too(error)


def watch(rank: int, size: int) -> Callable[[], None]:
    """Tell the others of what ends this process with a traceback, from now on.

    Returns:
        Ends it.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if tell(rank, size, error):
            return
        before(kind, error, trace)
        other = found(size) if lost_a_peer(error) else None
        if other is not None and rank == 0:
            sys.stderr.write(f"error: rank {other[0]} failed: {other[1]}\n")

    def end() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return end


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone or does not answer."""
    if isinstance(error, dist.DistError):
        return True
    return "gloo/transport" in str(error) or "Connection closed by peer" in str(error)


def words(error: BaseException) -> str:
    """An error, and the line of somebody's own code that it came from."""
    if isinstance(error, HastenError):
        return str(error)
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    at = stacks.own(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return said if at is None else f"{said} ({stacks.place(at)})"


def _key(rank: int) -> str:
    # A launcher that starts the processes anew lets them meet in the same store.
    return f"hasten/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def tell_early(rank: int, size: int, error: BaseException, store: Any) -> bool:
    """:func:`tell` of processes that fail before they have met.

    Args:
        rank: of this process.
        size: processes.
        error: what ends it.
        store: where they would meet; it need not be there.
    """
    global _early
    _early = store
    try:
        return tell(rank, size, error)
    finally:
        _early = None


def _store() -> Any:
    if _early is not None:
        _early.set_timeout(timedelta(seconds=_WAIT_S))
        return _early
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=_WAIT_S))  # it may be gone with the process that has it
    return store


def _read(store: Any, rank: int) -> str | None:
    key = _key(rank)
    text = _try(lambda: store.get(key).decode() if store.check([key]) else None)
    return text if isinstance(text, str) else None


def _try(act: Callable[[], Any]) -> Any:
    """What is asked of a store that may be gone, with the process that has it: then None."""
    try:
        return act()
    except RuntimeError:
        return None
