"""The manifest of a checkpoint: what it says, its seal, the checks before it is believed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

import hasten
from hasten.errors import CheckpointError, UsageError

SCHEMA = 1
SCHEMA_IN_PARTS = 2
"""Of a checkpoint with files of parts beside the others."""
NAME = "checkpoint.json"
MODEL = "model.pt"
TRAINING = "training.pt"
LIMIT_BYTES = 16 * 2**20
"""No manifest is larger; a larger file is refused unread."""

_FILES = frozenset({MODEL, TRAINING})
_PART = re.compile(r"part-\d{5,9}\.safetensors")
_CHECKSUM_KEY = ',\n "checksum": "'
USE_ANOTHER = "use another copy, or an older checkpoint of the run"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``checkpoint.json`` says."""

    path: Path
    """The checkpoint's folder."""
    step: int
    """Optimizer steps done when it was saved."""
    epoch: int
    """Epochs done."""
    meta: dict[str, Any]
    """What the saver said of model, data and settings; JSON."""
    hasten: str
    """Version of hasten that saved it."""
    torch: str
    """Version of torch that saved it."""
    files: dict[str, tuple[str, int]]
    """SHA-256 (hexadecimal) and size in bytes of each file."""

    @property
    def in_parts(self) -> list[str]:
        """The files that hold tensors in parts, one of each process that saved."""
        return sorted(self.files.keys() - _FILES)


def part_name(rank: int) -> str:
    """The file that a process writes its parts of tensors to."""
    return f"part-{rank:05d}.safetensors"


def read(folder: str | Path) -> Manifest:
    """Read and check ``checkpoint.json``; the other files are looked at, not read.

    Raises:
        CheckpointError: missing, altered, of a newer hasten; a file is missing, a link, or has
            another size.
    """
    folder = Path(folder)
    path = folder / NAME
    try:
        with open_regular(path) as file:
            raw = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError as error:
        if folder.is_dir():
            raise CheckpointError(
                f"{folder} has no {NAME}: it is no checkpoint or was half written; {USE_ANOTHER}"
            ) from error
        raise CheckpointError(f"{folder} does not exist; give a checkpoint's folder") from error
    except OSError as error:
        raise failure("read", path, error) from error
    data = _parse(raw, path)
    manifest = Manifest(
        path=folder,
        step=data["step"],
        epoch=data["epoch"],
        meta=data["meta"],
        hasten=data["hasten"],
        torch=data["torch"],
        files={name: (entry["sha256"], entry["bytes"]) for name, entry in data["files"].items()},
    )
    for name, (_, size) in manifest.files.items():
        _check_size(folder / name, size)
    return manifest


def head(meta: dict[str, Any]) -> dict[str, Any]:
    """All of a manifest but its files.

    Raises:
        UsageError: no step in ``meta``, or it is no JSON.
    """
    step, epoch = meta.get("step"), meta.get("epoch", 0)
    if type(step) is not int or type(epoch) is not int or step < 0 or epoch < 0:
        raise UsageError(f"meta needs 'step' and 'epoch' as counts, not {step!r} and {epoch!r}")
    try:
        clean = json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"meta must be JSON (no NaN, no objects): {error}") from error
    return {
        "schema": SCHEMA,
        "hasten": hasten.__version__,
        "torch": str(torch.__version__),
        "step": step,
        "epoch": epoch,
        "meta": clean,
    }


def sealed(content: dict[str, Any], **options: Any) -> bytes:
    """JSON (``options`` of ``json.dumps``) ending in the SHA-256 of every byte before it."""
    body = (json.dumps(content, indent=1, **options)[:-2] + _CHECKSUM_KEY).encode()
    return body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def is_whole(raw: bytes) -> bool:
    """Whether :func:`sealed` gave exactly this."""
    body, mark, tail = raw.rpartition(_CHECKSUM_KEY.encode())
    return tail == hashlib.sha256(body + mark).hexdigest().encode() + b'"\n}\n'


def parse_json(raw: bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is none, is nested beyond all reason, says something twice (of which
            readers could each believe another), or has numbers that are none.
    """
    try:
        return json.loads(raw, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it says something twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"it has {text}, which is no number of JSON")


def render(manifest: dict[str, Any]) -> bytes:
    """A manifest as it is written, sealed."""
    rendered = sealed(manifest, ensure_ascii=False)
    if len(rendered) > LIMIT_BYTES:
        raise UsageError(f"meta is {len(rendered):,} bytes of JSON; keep it below 16 MiB")
    return rendered


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    if len(raw) > LIMIT_BYTES:
        raise CheckpointError(f"{path} is larger than any manifest is: refused")
    if not is_whole(raw):
        raise CheckpointError(f"{path} is cut or altered (its checksum differs); {USE_ANOTHER}")
    try:
        data = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); {USE_ANOTHER}") from error
    schema = data.get("schema")
    if schema not in (SCHEMA, SCHEMA_IN_PARTS):
        raise CheckpointError(
            f"{path} has schema {schema!r}, made by hasten {data.get('hasten')}; this is hasten "
            f"{hasten.__version__}, which reads schemas {SCHEMA} and {SCHEMA_IN_PARTS}: pip install"
            " --upgrade hasten"
        )
    problem = _malformed(data)
    if problem:
        raise CheckpointError(f"{path} is refused: {problem}; {USE_ANOTHER}")
    return dict(data)


def _malformed(data: dict[str, Any]) -> str | None:
    """Why a manifest with a right checksum is still not to be believed (somebody wrote it)."""
    files = data.get("files")
    others = files.keys() - _FILES if isinstance(files, dict) else set()
    if data["schema"] == SCHEMA_IN_PARTS:
        others = {name for name in others if not _PART.fullmatch(name)}
    if not isinstance(files, dict) or not files.keys() >= _FILES or others:
        listed = ", ".join(files) if isinstance(files, dict) else repr(files)
        return f"it lists {listed} and not {', '.join(sorted(_FILES))}"
    for name, entry in files.items():
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if type(size) is not int or size < 0 or not isinstance(entry.get("sha256"), str):
            return f"its entry for {name} is {entry!r}"
    if any(type(data.get(k)) is not int or not 0 <= data[k] < 2**63 for k in ("step", "epoch")):
        return "its step or epoch is no count"
    if not isinstance(data.get("meta"), dict):
        return "its meta is no dictionary"
    if not all(isinstance(data.get(key), str) for key in ("hasten", "torch")):
        return "it names no versions"
    return None


def open_regular(path: Path) -> BinaryIO:
    """Open a file that is itself there: no link (it could lead out), no device, no pipe."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link or no regular file: refused")
    return path.open("rb")


def _check_size(path: Path, size: int) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {USE_ANOTHER}") from error
    except OSError as error:
        raise failure("read", path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is a link or no regular file: refused; {USE_ANOTHER}")
    if status.st_size != size:
        raise CheckpointError(
            f"{path} has {status.st_size:,} bytes and should have {size:,}: cut or altered; "
            f"{USE_ANOTHER}"
        )


def open_verified(path: Path, sha256: str) -> BinaryIO:
    """Open a file, read it all against its SHA-256, and give it at its start.

    What this process has read so before, and nobody touched since, it does not read again.

    Raises:
        CheckpointError: it differs or cannot be read.
    """
    try:
        file = open_regular(path)
        try:
            status = os.fstat(file.fileno())
            verify(path, status, sha256, lambda: _digest(file))
            file.seek(0)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise failure("read", path, error) from error
    return file


def verify(path: Path, status: os.stat_result, sha256: str, digest: Callable[[], str]) -> None:
    """Refuse a file that is not the one of its SHA-256.

    Args:
        path: of the file, for the message.
        status: of the file, from before it is read.
        sha256: what it should have.
        digest: reads it all, and gives what it has.

    Raises:
        CheckpointError: it differs.
    """
    found = _read.get(_print(status))
    if found is None:
        found = digest()
        if time.time() - status.st_mtime > _SETTLED_S:
            _keep(_read, _print(status), found)
    if found != sha256:
        raise CheckpointError(f"{path} is altered (its SHA-256 differs); {USE_ANOTHER}")


def remember_written(status: os.stat_result, sha256: str) -> None:
    """Note what this process has written, and flushed to the disk."""
    _keep(_written, _print(status), sha256)


def is_as_written(path: Path, sha256: str) -> bool:
    """Whether a file is one that this process wrote so, and nobody touched since."""
    try:
        return _written.get(_print(path.lstat())) == sha256
    except OSError:
        return False


_Print = tuple[int, int, int, int, int]
_read: dict[_Print, str] = {}  # the SHA-256 of files that were read, by what changes with them
_written: dict[_Print, str] = {}
_MOST = 4096
_SETTLED_S = 2.0  # a file changed just now may change again within its clock's tick


def _print(status: os.stat_result) -> _Print:
    return (
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
    )


def _keep(known: dict[_Print, str], of: _Print, sha256: str) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[of] = sha256


def _digest(file: BinaryIO) -> str:
    return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def failure(verb: str, path: Path, error: OSError) -> CheckpointError:
    """The error for a file or folder that the system would not read, save or remove."""
    advice = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
        errno.EROFS: "choose a folder that can be written",
        errno.EACCES: "check the permissions of the folder",
        errno.ENOENT: "was the folder removed?",
    }.get(error.errno or 0, "check the disk and the folder")
    kept = "; what was saved before is as it was" if verb == "save" else ""
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error} ({advice}){kept}")
