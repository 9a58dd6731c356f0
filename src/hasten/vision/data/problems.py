"""The count of image files that could not be used, shared by the threads that meet them."""

from __future__ import annotations

import threading
from pathlib import Path

from hasten.errors import DataError
from hasten.vision.file_names import show

_NAMED = 5  # files that a message names


class Problems:
    """Files that were skipped and why: counted once each, from any thread.

    Args:
        limit: the share of unusable files above which :meth:`check` stops the run.
    """

    def __init__(self, limit: float = 0.1) -> None:
        self.limit = limit
        self._reasons: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, file: str | Path, reason: str) -> bool:
        """Count a file; False where it had been counted already."""
        with self._lock:
            new = str(file) not in self._reasons
            self._reasons.setdefault(str(file), reason)
            return new

    def __len__(self) -> int:
        return len(self._reasons)

    def files(self) -> dict[str, str]:
        """Each skipped file and why, in the order in which they were met."""
        with self._lock:
            return dict(self._reasons)

    def check(self, total: int) -> None:
        """Stop where too many of ``total`` files are unusable.

        Raises:
            DataError: more than ``limit`` of them are; the first few are named.
        """
        count = len(self)
        if count > self.limit * total:
            raise DataError(
                f"{count} of {total} images cannot be used, more than {self.limit:.0%}:\n"
                f"{self._listing()}\n"
                "Mend or delete these files, or give another folder"
            )

    def summary(self) -> str:
        """Lines for the end of a run; empty where nothing was skipped."""
        count = len(self)
        if not count:
            return ""
        plural = "file was" if count == 1 else "files were"
        return f"{count} unusable image {plural} skipped:\n{self._listing()}"

    def _listing(self) -> str:
        files = self.files()
        lines = [f"  {show(name)}: {why}" for name, why in list(files.items())[:_NAMED]]
        if len(files) > _NAMED:
            lines.append(f"  and {len(files) - _NAMED} more")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Problems: {self.summary() or 'no file was skipped'}>"

    def __getstate__(self) -> dict[str, object]:
        return {"limit": self.limit, "_reasons": self.files()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
