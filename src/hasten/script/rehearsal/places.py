"""Places in the user's own code: which frames are theirs, and the stack of them at a moment."""

from __future__ import annotations

import ast
import functools
import linecache
import site
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple


class Place(NamedTuple):
    """A line of the user's code that was running.

    Attributes:
        file: absolute path.
        line: from 1.
        function: qualified name of the function (``Net.forward``, ``<module>``).
        frame: identity of the call, to tell whether two places lie in one call.
    """

    file: str
    line: int
    function: str
    frame: int


Stack = tuple[Place, ...]


class Territory:
    """Whose code is whose: all that is no library is the user's."""

    def __init__(self, own: str | None = None) -> None:
        paths = sysconfig.get_paths()
        libraries = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
        libraries.update(site.getsitepackages())
        libraries.add(site.getusersitepackages())
        libraries.add(str(Path(__file__).parents[2]))  # hasten itself
        libraries.add(str(Path(sys.modules["torch"].__file__ or "").parent))
        libraries.update(entry for entry in sys.path if _is_installed_into(entry))
        libraries -= {own, str(Path.cwd())}
        self._libraries = tuple(path.rstrip("/") + "/" for path in libraries)
        self._own = None if own is None else own.rstrip("/") + "/"
        self._known: dict[str, bool] = {}

    def holds(self, file: str) -> bool:
        """Whether a file is the user's."""
        known = self._known.get(file)
        if known is None:
            known = self._known[file] = self._decide(file)
        return known

    def _decide(self, file: str) -> bool:
        if file.startswith("<") or not file:
            return False
        if self._own is not None and file.startswith(self._own):
            inside = file[len(self._own) :]
            return "site-packages/" not in inside and not self._is_hasten(file)
        return not file.startswith(self._libraries)

    def _is_hasten(self, file: str) -> bool:
        return file.startswith(str(Path(__file__).parents[2]) + "/")

    def frames(self, start: FrameType | None = None) -> list[FrameType]:
        """The user's frames, innermost first."""
        frame = start if start is not None else sys._getframe(1)
        found: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None:
            if self.holds(at.f_code.co_filename):
                found.append(at)
            at = at.f_back
        return found

    def stack(self, start: FrameType | None = None) -> Stack:
        """The user's places, innermost first; empty where no user code runs."""
        at: FrameType | None = start if start is not None else sys._getframe(1)
        known, found = self._known, []
        while at is not None:
            code = at.f_code
            mine = known.get(code.co_filename)
            if mine is None:
                mine = self.holds(code.co_filename)
            if mine:
                found.append(Place(code.co_filename, at.f_lineno, code.co_qualname, id(at)))
            at = at.f_back
        return tuple(found)


def _is_installed_into(folder: str) -> bool:
    """Whether packages were installed into a folder, as pip does with `--target` too."""
    return bool(folder) and next(Path(folder).glob("*.dist-info"), None) is not None


def source_line(file: str, line: int) -> str:
    """The text of a line, stripped."""
    return linecache.getline(file, line).strip()


@functools.lru_cache(maxsize=64)
def tree(file: str) -> ast.Module | None:
    """The file's syntax tree; None where it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


@functools.lru_cache(maxsize=1024)
def statement(file: str, line: int) -> ast.stmt | None:
    """The innermost statement that a line belongs to (for compound ones, their head)."""
    module = tree(file)
    best: ast.stmt | None = None
    if module is None:
        return None
    for node in ast.walk(module):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or line):
            continue
        if best is None or node.lineno >= best.lineno:
            best = node
    return best


def argument_line(place: Place, function: str, index: int, keyword: str) -> int:
    """The line that gives an argument of a call at a place; that of the place where none does."""
    at = statement(place.file, place.line)
    for node in ast.walk(at) if at is not None else ():
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(function):
            continue
        named = [k.value for k in node.keywords if k.arg == keyword]
        given = named or node.args[index : index + 1]
        if given and not isinstance(given[0], ast.Starred):
            return given[0].lineno
    return place.line


def expression(frame: FrameType) -> str:
    """The text of the expression that a frame is evaluating, in one line."""
    text = _positions(frame.f_code, frame.f_lasti, frame.f_code.co_filename)
    return text or source_line(frame.f_code.co_filename, frame.f_lineno)


def _positions(code: CodeType, last: int, file: str) -> str:
    for index, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if index == last // 2:
            if None in (line, end_line, column, end_column) or line != end_line:
                return ""
            raw = linecache.getline(file, line or 0).encode()
            return raw[column:end_column].decode(errors="replace").strip()
    return ""


def callers(stack: Stack, most: int) -> Stack:
    """The calls that lead to the innermost place, without the one that only starts the program.

    Args:
        stack: the places, innermost first.
        most: how many calls to return at most.
    """
    return tuple(place for place in stack[1 : most + 1] if not _starts_the_program(place))


def _starts_the_program(place: Place) -> bool:
    """Whether a place is a call such as ``main()``, outside of any loop of the file."""
    if place.function != "<module>":
        return False
    module = tree(place.file)
    loops = (ast.For, ast.AsyncFor, ast.While)
    return module is not None and not any(
        isinstance(node, loops) and node.lineno <= place.line <= (node.end_lineno or 0)
        for node in ast.walk(module)
    )
