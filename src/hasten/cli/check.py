"""`hasten check`: find device bugs and slow habits in somebody's script, without a GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hasten.cli import output
from hasten.errors import UsageError

if TYPE_CHECKING:
    from hasten.script.findings import Finding
    from hasten.script.rehearsal import Outcome

_FORMATS = ("text", "json", "github", "sarif")
_VALUED = ("--steps", "--devices", "--timeout-s", "--format")
_FLAGS = ("--json", "--static", "--keep")


class CheckCommand(TyperCommand):
    """Leaves what follows the script's name to the script, as `python` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line at the script's name."""
        return super().parse_args(ctx, split(args))


def split(args: list[str]) -> list[str]:
    """The arguments with `--` where the script's begin, hasten's own options before it.

    Options of hasten's that stand behind the script's name are still hasten's where the script's
    source does not mention them; `--` before the script's arguments ends that.
    """
    own: list[str] = []
    rest = list(args)
    script = ""
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*own, "--", *rest]
        if word in ("-m", "--explain") or word in _VALUED:
            own += [word, *rest[:1]]
            script = rest.pop(0) if rest else ""
            if word == "-m":
                break
        elif word.startswith("-") and word != "-":
            own.append(word)
        else:
            script = word
            break
    if "-m" not in own and script and not (own and own[-1] == script):
        rest.insert(0, script)
    head, tail = rest[:1] if "-m" not in own else [], rest[1:] if "-m" not in own else rest
    behind, tail = _behind(script, tail, static="--static" in own)
    return [*own, *behind, "--", *head, *tail] if head or tail else [*own, *behind]


def _behind(script: str, tail: list[str], static: bool) -> tuple[list[str], list[str]]:
    """hasten's options among the words behind the script's name, and the others."""
    try:
        text = "" if static else Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    own: list[str] = []
    left: list[str] = []
    words = list(tail)
    while words:
        word = words.pop(0)
        name = word.partition("=")[0]
        if word == "--":
            return own, [*left, *words]
        if name not in (*_VALUED, *_FLAGS) or _mentions(text, name):
            left.append(word)
        elif word in _VALUED:
            own += [word, *words[:1]]
            words = words[1:]
        else:
            own.append(word)
    return own, left


# Libraries that make options of the names of parameters and fields.
_FROM_NAMES = re.compile(
    r"\b(fire|typer|click|tyro|jsonargparse|simple_parsing|HfArgumentParser|absl|plac)\b"
)


def _mentions(text: str, option: str) -> bool:
    if re.search(rf"{option}(?![\w-])", text):
        return True
    # Elsewhere a name is only a name: `logging.basicConfig(format=...)`, `steps = 0`.
    word = option.lstrip("-").replace("-", "_")
    named = re.search(rf"\b{word}\s*[:=,)]", text)
    return named is not None and _FROM_NAMES.search(text) is not None


def check(
    script: Annotated[
        str | None,
        typer.Argument(
            help="The script, as after `python`. With --static also a folder or a notebook.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.", show_default=False)
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as `python -m` does.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Read only, do not run.")] = False,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps in each training loop before it is ended.")
    ] = 3,
    devices: Annotated[int, typer.Option(help="Simulated devices.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Seconds before the script is stopped.")] = 120.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Let the script write its files where it wants.")
    ] = False,
    format: Annotated[  # noqa: A002
        str, typer.Option(help="text, json, github or sarif.")
    ] = "text",
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="CODE", help="Say what a code such as HST101 means.")
    ] = None,
) -> int:
    """Say what would go wrong, or slowly, on a GPU in an unmodified script. No GPU is needed.

    The script runs for a few steps on a simulated accelerator; device faults are reported at your
    own line, repaired, and the run goes on. Options stand before SCRIPT. Exit status 0 clean,
    1 errors or warnings found, 2 wrong usage or the script failed for a reason of its own.

    Examples: `hasten check train.py --epochs 5`, `hasten check --devices 2 -m package.train`,
    `hasten check --static src/`.
    """
    if explain is not None:
        return _explain(explain)
    format = "json" if json else format  # noqa: A001
    if format not in _FORMATS:
        raise UsageError(f"--format {format}: one of {', '.join(_FORMATS)}")
    given = list(arguments or ())
    if module is not None and script is not None:
        given.insert(0, script)
    name = module or script
    if name is None:
        raise UsageError("name the script to check: hasten check SCRIPT [arguments of the script]")
    if static:
        if module is not None:
            raise UsageError("--static reads files: name the module's file or folder instead of -m")
        return _read([name, *given], format)
    return _rehearse(
        name,
        tuple(given),
        module is not None,
        format,
        steps=steps,
        devices=devices,
        timeout_s=timeout_s,
        keep=keep,
    )


def _read(names: list[str], format: str) -> int:  # noqa: A002
    from hasten.script.findings import fails, joined_by_loader
    from hasten.script.rules import check_paths

    findings = joined_by_loader(check_paths(names))
    status = 1 if fails(findings) else 0
    facts = {"script": " ".join(names), "steps": 0, "devices": 0, "exit": status}
    _print(findings, format, facts)
    _say(_summary(findings, "read"), format)
    return status


def _rehearse(
    name: str,
    given: tuple[str, ...],
    as_module: bool,
    format: str,  # noqa: A002
    **how: Any,
) -> int:
    from hasten.script.findings import merge
    from hasten.script.rehearsal import Request, rehearse
    from hasten.script.rehearsal.choosing import wanted
    from hasten.script.rules import check_file
    from hasten.script.rules.settings import settings_for

    request = Request(script=name, arguments=given, as_module=as_module, **how)
    settings_for(Path("." if as_module else name, "_"))  # what is wrong in them is said at once
    stream = output.people_stream(format != "text")
    stream.flush()
    outcome = rehearse(request, output=stream if _has_descriptor(stream) else None)
    if outcome.ending == "died" and not outcome.files:
        raise UsageError(outcome.error)
    static = [finding for file in outcome.files for finding in check_file(file)]
    findings = merge(static, wanted(outcome.findings))
    status = _status(outcome, findings)
    _print(
        findings,
        format,
        {
            "script": name,
            "steps": outcome.steps,
            "devices": request.devices,
            "exit": status,
            "ending": outcome.ending,
            "said": list(outcome.said),
            "error": outcome.error,
        },
    )
    for sentence in outcome.said:
        _say(f"note: {sentence}", format)
    if outcome.ending == "failed":
        _say(f"\n{outcome.error.rstrip()}\n", format)
        if "docs/simulate.md" not in outcome.error:
            _say("This error is the script's own, not a device fault.", format)
    elif outcome.ending == "died":
        _say(f"error: {outcome.error}", format)
    elif outcome.ending == "device":
        _say(f"\n{outcome.error.rstrip()}\n", format)
        _say("This is a device fault that could not be repaired; what follows was not run.", format)
    stopped = "" if outcome.ending in ("finished", "enough") else ", stopped early"
    _say(_summary(findings, f"{outcome.steps} optimizer steps rehearsed{stopped}"), format)
    return status


def _status(outcome: Outcome, findings: list[Finding]) -> int:
    from hasten.script.findings import fails

    if outcome.ending in ("failed", "died") or (outcome.ending == "time" and not outcome.steps):
        return 2
    return 1 if fails(findings) else 0


def _has_descriptor(stream: Any) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _summary(findings: list[Finding], how: str) -> str:
    from hasten.script.output import counted

    return f"{counted(findings)} ({how})"


def _say(text: str, format: str) -> None:  # noqa: A002
    print(text, file=output.people_stream(format != "text"))


def _print(findings: list[Finding], format: str, facts: dict[str, Any]) -> None:  # noqa: A002
    from hasten.script import output as rendering

    if format == "json":
        output.print_json(
            {
                "script": facts["script"],
                "findings": [finding.to_json() for finding in findings],
                **{key: value for key, value in facts.items() if key != "script"},
            }
        )
        return
    if format == "text":
        shown = rendering.text(
            findings, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ
        )
    else:
        shown = rendering.github(findings) if format == "github" else rendering.sarif(findings)
    if shown:
        sys.stdout.write(shown.rstrip("\n") + "\n")
        sys.stdout.flush()


def _explain(code: str) -> int:
    from hasten.script.rules import explain

    sys.stdout.write(explain(code.upper()) + "\n")
    return 0
