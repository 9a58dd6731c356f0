"""Rules: what can be seen in a script without running it. One file a rule.

`check_file` and `check_paths` read files, notebooks and folders; `explain` gives a rule's page.
LibCST is imported when a file is checked, not before.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import UsageError
from hasten.script.findings import KINDS, Finding, in_order
from hasten.script.rules.settings import Settings, settings_for
from hasten.script.rules.sources import Source, Unreadable, read, sources_in

if TYPE_CHECKING:
    from hasten.script.rules.file import Rule

_RANK = ("error", "warning", "suggestion")

__all__ = ["Settings", "all_rules", "check_file", "check_paths", "check_source", "explain"]


@cache
def all_rules() -> tuple[Rule, ...]:
    """One of each rule, in order of their codes."""
    found: dict[str, Rule] = {}
    for entry in pkgutil.iter_modules(__path__):
        if entry.name.startswith("hst"):
            module = importlib.import_module(f"{__name__}.{entry.name}")
            for thing in vars(module).values():
                own = inspect.isclass(thing) and thing.__module__ == module.__name__
                if own and hasattr(thing, "code"):
                    found[thing.code] = thing()
    return tuple(found[code] for code in sorted(found))


def check_file(source: str | Path, *, settings: Settings | None = None) -> list[Finding]:
    """The findings of all rules in one file or notebook.

    Args:
        source: a path to a ``.py`` or ``.ipynb`` file, or source text (a string with a newline).
        settings: which rules; those of the nearest ``pyproject.toml`` when not given.

    Returns: findings in order of line. A file that cannot be read gives one, HST100.
    """
    if isinstance(source, str) and "\n" in source:
        return check_source(source, settings=settings)
    path = Path(source)
    chosen = settings or settings_for(path)
    try:
        text = read(path)
    except Unreadable as problem:
        return chosen.kept([problem.finding])
    return _check(text, chosen)


def check_source(
    text: str, path: str = "<source>", *, settings: Settings | None = None
) -> list[Finding]:
    """The findings of all rules in source text; `path` is the file's name in them."""
    return _check(Source.of_text(text, path), settings or Settings())


def check_paths(paths: Iterable[str | Path], *, settings: Settings | None = None) -> list[Finding]:
    """The findings in files and notebooks, and in all of those below folders.

    Raises:
        UsageError: a path does not exist.
    """
    found: list[Finding] = []
    for path in sources_in(paths):
        found += check_file(path, settings=settings)
    return in_order(found)


def _check(source: Source, settings: Settings) -> list[Finding]:
    from hasten.script.rules.reading import parse

    try:
        file = parse(source)
    except Unreadable as problem:
        return settings.kept([problem.finding])
    if file is None:
        return []
    found: list[Finding] = []
    for rule in all_rules():
        if settings.wants(rule.code, source.path):
            found += _once(rule.check(file))
    return in_order(source.placed(settings.kept(source.not_ignored(found))))


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a line, the worst."""
    lines: dict[int, Finding] = {}
    for finding in in_order(findings):
        old = lines.get(finding.line)
        if old is None or _RANK.index(finding.severity) < _RANK.index(old.severity):
            lines[finding.line] = finding
    return list(lines.values())


def explain(code: str) -> str:
    """The page of a rule as Markdown: what it finds, why that is bad, bad and good, fix safety.

    Raises:
        UsageError: there is no such code; the message names those there are.
    """
    wanted = code.strip().upper()
    for rule in all_rules():
        if rule.code == wanted:
            return page(rule)
    if wanted in KINDS:
        kind = KINDS[wanted]
        seen = (
            "when a file is read"
            if wanted == "HST100"
            else "by running (hasten check SCRIPT), not by reading"
        )
        said = kind.summary[0].upper() + kind.summary[1:]
        return f"# {wanted}: {kind.name}\n\n{said}.\n\nSeverity: {kind.severity}. Found {seen}.\n"
    known: Sequence[str] = sorted(KINDS)
    raise UsageError(f"there is no rule {code!r}; there are {', '.join(known)}")


def page(rule: Rule) -> str:
    """A rule's page, from its docstring."""
    kind = KINDS[rule.code]
    text = inspect.cleandoc(type(rule).__doc__ or "")
    first, _, rest = text.partition("\n")
    return (
        f"# {rule.code}: {kind.name}\n\n{first}\n\n"
        f"Severity: {kind.severity}, where it is proven. Switch it off on one line with"
        f" `# hasten: ignore[{rule.code}]`.\n{rest.rstrip()}\n"
    )
