"""Files to check: where they are, their text, the cells of notebooks, and ignore comments."""

from __future__ import annotations

import dataclasses
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import UsageError
from hasten.script.findings import Finding, Related

_SKIPPED = {"__pycache__", "node_modules", "build", "dist", "site-packages", "venv", "env"}
_IGNORE = re.compile(r"#\s*hasten:\s*ignore(?:\[([^\]]*)\])?(?!\[)", re.IGNORECASE)
_MAGIC = re.compile(r"^(\s*)([%!?].*|.*\?\s*)$")


class Unreadable(Exception):  # noqa: N818
    """A file that cannot be checked; `finding` says why."""

    def __init__(self, place: tuple[str, int, int], why: str) -> None:
        super().__init__(why)
        self.finding = Finding(
            code="HST100",
            file=place[0],
            line=max(place[1], 1),
            column=max(place[2], 1),
            message=f"cannot be read as Python: {why}",
            fix="mend the file, or leave it out of the check",
        )


@dataclass(frozen=True)
class Source:
    """The text of a file, of a notebook all cells one after another.

    Attributes:
        cells: first line (from 1) of each code cell and its number in the notebook; () for a file.
    """

    path: str
    text: str
    cells: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_text(cls, text: str, path: str) -> Source:
        """Python source."""
        return cls(path, text if text.endswith("\n") else text + "\n")

    def place(self, line: int, column: int) -> tuple[str, int, int]:
        """File, line and column as a person has them: in a notebook of the cell."""
        for first, number in reversed(self.cells):
            if line >= first:
                return f"{self.path}[{number}]", line - first + 1, column
        return self.path, line, column

    def placed(self, findings: Iterable[Finding]) -> list[Finding]:
        """The findings with places as a person has them."""
        if not self.cells:
            return list(findings)
        result = []
        for finding in findings:
            file, line, column = self.place(finding.line, finding.column)
            related = tuple(
                Related(*self.place(place.line, 1)[:2], place.note) for place in finding.related
            )
            message = re.sub(r"on line (\d+)", self._said, finding.message)
            result.append(
                dataclasses.replace(
                    finding, file=file, line=line, column=column, related=related, message=message
                )
            )
        return result

    def _said(self, match: re.Match[str]) -> str:
        file, line, _ = self.place(int(match[1]), 1)
        return f"on line {line} of cell {file.rpartition('[')[2].rstrip(']')}"

    def not_ignored(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those whose line has no `# hasten: ignore` for them."""
        ignored = ignored_lines(self.text)
        kept = []
        for finding in findings:
            codes = ignored.get(finding.line)
            if codes is None or (codes and finding.code not in codes):
                kept.append(finding)
        return kept


def ignored_lines(text: str) -> dict[int, frozenset[str]]:
    """Lines with an ignore comment, from 1: the codes named there, none for all."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if "hasten" in line and (match := _IGNORE.search(line)):
            names = (match[1] or "").replace(",", " ").split()
            if match[1] is not None and not names:
                continue  # `ignore[]` names none
            found[number] = frozenset(name.upper() for name in names)
    return found


def read(path: Path) -> Source:
    """A file's source.

    Raises:
        Unreadable: it does not exist, is no text, or is no notebook.
    """
    name = str(path)
    try:
        if path.suffix == ".ipynb":
            return _notebook(name, path.read_text(encoding="utf-8"))
        with tokenize.open(path) as stream:  # honours the coding line, and a byte order mark
            return Source.of_text(stream.read(), name)
    except OSError as error:
        raise Unreadable((name, 1, 1), error.strerror or str(error)) from None
    except (UnicodeDecodeError, SyntaxError) as error:
        why = error.reason if isinstance(error, UnicodeDecodeError) else error.msg
        raise Unreadable((name, 1, 1), f"it is no text in its encoding ({why})") from None
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable((name, 1, 1), f"it is no notebook ({error})") from None


def _notebook(name: str, text: str) -> Source:
    lines: list[str] = []
    cells: list[tuple[int, int]] = []
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        source = cell["source"]
        body = source if isinstance(source, str) else "".join(source)
        cells.append((len(lines) + 1, number))
        if body.lstrip().startswith("%%") and not body.lstrip().startswith(("%%time", "%%capture")):
            lines += ["# " + line for line in body.splitlines()] or [""]
        else:
            lines += [_MAGIC.sub(r"\1pass", line) for line in body.splitlines()] or [""]
    return Source(name, "\n".join(lines) + "\n", tuple(cells))


def sources_in(paths: Iterable[str | Path]) -> Iterator[Path]:
    """The files to check: those given, and all Python files and notebooks below folders.

    Raises:
        UsageError: a path does not exist.
    """
    for given in paths:
        path = Path(given)
        if path.is_dir():
            for found in sorted(path.rglob("*")):
                inner = found.relative_to(path).parts
                hidden = any(part.startswith(".") or part in _SKIPPED for part in inner)
                if found.suffix in (".py", ".ipynb") and not hidden and found.is_file():
                    yield found
        elif path.exists():
            yield path
        else:
            raise UsageError(f"there is no file or folder {given}")
