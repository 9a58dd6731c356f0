"""Attributes that are replaced while a simulation runs and put back exactly afterwards."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """Remembers what was there, in order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module, a class or an object."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def set_all(self, owner: Any, values: dict[str, Any]) -> None:
        """Replace several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
