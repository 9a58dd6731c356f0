"""Whether a DataLoader that was taken over is still what it was then."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "dataset",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "batch_size",
    "drop_last",
    "sampler",
    "batch_sampler",
    "generator",
    "collate_fn",
    "persistent_workers",
    "in_order",
)
_BY_VALUE = (int, float, bool, str, type(None))


def lasts(loader: Any) -> bool:
    """Whether a DataLoader's worker processes go on from epoch to epoch."""
    return bool(loader.persistent_workers and loader.num_workers)


class Parts:
    """What a DataLoader is made of, as it was when it was taken over."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._lasted = lasts(loader)
        self._then = _now(loader)

    def changed(self, *, begun: bool, loader: Any = None) -> bool:
        """Whether iterating the DataLoader would go another way by now.

        `begun`: workers that last are at work. They see nothing that is set later, but that there
        are none. `loader`: the DataLoader itself, where these are the parts of a copy.
        """
        loader = self._loader if loader is None else loader
        if begun and self._lasted and lasts(loader):
            return False
        return any(not _same(a, b) for a, b in zip(self._then, _now(loader), strict=True))


def _now(loader: Any) -> list[Any]:
    return [getattr(loader, name, None) for name in _NAMES]


def _same(then: Any, now: Any) -> bool:
    return then is now or (type(then) is type(now) and type(now) in _BY_VALUE and then == now)
