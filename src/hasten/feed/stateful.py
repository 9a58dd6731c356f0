"""What samplers keep of their own (`state_dict`, `load_state_dict`), as a position takes it along.

It is taken before an epoch's first index is drawn: batches are drawn ahead of the loop, so what a
sampler says later is of no batch that the loop knows. From there the epoch is drawn again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from hasten.errors import UsageError
from hasten.feed.describe import text_of

_log = logging.getLogger("hasten.feed")

KEY = "samplers"
"""Of the states in a position: a list, outermost sampler first."""

_DEPTH = 8  # batch samplers around samplers; more is a circle


class Stateful:
    """The samplers of a Loader, from the outermost in, that have a state of their own.

    Not a `DistributedSampler`: its order follows from its seed and epoch, and what torchdata's
    keeps beside is how much of an epoch it gave.
    """

    def __init__(self, sampler: Any) -> None:
        """`sampler` may be a batch sampler, and hold others as its `sampler`."""
        self._owners = [
            owner
            for owner in _chain(sampler)
            if callable(getattr(owner, "state_dict", None))
            and callable(getattr(owner, "load_state_dict", None))
            and not isinstance(owner, DistributedSampler)
        ]
        self._told = False

    def taken(self) -> dict[str, Any]:
        """The states now, for a position; nothing where no sampler has one."""
        return {KEY: [self._taken(owner) for owner in self._owners]} if self._owners else {}

    def _taken(self, owner: Any) -> dict[str, Any]:
        try:
            return {"state": _plain(owner.state_dict())}
        except _OddError as odd:
            lost = (
                f"state_dict() of the {type(owner).__name__} has a {odd}, which a checkpoint does "
                "not take (numbers, text, tensors, and lists and dicts of those)"
            )
        if not self._told:
            self._told = True
            _log.warning("a position will be without the sampler's own state: %s", lost)
        return {"lost": lost}

    def check(self, position: Mapping[str, Any]) -> None:
        """Whether a position is one of these samplers.

        Raises:
            UsageError: it is not; going on from it would give another order.
        """
        if not position["batch"] and KEY not in position:
            return  # an epoch by its number
        states = position.get(KEY, [])
        if not isinstance(states, list) or len(states) != len(self._owners):
            names = ", ".join(type(owner).__name__ for owner in self._owners) or "none"
            raise UsageError(
                f"the position has states of {len(states)} samplers, and those here that have one "
                f"({names}) are {len(self._owners)}: it was saved with other samplers, whose order "
                "is another"
            )

    def put_back(self, position: Mapping[str, Any]) -> None:
        """Let them be as they were in a position that was checked.

        Raises:
            UsageError: one does not take its state back.
        """
        for owner, kept in zip(self._owners, position.get(KEY, ()), strict=False):
            if "lost" in kept:
                _log.warning("the epoch's order may be another: %s", kept["lost"])
                continue
            try:
                owner.load_state_dict(_plain(kept["state"]))  # a copy: it may go on with it
            except Exception as error:
                raise UsageError(
                    f"the {type(owner).__name__} does not take back the state of its own that the "
                    f"position has: {type(error).__name__}: {text_of(error)}"
                ) from error


def _chain(sampler: Any) -> list[Any]:
    found: list[Any] = []
    while sampler is not None and len(found) < _DEPTH:
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


class _OddError(Exception):
    """Of a value: the name of its type, which is none of the plain ones."""


def _plain(value: Any) -> Any:
    """A copy of a nest of plain values: what `torch.load(weights_only=True)` reads.

    Raises:
        _OddError: it has others.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is torch.Tensor:
        return value.detach().clone()
    if isinstance(value, dict):
        return {_plain_key(key): _plain(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(_plain(item) for item in value)
    raise _OddError(kind.__name__)


def _plain_key(key: Any) -> Any:
    if type(key) not in (bool, int, float, str):
        raise _OddError(f"key of type {type(key).__name__}")
    return key
