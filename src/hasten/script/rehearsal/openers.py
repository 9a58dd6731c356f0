"""Libraries that open files in C: the paths that they are given are led into the overlay."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Route = Callable[[Any, bool], Any]
"""From a path, and whether it is written, to the path to use."""

# The module, the function, the position and the name of its path, and whether it writes.
_FUNCTIONS: tuple[tuple[str, str, int, str, bool], ...] = (
    ("torch", "from_file", 0, "filename", True),
    ("torch.jit", "save", 1, "f", True),
    ("torch.jit", "load", 0, "f", False),
    ("torch.jit", "RecursiveScriptModule.save", 1, "f", True),
    ("sqlite3", "connect", 0, "database", True),
    ("sqlite3.dbapi2", "connect", 0, "database", True),
    ("safetensors", "safe_open", 0, "filename", False),
    ("safetensors.torch", "save_file", 1, "filename", True),
    ("safetensors.torch", "load_file", 0, "filename", False),
    ("safetensors.numpy", "save_file", 1, "filename", True),
    ("safetensors.numpy", "load_file", 0, "filename", False),
    ("cv2", "imwrite", 0, "filename", True),
    ("cv2", "imread", 0, "filename", False),
    ("h5py", "File.__init__", 1, "name", True),
)


def led(call: Callable[..., Any], position: int, name: str, writes: bool, route: Route) -> Any:
    """The function with its path led elsewhere; streams and addresses are left as they are."""

    @functools.wraps(call)
    def leading(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            kwargs[name] = _led(kwargs[name], writes, route)
        elif position < len(args):
            given = list(args)
            given[position] = _led(given[position], writes, route)
            args = tuple(given)
        return call(*args, **kwargs)

    return leading


def _led(path: Any, writes: bool, route: Route) -> Any:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return path
    text = os.fsdecode(os.fspath(path))
    if not text or text == ":memory:" or text.startswith("file:"):
        return path
    return route(path, writes)


class AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module's functions when it is imported, which may be long after the start."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._names = {entry[0] for entry in _FUNCTIONS}

    def install(self) -> None:
        """Change what is imported already, and watch for the rest."""
        for name in self._names & set(sys.modules):
            self.change(name, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The module's own specification, its loader followed by the change."""
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            self.change(fullname, module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - this one loader alone
        return spec

    def change(self, name: str, module: ModuleType) -> None:
        """Lead the paths of a module's functions."""
        for entry, attribute, position, argument, writes in _FUNCTIONS:
            if entry != name:
                continue
            *owners, last = attribute.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            call = getattr(owner, last, None)
            if call is not None and not hasattr(call, "__wrapped__"):
                setattr(owner, last, led(call, position, argument, writes, self._route))
