"""Imports, functions and classes: the names that a file makes."""

# A method for each kind of node is named after it, as LibCST names them.
# ruff: noqa: N802, D102

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from hasten.script.flow.expressions import spelled
from hasten.script.flow.library import Library
from hasten.script.flow.state import Done
from hasten.script.flow.values import (
    ClassValue,
    Function,
    Lib,
    Scope,
    Value,
)


class Definitions(Library):
    """Follow definitions."""

    def do_Import(self, node: cst.Import) -> Done:
        for alias in node.names:
            path = spelled(alias.name)
            self.facts.imports.add(path)
            if alias.asname is not None:
                self.bind(spelled(alias.asname.name), Lib(_canonical(path)))
            else:
                self.bind(path.split(".")[0], Lib(path.split(".")[0]))
        return None

    def do_ImportFrom(self, node: cst.ImportFrom) -> Done:
        module = spelled(node.module) if node.module is not None else ""
        self.facts.imports.add(module)
        if isinstance(node.names, cst.ImportStar):
            self._star(module)
            return None
        for alias in node.names:
            name = spelled(alias.name)
            bound = spelled(alias.asname.name) if alias.asname is not None else name
            path = f"{module}.{name}" if not node.relative else f".{module}.{name}"
            self.bind(bound, Lib(_canonical(path)))
        return None

    def _star(self, module: str) -> None:
        for name in ("nn", "optim", "Tensor", "device", "no_grad") if module == "torch" else ():
            self.bind(name, Lib(f"torch.{name}"))
        if module == "torch.nn":
            for name in (
                "Module",
                "Linear",
                "Sequential",
                "ReLU",
                "CrossEntropyLoss",
                "Conv2d",
                "ModuleList",
            ):
                self.bind(name, Lib(f"torch.nn.{name}"))
        if module == "torch.utils.data":
            for name in ("DataLoader", "Dataset", "TensorDataset"):
                self.bind(name, Lib(f"torch.utils.data.{name}"))

    def _marks(self, decorators: Sequence[cst.Decorator]) -> tuple[str, ...]:
        marks = []
        for decorator in decorators:
            inner = decorator.decorator
            value = self.ev(inner.func if isinstance(inner, cst.Call) else inner)
            marks.append(value.path if isinstance(value, Lib) else spelled(inner))
        return tuple(m.removeprefix("builtins.") for m in marks)

    def do_FunctionDef(self, node: cst.FunctionDef) -> Done:
        self.bind(node.name.value, self.function(node, None))
        return None

    def function(self, node: cst.FunctionDef, owner: ClassValue | None) -> Function:
        """A function's value, its defaults evaluated here."""
        defaults: dict[str, Value] = {}
        params = node.params
        for param in (*params.posonly_params, *params.params, *params.kwonly_params):
            if param.default is not None:
                defaults[param.name.value] = self.ev(param.default)
        made = Function(
            node, self.scope, node.name.value, owner, None, self._marks(node.decorators), defaults
        )
        self.facts.functions.append(made)
        return made

    def do_ClassDef(self, node: cst.ClassDef) -> Done:
        bases = tuple(self.ev(arg.value) for arg in node.bases if arg.star == "")
        cls = ClassValue(node, node.name.value, bases, {}, marks=self._marks(node.decorators))
        self.facts.classes.append(cls)
        fields: list[str] = []
        for base in bases:
            if isinstance(base, ClassValue):
                fields += base.fields
        outer = self.scope
        for statement in node.body.body:
            if isinstance(statement, cst.FunctionDef):
                cls.names[statement.name.value] = self.function(statement, cls)
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                        fields.append(small.target.value)
                    self.scope = Scope(cls.names, outer)
                    self.statement(small)
                    self.scope = outer
        cls.fields = tuple(fields)
        self.bind(node.name.value, cls)
        return None


def _canonical(path: str) -> str:
    """One name for what PyTorch exports under several."""
    for long, short in (
        ("torch.nn.modules.module.", "torch.nn."),
        ("torch.utils.data.dataloader.", "torch.utils.data."),
        ("torch.utils.data.dataset.", "torch.utils.data."),
        ("torch.nn.parameter.", "torch.nn."),
    ):
        if path.startswith(long):
            return short + path[len(long) :]
    return path
