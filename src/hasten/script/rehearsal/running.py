"""Runs a script as `python SCRIPT` or `python -m MODULE` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hasten.errors import UsageError
from hasten.script.rehearsal.loops import compiled
from hasten.script.rehearsal.request import Request


class Program:
    """A script that is ready to run.

    Raises:
        UsageError: there is no such module, or no code in it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.spec: Any = None
        if request.as_module:
            sys.path.insert(0, str(Path.cwd()))
            self.spec = self._find(request.script)
            self.file = str(self.spec.origin)
        else:
            path = Path(request.script)
            self.file = str((path / "__main__.py" if path.is_dir() else path).absolute())
            folder = path if path.is_dir() else path.resolve().parent
            sys.path.insert(0, str(Path(folder).resolve() if path.is_dir() else folder))
        self.folder = str(Path(self.file).resolve().parent)

    def _find(self, name: str) -> Any:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(name + ".__main__")
        except (ImportError, ValueError) as error:
            raise UsageError(f"-m {name}: {error}") from error
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise UsageError(
                f"-m {name}: there is no module of that name that can be run from here"
            )
        return spec

    def run(self) -> None:
        """Compile and run; whatever the script raises comes out."""
        file = self.file  # absolute, as Python makes `__file__` of `__main__`
        named = file if self.spec is not None else self._request.script
        sys.argv = [named, *self._request.arguments]
        module = ModuleType("__main__")
        names: dict[str, Any] = module.__dict__
        names.update(__file__=file, __cached__=None, __builtins__=__builtins__)
        if self.spec is not None:
            names.update(
                __spec__=self.spec, __package__=self.spec.parent, __loader__=self.spec.loader
            )
        else:
            names.update(__spec__=None, __package__=None)
        sys.modules["__main__"] = module
        exec(self._code(), names)

    def _code(self) -> CodeType:
        return compiled(Path(self.file).read_bytes(), self.file)
