"""Which attributes of a data set hold something else by now, to be named in a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from hasten.feed.inside import inside, walk

_MOST = 3  # names in a message


class Attributes:
    """What the attributes of objects, and of the data sets within them, hold now."""

    def __init__(self, *objects: Any) -> None:
        within = (item for item in walk(objects) if isinstance(item, Dataset))
        whole = {id(item): item for item in (*objects, *within)}
        self._then = [(item, _held(item)) for item in whole.values()]

    def others(self) -> str:
        """Names of those that hold something else by now, in brackets after a space; "" where none
        is seen to."""
        names = [f"{type(item).__name__}.{name}" for item, name in self._other()]
        more = ", …" if len(names) > _MOST else ""
        return f" ({', '.join(names[:_MOST])}{more})" if names else ""

    def _other(self) -> Iterator[tuple[Any, str]]:
        for item, then in self._then:
            now = _held(item)
            yield from ((item, name) for name in {**then, **now} if _differ(then, now, name))


def _held(item: Any) -> dict[str, Any]:
    known = getattr(item, "__dict__", None)
    return {name: inside(value) for name, value in known.items()} if type(known) is dict else {}


def _differ(then: dict[str, Any], now: dict[str, Any], name: str) -> bool:
    try:
        return (name in then) != (name in now) or bool(then[name] != now[name])
    except Exception:  # noqa: BLE001 - of items that do not compare: it is not known which it is
        return False
