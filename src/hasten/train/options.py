"""The options that Run and Trainer take as keyword arguments: shown, and checked by their names."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, TypeVar, cast

from hasten.errors import UnknownOption
from hasten.train.settings import RunOptions, RunSettings

C = TypeVar("C", bound=type)

_PLACE = "    options:"


def shown(owner: C) -> C:
    """Decorate a class that takes ``**options`` of a run: its signature and its docstring, where
    that has a line ``options: …`` among its arguments, list them by name."""
    made = cast(Any, owner).__init__
    own = inspect.signature(made)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = inspect.signature(RunSettings).parameters.values()
    made.__signature__ = own.replace(parameters=[*named, *options])
    text, meanings = inspect.getdoc(owner), inspect.getdoc(RunSettings)
    if text and meanings:  # python -OO has neither
        listed = meanings.partition("Args:\n")[2].partition("\n\n")[0]
        lines = [listed if line.startswith(_PLACE) else line for line in text.splitlines()]
        owner.__doc__ = "\n".join(lines)
    return owner


def settings_of(made: object, options: RunOptions) -> RunSettings:
    """The settings that an object's options ask for.

    Args:
        made: the Run or Trainer that was given them.
        options: by name.

    Raises:
        UnknownOption: there is none of that name.
        UsageError: a value is out of range, or two contradict each other.
    """
    kind = next(each for each in type(made).__mro__ if each.__module__.startswith("hasten."))
    known = list(inspect.signature(kind).parameters)
    for name in options:
        if name not in RunSettings.__dataclass_fields__:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            where = f"help(hasten.{kind.__name__}) and docs/train.md list those that there are"
            raise UnknownOption(f"hasten.{kind.__name__} has no option {name!r}{meant}; {where}")
    return RunSettings(**options)
