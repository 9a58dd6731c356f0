"""The `hasten` command: its sub-commands, and how errors become messages and exit statuses."""

from __future__ import annotations

import io
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from hasten.cli.check import CheckCommand, check
from hasten.cli.compare import compare
from hasten.cli.devices import devices
from hasten.cli.evaluate import evaluate
from hasten.cli.predict import predict
from hasten.cli.train import train
from hasten.errors import HastenError, Interrupted

# click's own error class, wherever the installed typer has click from (a copy of its own, or not).
_WRONG_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_CTRL_C = 130

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
    _open_what_is_closed()
    # torch is not imported yet, and reads this when it is. GNU OpenMP's threads otherwise spin at
    # each barrier for as long as a time slice, which on cores that others use too makes a step
    # several times slower: docs/notes/001-threads-that-spin.md has the figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows ASCII alone shows escapes
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(arguments))


def _open_what_is_closed() -> None:
    """Give streams that the caller closed (`>&-`) a place where what is said goes nowhere.

    Lowest number first: a data file that is opened next would otherwise get the number, and with
    it what C libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    try:
        _check_current_folder()
        result: Any = app(args=arguments, standalone_mode=False, obj=given)
        sys.stdout.flush()
        if result == _CTRL_C:  # typer returns this for a KeyboardInterrupt, and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except Interrupted as stop:  # asked for, and nothing is lost: no error
        return stop.exit_status if _rank() else _say(str(stop), stop.exit_status)
    except HastenError as error:
        world = sys.modules.get("hasten.train.world")
        if world is not None and world.tell_failure(error):
            return error.exit_status
        rank = _rank()
        where = f"rank {rank}: " if rank else ""
        text = f"{where}error: {error}"
        return _say(text + _about_lists(given, text), error.exit_status)
    except typer.Exit as stop:
        return stop.exit_code
    except _WRONG_USAGE as error:
        if _launched_rank() == 0:  # all processes of a launcher are called alike
            error.message += _about_lists(given, error.format_message())
            error.show()
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _say("stopped by Ctrl-C", _CTRL_C)
    except BrokenPipeError:
        # The reader went away (`| head`): nothing more to say, and nowhere to say it.
        _silence_output()
        return 1
    except OSError as error:  # that no command has better words for: a full disk behind `>`
        if error.filename is None:
            _silence_output()  # its buffer is written once more at exit
        return _say(f"error: {_system_error(error)}", 1)
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        return _say(f"error: there is not enough memory for this{reason}", 1)


def _about_lists(given: list[str], message: str) -> str:
    """Where a message refuses several values that `hasten train` was given: who takes them."""
    for before, word in itertools.pairwise(given):
        option, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if given[0] == "train" and "," in value and (value in message or f"'{option}'" in message):
            return f"; several values ({value}) are for hasten compare"
    return ""


def _rank() -> int:
    """Which of the processes this is that a launcher has started; 0 where it is alone.

    What failed before training was thought of is no matter of ranks, and may be why torch cannot
    be imported.
    """
    world = sys.modules.get("hasten.train.world")
    try:
        return 0 if world is None else int(world.place().rank)
    except HastenError:  # the very error that is to be told
        return 0


def _launched_rank() -> int:
    """This process's number among those that torchrun or srun started, as they tell it."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdecimal() else 0


def _check_current_folder() -> None:
    """Say that the current folder is gone: torch would end the process with words of its own.

    Raises:
        HastenError: it was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise HastenError("the current folder was deleted; cd to another one") from None


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"{reason}; is the output going to a disk that is full?"
    return f"{os.fspath(error.filename)!r}: {reason}"


def _silence_output() -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no stream of the system's: nothing is written at exit
        return


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
