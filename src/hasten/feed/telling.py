"""The one line that says a plan and why: to the log, and to a person who looks at a terminal."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import Any

from hasten.devices.launchers import is_first
from hasten.feed.plan import Plan

_log = logging.getLogger("hasten.feed")

_told: set[tuple[str, str, int]] = set()
"""What was said in this process: more Loaders of the same kind need no more lines."""


def chosen(plan: Plan) -> None:
    """Log a plan, where logging wants it."""
    _log.info("feed: %s", plan)


def begun(plan: Plan, dataset: Any) -> None:
    """Write the line of a plan that begins to run to stderr, once, if a person looks there.

    Not where logging says it, or was told not to; nor from the processes of a launcher but the
    first, nor from worker processes, nor to files, pipes and captured output; nor of a simulated
    device, whose plan is not this machine's.
    """
    if _log.level != logging.NOTSET or _log.isEnabledFor(logging.INFO):
        return
    kind = (f"{type(dataset).__module__}.{type(dataset).__qualname__}", plan.name, plan.workers)
    if kind in _told or not _somebody_looks():
        return
    _told.add(kind)
    sys.stderr.write(f"feed: {plan}\n")


def silence(loader: Any) -> None:
    """Write no line of a Loader: who iterates it tells of its plan himself."""
    loader._feeds.silent = True


def _is_simulated() -> bool:
    module = sys.modules.get("hasten.simulate.current")  # not there as long as nobody simulates
    return getattr(module, "session", None) is not None


def _somebody_looks() -> bool:
    there: Any = sys.stderr  # None of a program without a console
    if there is None or there.closed or not there.isatty():
        return False
    return multiprocessing.parent_process() is None and is_first() and not _is_simulated()
