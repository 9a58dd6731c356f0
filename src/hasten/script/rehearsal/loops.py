"""Loops that end early: the user's `for` and `while` ask, at each turn, whether to go on.

The source is changed in memory only, on its syntax tree, so that line numbers stay: `for x in it`
becomes `for x in __hasten_for__(it, ...)` and `while test` becomes `while test and
__hasten_while__(...)`. A loop that is ended looks exhausted, so that its `else` runs.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

_FOR, _WHILE, _ENTER = "__hasten_for__", "__hasten_while__", "__hasten_enter__"
EPOCHS = 2  # turns of a loop around training loops
_QUICK_S = 1.0  # a loop that took less may run on, for what comes every so many steps
_BACKWARDS = 64  # backward passes without any optimizer step: the script updates by itself


class Loop:
    """One run of one loop: how many optimizer steps were made in it."""

    __slots__ = (
        "backwards", "began", "code", "direct", "first", "inner", "last", "outer_turns", "seen",
        "wanted",
    )  # fmt: skip

    def __init__(self, code: CodeType, first: int, last: int, began: float) -> None:
        self.code, self.first, self.last = code, first, last
        self.began = began
        self.wanted = 0  # steps until all was seen once
        self.direct: dict[int, int] = {}  # steps of each optimizer with no loop between
        self.backwards = 0  # backward passes with no loop between, while no step was made
        self.inner = 0  # steps and passes in loops further in
        self.seen = 0  # of these, before this turn
        self.outer_turns = 0  # turns in which inner loops made steps


class Loops:
    """All loops of the user that are running, and when each has seen enough."""

    def __init__(
        self,
        steps: int,
        inside_module: Callable[[], bool],
        rhythm: Callable[[FrameType | None, int], int] = lambda _, steps: steps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._inside_module = inside_module
        self._rhythm, self._clock = rhythm, clock
        self._running: dict[int, dict[int, Loop]] = {}
        self.cut: set[tuple[str, int]] = set()
        self.innermost: Loop | None = None  # around the newest step

    def step(self, frame: FrameType | None, optimizer: int) -> None:
        """Count an optimizer's step for every loop around the calling frames."""
        loops = self._around(frame)
        self.innermost = loops[0] if loops else None
        for index, loop in enumerate(loops):
            if index:
                loop.inner += 1
            else:
                loop.direct[optimizer] = loop.direct.get(optimizer, 0) + 1
                loop.wanted = max(loop.wanted, self._rhythm(frame, self._steps))
            loop.backwards = 0

    def backward(self, frame: FrameType | None) -> None:
        """Count a backward pass, for scripts that update parameters by themselves."""
        for index, loop in enumerate(self._around(frame)):
            if not index:
                loop.backwards += 1

    def _around(self, frame: FrameType | None) -> list[Loop]:
        """The loops around a frame, innermost first."""
        found: list[Loop] = []
        while frame is not None:
            loops = self._running.get(id(frame))
            if loops:
                line, code = frame.f_lineno, frame.f_code
                around = [x for x in loops.values() if x.code is code and x.first <= line <= x.last]
                found += sorted(around, key=lambda x: -x.first)
            frame = frame.f_back
        return found

    def limit(self, loop: Loop | None = None) -> int:
        """Steps after which a loop has shown enough; without one, that of the newest step."""
        loop = loop or self.innermost
        if loop is None or self._clock() - loop.began > _QUICK_S:
            return self._steps
        return max(loop.wanted, self._steps)

    def _enough(self, loop: Loop) -> bool:
        if loop.inner > loop.seen:
            loop.outer_turns += 1
            loop.seen = loop.inner
        direct = max(loop.direct.values(), default=0)
        if direct < self.limit(loop) and loop.outer_turns < EPOCHS and loop.backwards < _BACKWARDS:
            return False
        self.cut.add((loop.code.co_filename, loop.first))
        return True

    def _enter(self, frame: FrameType, first: int, last: int) -> Loop:
        loop = Loop(frame.f_code, first, last, self._clock())
        mine = self._running.setdefault(id(frame), {})
        if mine and next(iter(mine.values())).code is not frame.f_code:
            mine.clear()  # another call had this identity
        mine[first] = loop
        return loop

    def _leave(self, frame_id: int, loop: Loop) -> None:
        mine = self._running.get(frame_id)
        if mine and mine.get(loop.first) is loop:
            del mine[loop.first]
            if not mine:
                del self._running[frame_id]

    def turns(self, iterable: Iterable[Any], first: int, last: int) -> Iterable[Any]:
        """What `for` goes over instead of the iterable."""
        if self._inside_module():
            return iterable
        frame = sys._getframe(1)
        return self._go(iter(iterable), id(frame), self._enter(frame, first, last))

    def _go(self, iterator: Iterator[Any], frame_id: int, loop: Loop) -> Iterator[Any]:
        for item in iterator:
            yield item
            if (loop.direct or loop.inner or loop.backwards) and self._enough(loop):
                break
        self._leave(frame_id, loop)

    def enter_while(self, first: int, last: int) -> Loop:
        """Called before a `while`."""
        return self._enter(sys._getframe(1), first, last)

    def more(self, loop: Loop) -> bool:
        """Asked after a `while`'s own test."""
        return not ((loop.direct or loop.inner or loop.backwards) and self._enough(loop))

    def install(self, holds: Callable[[str], bool]) -> None:
        """Make the loops of the user's modules ask; for the life of this process."""
        setattr(builtins, _FOR, self.turns)
        setattr(builtins, _WHILE, self.more)
        setattr(builtins, _ENTER, self.enter_while)
        loader: Any = importlib.machinery.SourceFileLoader
        plain = loader.get_code

        def get_code(this: Any, name: str) -> CodeType | None:
            path = this.get_filename(name)
            if not holds(path):
                code: CodeType | None = plain(this, name)
                return code
            return compiled(this.get_data(path), path)

        loader.get_code = get_code


def compiled(source: bytes | str, path: str) -> CodeType:
    """Compile a module of the user's with loops that ask.

    Raises:
        SyntaxError: as Python does.
    """
    module = ast.parse(source, path)
    module = ast.fix_missing_locations(_Asking().visit(module))
    return compile(module, path, "exec", dont_inherit=True)


class _Asking(ast.NodeTransformer):
    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        last = node.body[-1].end_lineno or node.lineno
        node.iter = _call(_FOR, node.iter, [node.iter, _number(node.lineno), _number(last)])
        return node

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self.generic_visit(node)
        last = node.body[-1].end_lineno or node.lineno
        name = f"__hasten_loop_{node.lineno}_{node.col_offset}__"
        entering = ast.Assign(
            targets=[ast.Name(name, ast.Store())],
            value=_call(_ENTER, node.test, [_number(node.lineno), _number(last)]),
        )
        more = _call(_WHILE, node.test, [ast.Name(name, ast.Load())])
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [node.test, more]), node.test)
        return [ast.copy_location(entering, node.test), node]


def _number(value: int) -> ast.Constant:
    return ast.Constant(value)


def _call(name: str, at: ast.expr, arguments: list[ast.expr]) -> ast.Call:
    call = ast.Call(ast.Name(name, ast.Load()), arguments, [])
    return ast.copy_location(call, at)
