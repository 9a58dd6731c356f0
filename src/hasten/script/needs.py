"""Which values that are read from the device the host needs at once: a reading of the syntax tree.

An agent's action goes to an environment whose answer is the next input; the lengths of packed
sequences belong on the host. Such a wait is part of the method; one for a log or a meter is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

_ROUNDS = 12  # times that names are followed through the file
_HOST_ONLY = frozenset({"pack_padded_sequence"})
_KEEPERS = frozenset(
    ["append", "appendleft", "add", "push", "store", "put", "extend", "insert", "remember"]
)
_INPUTS = frozenset(
    ["tensor", "as_tensor", "from_numpy", "FloatTensor", "LongTensor", "stack", "to", "cuda"]
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor)

_Name = tuple[int, str]  # the function that it is local to (0: none), and how it is spelled


def needed(tree: ast.Module, line: int) -> bool:
    """Whether the value read on a line is needed on the host before the script can go on.

    Args:
        tree: the file.
        line: where `.item()`, `.cpu()` or the like stands, from 1.

    Returns: True where the value goes to a function that takes nothing but host values, or where
        it comes back: what a later tensor of the loop is made of depends on it.
    """
    reading = _Reading(tree)
    statement = reading.statement(line)
    if statement is None:
        return False
    if any(_name(call.func) in _HOST_ONLY for call in _calls(statement)):
        return True
    return reading.comes_back(statement)


class _Reading:
    """A file's statements, each with the function and the loops that it stands in."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements: list[ast.stmt] = []
        self.inside: dict[int, ast.AST] = {}  # statement to its function
        self.rebound: dict[int, set[str]] = {}  # statement to the targets of the loops around it
        self.locals: dict[int, set[str]] = {}
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self._enter(tree, tree, set())
        self.looped = self._looped(tree)

    def _enter(self, node: ast.AST, function: ast.AST, targets: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            owner, inner = function, targets
            if isinstance(child, ast.stmt):
                self.statements.append(child)
                self.inside[id(child)], self.rebound[id(child)] = function, targets
            if isinstance(child, _FUNCTIONS):
                owner, inner = child, set()
                self.functions.setdefault(child.name, []).append(child)
                self.locals[id(child)] = _bound_in(child)
            elif isinstance(child, _LOOPS):
                inner = targets | _targets([child.target])
            self._enter(child, owner, inner)

    def _looped(self, tree: ast.Module) -> set[int]:
        """The statements that run again and again: in a loop, or in a function called from one."""
        todo: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, (*_LOOPS, ast.While))]
        done: set[int] = set()
        found: set[int] = set()
        while todo:
            root = todo.pop()
            if id(root) in done:
                continue
            done.add(id(root))
            for node in ast.walk(root):
                if isinstance(node, ast.stmt) and node is not root:
                    found.add(id(node))
                if isinstance(node, ast.Call):
                    todo += self.functions.get(_name(node.func), [])
        return found

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost statement of a line."""
        best: ast.stmt | None = None
        for node in self.statements:
            within = node.lineno <= line <= (node.end_lineno or line)
            if within and (best is None or node.lineno >= best.lineno):
                best = node
        return best

    def comes_back(self, start: ast.stmt) -> bool:
        """Whether a tensor that is made in a loop depends on what a statement reads."""
        names: set[_Name] = set()
        self._spread(start, names, whole=True)
        for _ in range(_ROUNDS if names else 0):
            before = len(names)
            for statement in self.statements:
                self._spread(statement, names)
            if len(names) == before:
                break
        return any(
            _name(call.func) in _INPUTS and self._mentions(_given(call), names, statement)
            for statement in self.statements
            if names and statement is not start and id(statement) in self.looped
            for call in _calls(statement)
        )

    def _spread(self, at: ast.stmt, names: set[_Name], *, whole: bool = False) -> None:
        """Add the names that a statement makes depend on those that are known."""
        for call in _calls(at):
            given = [v for v in _given(call) if whole or self._mentions([v], names, at)]
            if given and _name(call.func) in _KEEPERS and isinstance(call.func, ast.Attribute):
                self._add([call.func.value], names, at)
            if given and not whole:
                self._into(call, given, names)
        if isinstance(at, _LOOPS):
            if self._mentions([at.iter], names, at):
                self._add([at.target], names, at)
        elif isinstance(at, (ast.Assign, ast.AnnAssign, ast.Return)):
            if at.value is None or not (whole or self._mentions([at.value], names, at)):
                return
            if isinstance(at, ast.Return):
                function = self.inside[id(at)]
                if isinstance(function, _FUNCTIONS):
                    names.add((0, function.name))
            else:
                self._add(at.targets if isinstance(at, ast.Assign) else [at.target], names, at)

    def _into(self, call: ast.Call, given: list[ast.AST], names: set[_Name]) -> None:
        """Follow a value into the parameters of a function of the file."""
        for function in self.functions.get(_name(call.func), ()):
            parameters = [a.arg for a in function.args.args]
            if parameters[:1] in (["self"], ["cls"]):
                parameters = parameters[1:]
            for index, argument in enumerate(call.args[: len(parameters)]):
                if argument in given:
                    names.add((id(function), parameters[index]))
            for keyword in call.keywords:
                if keyword.arg and keyword.value in given:
                    names.add((id(function), keyword.arg))

    def _add(self, targets: Iterable[ast.AST], names: set[_Name], at: ast.stmt) -> None:
        for name in _targets(targets):
            if name not in self.rebound[id(at)]:  # each round of the loop gives it a new value
                names.add(self._key(name, at))

    def _key(self, name: str, at: ast.stmt) -> _Name:
        function = id(self.inside[id(at)])
        return (function if name in self.locals.get(function, ()) else 0), name

    def _mentions(self, nodes: Iterable[ast.AST], names: set[_Name], at: ast.stmt) -> bool:
        return any(
            (0, part.attr) in names
            if isinstance(part, ast.Attribute)
            else isinstance(part, ast.Name) and self._key(part.id, at) in names
            for node in nodes
            for part in ast.walk(node)
        )


def _bound_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names that are local to a function."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found = {argument.arg for argument in every}
    outside: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            outside.update(node.names)
    return found - outside


def _calls(statement: ast.stmt) -> list[ast.Call]:
    """The calls of a statement itself, not of those within it."""
    found: list[ast.Call] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Call):
            found.append(node)
        todo += [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt)]
    return found


def _given(call: ast.Call) -> list[ast.AST]:
    """What a call works on: the object whose method it is, and its arguments."""
    own: list[ast.AST] = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*own, *call.args, *(keyword.value for keyword in call.keywords)]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _targets(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that an assignment sets; of attributes the last part."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Tuple, ast.List)):
            found |= _targets(node.elts)
        elif isinstance(node, (ast.Subscript, ast.Starred)):
            found |= _targets([node.value])
        elif _name(node) not in ("", "self", "_"):
            found.add(_name(node))
    return found
