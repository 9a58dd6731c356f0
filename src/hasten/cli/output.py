"""What commands print: people's text on one stream, one JSON object on the other."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

SCHEMA = 1
_ENDED = (errno.EPIPE, errno.ESHUTDOWN)


def people_stream(as_json: bool) -> TextIO:
    """Where text for people goes: standard output, or standard error beside ``--json``."""
    return sys.stderr if as_json else sys.stdout


def tell(text: str, stream: TextIO) -> None:
    """Print a line for people; where nobody reads any more (`| head`), what follows goes nowhere.

    It is for work whose result is not what it prints: training goes on to its end.
    """
    import typer

    try:
        typer.echo(text, file=stream)
    except OSError as error:
        if error.errno not in _ENDED:
            raise
        discard(stream)


def discard(stream: TextIO) -> None:
    """Let all that is written to a stream of the system's go nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console(as_json: bool = False) -> Console:
    """A rich console on :func:`people_stream`; plain text where that is no terminal."""
    from rich.console import Console

    stream = people_stream(as_json)
    width = None if stream.isatty() else 160  # a table in a file is not folded at 80 columns
    return Console(file=stream, highlight=False, soft_wrap=False, width=width)


def print_json(content: dict[str, Any] | list[Any]) -> None:
    """Print one JSON object, last, on standard output, with hasten's version and the schema.

    Numbers that JSON does not know (NaN, infinities) become null.
    """
    from hasten import __version__

    if isinstance(content, dict):
        content = {"hasten": __version__, "schema": SCHEMA, **content}
    as_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    json.dump(_finite(content), sys.stdout, ensure_ascii=not as_utf8, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
