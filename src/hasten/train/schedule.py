"""When something recurs: every so many steps, minutes or epochs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hasten.errors import UsageError

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600}


@dataclass(frozen=True, kw_only=True)
class Every:
    """A period in steps, seconds or epochs; exactly one is set, or none for never."""

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.steps, self.seconds, self.epochs) if v is not None]
        if len(given) > 1 or any(value <= 0 for value in given):
            raise UsageError(f"a period has one positive part of steps, seconds, epochs: {self!r}")

    @staticmethod
    def parse(text: str | Every | None) -> Every:
        """``"500 steps"``, ``"10 min"``, ``"1 epoch"``, ``"never"``.

        Raises:
            UsageError: the text is none of these.
        """
        if isinstance(text, Every):
            return text
        if text is None or text.strip().lower() == "never":
            return Every()
        found = _FORM.fullmatch(text)
        if found:
            number = float(found[1])
            unit = found[2].lower()
            unit = unit if unit in _SECONDS else unit.removesuffix("s")
            if unit in _SECONDS and number > 0:
                return Every(seconds=number * _SECONDS[unit])
            if unit in ("step", "epoch") and number >= 1 and number == int(number):
                return Every(**{unit + "s": int(number)})
        raise UsageError(
            f"cannot read the period {text!r}; write it like '500 steps', '10 min', '1 epoch'"
            " or 'never'"
        )

    def due(self, *, steps: int, seconds: float) -> bool:
        """Whether the period in steps or seconds has passed; epochs are asked at their end."""
        if self.steps is not None:
            return steps >= self.steps
        return self.seconds is not None and seconds >= self.seconds
