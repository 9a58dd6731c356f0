"""Writing a checkpoint together: each process the parts of tensors that it holds.

The first process makes the hidden folder and says its name; all write into it; when it has heard
of every file, with its checksum, it writes the manifest and renames the folder. This goes over
agreements of its own, so that it can go on beside training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from hasten.devices import runtime
from hasten.errors import CheckpointError
from hasten.train import atomic, manifest, pieces, tensor_file
from hasten.train.background import Background
from hasten.train.buffers import HostBuffers
from hasten.train.world import World


class Parts:
    """What one process writes of one checkpoint's tensors in parts.

    Args:
        world: the processes; agreements in it are made by nothing else meanwhile.
        tensors: what :func:`hasten.train.pieces.take_out` found.
    """

    def __init__(self, world: World, tensors: Mapping[str, torch.Tensor]) -> None:
        self._world, self._tensors = world, tensors
        self._held: dict[str, torch.Tensor] = {}
        self._led = False

    def take(self, copied: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Take this process's parts to the host; see :func:`hasten.train.pieces.mine`."""
        self._held = pieces.mine(self._tensors, copied)

    def lead(self, temporary: Path) -> dict[str, dict[str, Any]]:
        """In the first process: have all write into a hidden folder, and write too.

        Returns:
            What the manifest says of each file.

        Raises:
            CheckpointError: one of them could not.
        """
        self._led = True
        self._world.first(temporary.name)
        return self._written(temporary)

    def dismiss(self) -> None:
        """In the first process: let the others go, if it never came to leading them."""
        if not self._led:
            self._led = True
            self._world.first("")

    def follow(self, folder: Path) -> None:
        """In the others: write into the hidden folder that the first one makes in ``folder``."""
        name = self._world.first("")
        if name:
            self._written(folder / name)

    def _written(self, temporary: Path) -> dict[str, dict[str, Any]]:
        rank, entry, status, error = self._world.rank, None, None, None
        path = temporary / manifest.part_name(rank)
        try:
            entry = _write(path, self._held)
            status = path.lstat()
        except OSError as failure:
            error = str(manifest.failure("save", path, failure))
        except Exception as failure:  # noqa: BLE001  (the first process raises it)
            error = f"{type(failure).__name__}: {failure}"
        # Of each file its status too: the first process renames the folder as soon as it has these.
        told = self._world.gather((entry, status, error))
        failed = [f"rank {number}: {why}" for number, (*_, why) in enumerate(told) if why]
        if failed and self._world.is_main:
            raise CheckpointError("; ".join(failed))
        files = {}
        for number, (made, seen, _) in enumerate(told):
            if made is not None and seen is not None:
                files[manifest.part_name(number)] = made
                manifest.remember_written(seen, made["sha256"])
        return files


class Helper:
    """What a process that is not the first does for checkpoints in parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._background = Background("hasten-checkpoint")
        self._buffers = HostBuffers()

    def save(self, parts: Parts, *, wait: bool) -> None:
        """Write this process's parts of a checkpoint.

        Args:
            parts: of it.
            wait: False copies them and writes in the background.
        """
        self.settle()
        if wait or not self._copied(parts):
            parts.take(None)
            parts.follow(self._folder)
            return
        self._background.start(partial(self._follow, parts))

    def settle(self) -> None:
        """Wait for what is being written.

        Raises:
            BaseException: what nobody expects; that a disk is full is told by the first process.
        """
        self._background.wait()
        error = self._background.take_error()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for what is being written, and give all memory back."""
        self._background.wait()
        self._buffers.release()

    def _follow(self, parts: Parts) -> None:
        self._buffers.wait()
        parts.follow(self._folder)

    def _copied(self, parts: Parts) -> bool:
        """Whether the host has memory for copies."""
        try:
            self._buffers.begin()
            parts.take(self._buffers.copy)
            self._buffers.end()
        except (RuntimeError, MemoryError) as error:
            if not runtime.is_out_of_memory(error):
                raise
            self._buffers.release()
            return False
        return True


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    with path.open("wb") as file:
        hashing = atomic.HashingFile(file)
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        tensor_file.write(cast(Any, hashing), whole)  # the manifest has its checksum
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashing.sha256, "bytes": hashing.bytes}
