"""Files in the safetensors format: the same bytes for the same tensors, with a checksum in them."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hasten.errors import CheckpointError
from hasten.train import manifest

CHECKSUM = "hasten_sha256"
LIMIT_HEADER_BYTES = 32 * 2**20
"""Of the list of tensors: a hundred thousand of them need a third of it."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_ALIGNED_BYTES = 8
_PIECE_BYTES = 2**20
_MOST_DIMENSIONS = 64  # as many as torch has


def write(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors; the bytes depend on what is given and on nothing else.

    Args:
        file: open for writing.
        tensors: contiguous, on the host.
        metadata: kept in the header, with a SHA-256 of all else; None leaves both out.

    Raises:
        CheckpointError: a tensor is of a kind that the format does not have.
        OSError: it cannot be written.
    """
    # Large items first, so that each begins at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted((metadata or {}).items()))}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    if metadata is not None:
        header["__metadata__"][CHECKSUM] = _digest(header, (_bytes(tensors[n]) for n in order))
    text = _dumped(header)
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for name in order:
        file.write(_bytes(tensors[name]))


def check(path: Path, size: int) -> None:
    """Check a file's header, and its checksum where hasten wrote it.

    Args:
        path: of the file.
        size: its bytes.

    Raises:
        CheckpointError: it is cut, altered, or no such file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        found, _ = header(file, path, size)
        metadata = found.get("__metadata__")
        if not isinstance(metadata, dict) or not {CHECKSUM, "hasten"} & metadata.keys():
            return  # of another program, which writes none
        expected = metadata.pop(CHECKSUM, None)
        if expected != _digest(found, _pieces(file)):
            raise CheckpointError(
                f"{path} is cut or altered (its checksum differs); use another copy, or a"
                f" checkpoint of the run. If it was changed on purpose, leave hasten and"
                f" {CHECKSUM} out of its metadata"
            )


def header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """A file's header, and where the values begin; the file is left there.

    Args:
        file: open at its start.
        path: of the file, for messages.
        size: its bytes.

    Raises:
        CheckpointError: it is cut, or no such file.
    """
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else None
    if length is None or length > min(size - 8, LIMIT_HEADER_BYTES):
        raise CheckpointError(
            f"{path} is cut or no safetensors file: its header would be "
            f"{'missing' if length is None else f'{length:,} bytes'} in a file of {size:,}"
        )
    try:
        found = manifest.parse_json(file.read(length))
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: its header is no JSON ({error}). It is cut"
            " or altered; use another copy"
        ) from error
    return (found if isinstance(found, dict) else {}), 8 + length


def entry(path: Path, name: str, said: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """What a header says of a tensor: its dtype and shape, the first byte and that after its last.

    Raises:
        CheckpointError: it says something that cannot be.
    """
    said = said if isinstance(said, dict) else {}
    shape, offsets = said.get("shape"), said.get("data_offsets")
    dtype = next((kind for kind, word in _DTYPES.items() if word == said.get("dtype")), None)
    if (
        dtype is None
        or not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(number) is not int or number < 0 for number in (*shape, *offsets))
        or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize
        or offsets[0] % dtype.itemsize
    ):
        raise CheckpointError(
            f"{path} says of {name} what cannot be; it is altered: use another copy"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _digest(header: dict[str, Any], data: Iterator[Any]) -> str:
    found = hashlib.sha256(_dumped(header))
    for piece in data:
        found.update(piece)
    return found.hexdigest()


def _dumped(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), sort_keys=True).encode()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece
