"""Fetching a file over the network: checked, and either whole in its place or not there."""

from __future__ import annotations

import http.client
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from hasten.errors import DataError

from . import idx

TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 18
_PACKING_BYTES = 1 << 20  # a .gz is never larger than its contents by more than this


class Stream(Protocol):
    """What an opener gives: something to read bytes from."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; empty at the end."""
        ...


Opener = Callable[[str, float], AbstractContextManager[Stream]]


def open_url(url: str, timeout_s: float) -> AbstractContextManager[Stream]:
    """Open a URL for reading.

    Args:
        url: an https address.
        timeout_s: seconds for connecting, and for each wait for bytes.

    Raises:
        OSError: the server cannot be reached or says no.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "hasten"})
    return cast(AbstractContextManager[Stream], urllib.request.urlopen(request, timeout=timeout_s))


def fetch(
    urls: Sequence[str],
    path: Path,
    *,
    sha256: str,
    content_bytes: int,
    opener: Opener = open_url,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Fetch a gzip file from the first URL that gives the right one, and put it at ``path``.

    It is written beside its place and renamed, so that ``path`` is whole or absent, also when
    two processes fetch at once.

    Args:
        urls: the same file on several servers.
        path: where it goes; its folder exists.
        sha256: of the contents after gunzip.
        content_bytes: size of the contents after gunzip.
        opener: opens a URL; tests give their own.
        timeout_s: seconds for connecting, and for each wait for bytes.

    Raises:
        DataError: no server gave the right file; says what each one did.
        OSError: the folder cannot be written.
    """
    failures = []
    for url in urls:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            beside = Path(file.name)
        try:
            _copy(url, beside, content_bytes + _PACKING_BYTES, opener, timeout_s)
            idx.check_sha256(idx.read_bytes(beside, most=content_bytes), sha256, beside)
            beside.chmod(0o644)
            beside.replace(path)
            return
        except (_NetworkError, DataError) as error:
            failures.append(f"{url}: {error}")
        finally:
            beside.unlink(missing_ok=True)
    raise DataError("; ".join(failures))


class _NetworkError(Exception):
    """A server failed; another may do better, which is not so of a full disk."""


def _copy(url: str, beside: Path, most_bytes: int, opener: Opener, timeout_s: float) -> None:
    with beside.open("wb") as file:
        try:
            with opener(url, timeout_s) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    file.write(chunk)
                    if file.tell() > most_bytes:
                        raise _NetworkError(f"sends more than {most_bytes} bytes")
        except (OSError, http.client.HTTPException) as error:
            raise _NetworkError(str(error) or type(error).__name__) from error
