"""Writes of the script go to a temporary folder that lies over the real files.

The script reads back what it wrote. Covers what Python itself opens, makes, renames and removes,
`torch.save`, and the libraries that `openers` knows to open files in C. Other such libraries, and
other programs that the script starts, write where they want.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from hasten.script.rehearsal.openers import AfterImport

_WRITING = frozenset("wax+")
_REAL = ("/dev/", "/proc/", "/sys/")


class Overlay:
    """A folder that stands for the whole file system where the script writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        self._root = self._folder + "/written"
        self._gone: set[str] = set()
        self.written = 0
        self._inside: str | None = None
        """The working folder, where it is one that the script itself has made."""
        self._stat, self._open_fd, self._mkdir = os.stat, os.open, os.mkdir
        self._lexists = os.path.lexists

    def _absolute(self, path: Any) -> str | None:
        """The absolute text of a path; None for a descriptor and for what stays real."""
        if isinstance(path, int):
            return None
        try:
            text = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        text = os.path.abspath(text)
        if text.startswith((self._folder + "/", *_REAL)) or text == self._folder:
            return None
        return text

    def _shadow(self, absolute: str) -> str:
        return self._root + absolute

    def to_read(self, path: Any) -> Any:
        """Where a path is read from."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        shadow = self._shadow(absolute)
        if self._there(shadow) or absolute in self._gone:
            return shadow
        return path if self._inside is None else absolute

    def to_write(self, path: Any, keep: bool) -> Any:
        """Where a path is written; with `keep` a real file's content is taken over first."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        shadow = self._shadow(absolute)
        parent = os.path.dirname(absolute)
        if self._there(self.to_read(parent)):
            self._make_folders(os.path.dirname(shadow))
        there = self._there(absolute) and absolute not in self._gone
        if keep and there and not self._there(shadow) and os.path.isfile(absolute):
            with (
                self._plain_open(absolute, "rb") as source,
                self._plain_open(shadow, "wb") as target,
            ):
                shutil.copyfileobj(source, target)
        self.written += 1
        return shadow

    def _there(self, path: str) -> bool:
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True

    def _make_folders(self, path: str) -> None:
        if not self._there(path):
            self._make_folders(os.path.dirname(path))
            self._mkdir(path)

    def install(self) -> None:
        """Lay the folder over the files for the life of this process."""
        self._plain_open = io.open
        self._install_open()
        self._install_os()
        plain_save = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                f = self.to_write(f, keep=False)
            plain_save(obj, f, *args, **kwargs)

        torch.save = save
        AfterImport(self._routed).install()

    def _routed(self, path: Any, writes: bool) -> Any:
        return self.to_write(path, keep=True) if writes else self.to_read(path)

    def _install_open(self) -> None:
        plain = io.open

        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if _WRITING & set(mode):
                where = self.to_write(file, keep="a" in mode or "r" in mode)
            else:
                where = self.to_read(file)
            return plain(where, mode, *args, **kwargs)

        builtins.open = opening
        io.open = opening
        plain_fd = os.open

        def open_fd(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if kwargs.get("dir_fd") is not None:
                return plain_fd(path, flags, *args, **kwargs)
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                path = self.to_write(path, keep=not flags & os.O_TRUNC)
            else:
                path = self.to_read(path)
            return plain_fd(path, flags, *args, **kwargs)

        os.open = open_fd

    def _install_os(self) -> None:
        for name in ("stat", "lstat", "access", "readlink"):
            setattr(os, name, self._reading(getattr(os, name)))
        for name in ("chmod", "utime", "truncate"):
            setattr(os, name, self._changing(getattr(os, name)))
        os.mkdir = self._making(os.mkdir)
        os.remove = self._removing(os.remove)
        os.unlink = self._removing(os.unlink)
        os.rmdir = self._removing(os.rmdir)
        os.rename = self._renaming(os.rename)
        os.replace = self._renaming(os.replace)
        os.listdir = self._listing(os.listdir)
        os.scandir = self._scanning(os.scandir)
        os.symlink = self._linking(os.symlink)
        self._install_working_folder()
        shutil.rmtree.avoids_symlink_attacks = False
        shutil._use_fd_functions = False  # type: ignore[attr-defined]

    def _install_working_folder(self) -> None:
        plain, plain_where = os.chdir, os.getcwd

        def chdir(path: Any) -> None:
            absolute = self._absolute(path)
            self_made = (
                absolute is not None
                and not self._there(absolute)
                and self._there(self._shadow(absolute))
            )
            if absolute is None or not self_made:
                plain(path if self._inside is None or absolute is None else absolute)
                self._inside = None
                return
            plain(self._shadow(absolute))
            self._inside = absolute

        def getcwd() -> str:
            return plain_where() if self._inside is None else self._inside

        os.chdir = chdir
        os.getcwd = getcwd
        os.getcwdb = lambda: os.fsencode(getcwd())

    def _reading(self, plain: Any) -> Any:
        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return plain(path, *args, **kwargs)
            return plain(self.to_read(path), *args, **kwargs)

        return read

    def _changing(self, plain: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self.to_write(path, keep=True), *args, **kwargs)

        return change

    def _making(self, plain: Any) -> Any:
        def make(path: Any, *args: Any, **kwargs: Any) -> Any:
            absolute = self._absolute(path)
            if absolute is None or kwargs.get("dir_fd") is not None:
                return plain(path, *args, **kwargs)
            if self._there(self.to_read(path)):
                raise FileExistsError(17, "File exists", os.fspath(path))
            if not self._there(self.to_read(os.path.dirname(absolute))):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            where = self.to_write(path, keep=False)
            self._gone.discard(absolute)
            plain(where, *args, **kwargs)
            return None

        return make

    def _removing(self, plain: Any) -> Any:
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            absolute = self._absolute(path)
            if absolute is None or kwargs.get("dir_fd") is not None:
                return plain(path, *args, **kwargs)
            if not self._there(self.to_read(path)):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            if self._there(self._shadow(absolute)):
                plain(self._shadow(absolute))
            self._gone.add(absolute)
            return None

        return remove

    def _renaming(self, plain: Any) -> Any:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            absolute = self._absolute(source)
            if absolute is None:
                return plain(source, self.to_write(target, keep=False), *args, **kwargs)
            plain(self.to_write(source, keep=True), self.to_write(target, keep=False))
            self._gone.add(absolute)
            return None

        return rename

    def _linking(self, plain: Any) -> Any:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            plain(source, self.to_write(target, keep=False), *args, **kwargs)

        return link

    def _names(self, path: Any, plain: Any) -> list[str]:
        absolute = self._absolute(path)
        if absolute is None:
            return list(plain(path))
        names: list[str] = []
        shadow = self._shadow(absolute)
        if self._there(absolute) or not self._there(shadow):
            real = path if self._inside is None else absolute
            names = [n for n in plain(real) if f"{absolute}/{n}" not in self._gone]
        if self._there(shadow):
            names += [name for name in plain(shadow) if name not in names]
        return names

    def _listing(self, plain: Any) -> Any:
        def listdir(path: Any = ".") -> list[str]:
            return self._names(path, plain)

        return listdir

    def _scanning(self, plain: Any) -> Any:
        def scandir(path: Any = ".") -> Any:
            absolute = self._absolute(path)
            if absolute is None or not self._there(self._shadow(absolute)):
                return plain(path)
            return _Entries(self._merged(absolute, plain))

        return scandir

    def _merged(self, absolute: str, plain: Any) -> list[Any]:
        with plain(self._shadow(absolute)) as entries:
            found = list(entries)
        known = {entry.name for entry in found}
        if self._there(absolute):
            with plain(absolute) as entries:
                found += [e for e in entries if e.name not in known and e.path not in self._gone]
        return found


class _Entries:
    """What `os.scandir` gives, of a list."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""
