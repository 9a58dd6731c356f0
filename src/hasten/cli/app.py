"""The `hasten` command: its sub-commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any, TextIO

import typer

from hasten.cli.check import CheckCommand, check
from hasten.cli.compare import compare
from hasten.cli.devices import devices
from hasten.cli.evaluate import evaluate
from hasten.cli.predict import predict
from hasten.cli.train import train
from hasten.errors import HastenError

# click's own error class, wherever the installed typer has click from (a copy of its own, or not).
_WRONG_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="hasten",
    help="PyTorch training at the speed of whatever device it runs on, measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (devices, train, evaluate, predict, compare):
    app.command()(_command)
app.command(cls=CheckCommand)(check)


def _version(asked: bool) -> None:
    if asked:
        from hasten import __version__

        typer.echo(f"hasten {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0 done, 1 the work failed, 2 wrong usage, 130 Ctrl-C."""
    warnings.showwarning = _warn
    # torch is not imported yet, and reads this when it is. GNU OpenMP's threads otherwise spin at
    # each barrier for as long as a time slice, which on cores that others use too makes a step
    # several times slower: docs/notes/001-threads-that-spin.md has the figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows ASCII alone shows escapes
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result: Any = app(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HastenError as error:
        return _say(f"error: {error}", error.exit_status)
    except typer.Exit as stop:
        return stop.exit_code
    except _WRONG_USAGE as error:
        error.show()
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _say("stopped by Ctrl-C", 130)
    except BrokenPipeError:
        # The reader went away (`| head`): nothing more to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _say(text: str, status: int) -> int:
    print(text, file=sys.stderr)  # noqa: T201
    return status


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if not issubclass(category, (DeprecationWarning, PendingDeprecationWarning, FutureWarning)):
        _say(f"warning: {message}", 0)
