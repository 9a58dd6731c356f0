"""Goes through all code of a function, whether it would be run or not: judges say what it may do.

What each judge allows is a kind of its own; that names, attributes and calls are the places at
which code can reach anything outside the function is common to all.
"""

from __future__ import annotations

import ast
from typing import Any

from hasten.feed.plain import is_bare, is_constant
from hasten.feed.reading import UNREADABLE, Scope

_MOST_FUNCTIONS = 200  # that call one another

PASSING = (
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.keyword,
    ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript,
    ast.Slice, ast.Starred, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.NamedExpr, ast.JoinedStr,
    ast.FormattedValue, ast.Return, ast.Expr, ast.Assign, ast.While, ast.If, ast.Pass,
    ast.Break, ast.Continue, ast.Assert,
)  # fmt: skip
"""What does no more than its parts do."""


class Visitor:
    """A judge of code. Those of one kind say by `name`, `attribute` and `call` what is allowed.

    Attributes:
        refused: the first part of the code that is not, and whose it is; None while all is.
    """

    passing: tuple[type[ast.AST], ...] = PASSING

    def __init__(self) -> None:
        self._seen: set[tuple[Any, int]] = set()
        self.refused: tuple[ast.AST, Scope] | None = None

    def function(self, function: Any, owner: Any = None) -> bool:
        """Whether all that a function does is allowed; of a method of `owner`, where that is given.

        One that is being looked at already, as it calls itself, does nothing more.
        """
        key = function, id(owner)
        if key in self._seen:
            return True
        scope = Scope.of(function, owner)
        if scope is None or len(self._seen) >= _MOST_FUNCTIONS:
            return False
        self._seen.add(key)
        return all(map(self.default, scope.defaults)) and all(
            self.sees(node, scope) for node in scope.body
        )

    def sees(self, node: ast.AST, scope: Scope) -> bool:
        """Whether all that is done there is allowed; what cannot be looked up is not."""
        try:
            allowed = self.allows(node, scope)
        except UNREADABLE:
            allowed = False
        if not allowed and self.refused is None:
            self.refused = node, scope
        return allowed

    def allows(self, node: ast.AST, scope: Scope) -> bool:
        """The same of what each kind of code does; of its parts by `sees`."""
        if isinstance(node, ast.Name):
            stored = not isinstance(node.ctx, ast.Load)
            return node.id in scope.names or (not stored and self.name(scope.known(node)))
        if isinstance(node, ast.Attribute):
            return self.attribute(node, scope)
        if isinstance(node, ast.Call):
            return self.call(node, scope)
        if isinstance(node, ast.AnnAssign):  # the types of variables are not looked up
            return all(self.sees(n, scope) for n in (node.value, node.target) if n is not None)
        if isinstance(node, ast.For):
            rest = (node.target, *node.body, *node.orelse)
            return self.iterates(node.iter, scope) and all(self.sees(n, scope) for n in rest)
        if isinstance(node, ast.Raise):
            return node.cause is None and (node.exc is None or self._raises(node.exc, scope))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehends(node, scope)
        parts = ast.iter_child_nodes(node)
        return isinstance(node, self.passing) and all(self.sees(part, scope) for part in parts)

    def default(self, value: Any) -> bool:
        """Whether a parameter may be this object where it is not given."""
        return is_constant(value)

    def name(self, value: Any) -> bool:
        """Whether this object of the function's surroundings may be read."""
        return is_constant(value)

    def attribute(self, node: ast.Attribute, scope: Scope) -> bool:
        """Whether it may be read, or written to."""
        raise NotImplementedError

    def call(self, node: ast.Call, scope: Scope) -> bool:
        """Whether this may be called, with what is given to it."""
        raise NotImplementedError

    def iterates(self, source: ast.expr, scope: Scope) -> bool:
        """Whether one may go through this."""
        return self.sees(source, scope)

    def given(self, node: ast.Call, scope: Scope) -> bool:
        """Whether what is given to a call may be computed."""
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        return all(self.sees(value, scope) for value in values)

    def _comprehends(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> bool:
        for each in node.generators:
            if each.is_async or not self.iterates(each.iter, scope):
                return False
            scope = scope.within(each.target)
            if not all(self.sees(part, scope) for part in (each.target, *each.ifs)):
                return False
        made = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        return all(self.sees(part, scope) for part in made)

    def _raises(self, node: ast.expr, scope: Scope) -> bool:
        """An error of Python's own, which the loop tells of when it comes to it."""
        kind = scope.known(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or not is_bare(kind):
            return False
        return not isinstance(node, ast.Call) or self.given(node, scope)
