"""Checkpoints of tensors in parts: written together, whole or not at all, and never believed."""

from __future__ import annotations

import errno
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.errors import CheckpointError
from hasten.train import atomic, checkpoint, manifest, parts, pieces, tensor_file
from hasten.train.parts import Parts
from hasten.train.world import ALONE, Place, World

W = torch.arange(24.0).view(6, 4)
META = {"step": 3, "epoch": 1}


class Pair(World):
    """One of two processes that are threads."""

    def __init__(self, rank: int, lanes: tuple[queue.Queue[Any], queue.Queue[Any]]) -> None:
        super().__init__(Place(rank=rank, size=2))
        self._mine, self._other = lanes[rank], lanes[1 - rank]

    def first(self, value: Any) -> Any:
        if self.is_main:
            self._other.put(value)
            return value
        return self._mine.get(timeout=20)

    def gather(self, value: Any) -> list[Any]:
        self._other.put(value)
        theirs = self._mine.get(timeout=20)
        return [value, theirs] if self.is_main else [theirs, value]

    def most(self, values: Any) -> list[int]:
        return [max(pair) for pair in zip(*self.gather(values), strict=True)]


def of_both(act: Callable[[World], Any]) -> list[Any]:
    """What each of two processes comes to."""
    lanes: tuple[queue.Queue[Any], queue.Queue[Any]] = (queue.Queue(), queue.Queue())
    found: list[Any] = [None, None]

    def work(rank: int) -> None:
        found[rank] = act(Pair(rank, lanes))

    other = threading.Thread(target=work, args=(1,))
    other.start()
    try:
        work(0)
    finally:
        other.join(20)
    return found


def together(folder: Path, lead: Callable[[Parts], None]) -> None:
    """Rows 0 to 3 of a tensor are with the first of two processes, the others with the second."""
    lanes: tuple[queue.Queue[Any], queue.Queue[Any]] = (queue.Queue(), queue.Queue())
    first, second = (Parts(Pair(rank, lanes), {}) for rank in (0, 1))
    first._held = {name(0): W[:4]}
    second._held = {name(4): W[4:]}
    first.take = second.take = lambda copied: None  # type: ignore[method-assign]
    other = threading.Thread(target=second.follow, args=(folder.parent,))
    other.start()
    try:
        lead(first)
    finally:
        other.join(20)
    assert not other.is_alive()


def name(row: int, *, at: Any = ("model", "w"), shape: Any = (6, 4)) -> str:
    return json.dumps([at, shape, [row, 0]])


def saved(folder: Path) -> Path:
    folder = folder / "step-00000003"

    def lead(first: Parts) -> None:
        content = {"model": {"w": None, "b": torch.ones(2)}, "training": {"lr": 0.1}}
        checkpoint.write(folder, checkpoint.prepare(**content, meta=META, in_parts=first))

    together(folder, lead)
    return folder


def test_parts_of_two_make_the_whole(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        "model.pt",
        "part-00000.safetensors",
        "part-00001.safetensors",
        "training.pt",
    ]
    found = checkpoint.load(folder, map_location="cpu")
    assert torch.equal(found.model["w"], W)
    assert list(found.model) == ["w", "b"]
    assert checkpoint.newest(tmp_path) == (folder, [])


def test_a_folder_renamed_as_soon_as_all_have_told_is_none_the_others_look_in(
    tmp_path: Path,
) -> None:
    class Quick(Pair):
        def gather(self, value: Any) -> list[Any]:
            found = super().gather(value)
            (tmp_path / ".hidden").rename(tmp_path / "whole")
            return found

    lanes: tuple[queue.Queue[Any], queue.Queue[Any]] = (queue.Queue(), queue.Queue())
    second = Parts(Quick(1, lanes), {})
    (tmp_path / ".hidden").mkdir()
    lanes[1].put(".hidden")
    lanes[1].put(({"bytes": 1, "sha256": "0" * 64}, None, None))
    second.follow(tmp_path)
    own = tmp_path / "whole" / manifest.part_name(1)
    made, *_ = lanes[0].get(timeout=20)
    assert manifest.is_as_written(own, made["sha256"])


def test_what_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    stored = checkpoint.load(saved(tmp_path), map_location="cpu", read_parts=False).model["w"]
    assert isinstance(stored, pieces.Stored)
    assert stored.shape == (6, 4)
    assert stored.untyped_storage().nbytes() == 4
    assert torch.equal(pieces.whole(stored), W)


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_is_altered_is_named(tmp_path: Path, number: int) -> None:
    folder = saved(tmp_path)
    path = folder / manifest.part_name(number)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{path.name} is altered"):
        checkpoint.load(folder, map_location="cpu")
    assert checkpoint.newest(tmp_path)[0] is None


def test_each_process_checks_what_it_reads_and_the_first_one_the_rest(tmp_path: Path) -> None:
    found = manifest.read(saved(tmp_path))
    whole = {"model.pt", "training.pt"}
    first, second = (manifest.part_name(number) for number in (0, 1))

    def read(rank: int, of: int) -> set[str]:
        return pieces.files_for(found, rank, of) - whole

    assert [read(rank, 2) for rank in (0, 1)] == [{first}, {first, second}]  # rows 3 to 5
    assert read(0, 1) == {first, second}
    assert [read(rank, 3) for rank in (0, 1, 2)] == [{first}, {first}, {second}]
    assert read(7, 8) == set()  # more processes than rows
    assert all(pieces.files_for(found, rank, 3) > whole for rank in (0, 1, 2))


def test_a_part_that_is_not_read_is_not_checked_and_one_that_is_read_is(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / manifest.part_name(1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    stored = checkpoint.load(folder, map_location="cpu", read_parts=False).model["w"]
    assert stored.shape == (6, 4)
    with pytest.raises(CheckpointError, match=f"{path.name} is altered"):
        pieces.whole(stored)


def test_damage_that_one_process_finds_makes_all_pass_the_checkpoint_over(tmp_path: Path) -> None:
    old, new = tmp_path / "step-00000001", saved(tmp_path)
    checkpoint.save(old, model={}, training={}, meta={"step": 1})

    def newest(world: World) -> Any:
        def reads(found: manifest.Manifest) -> set[str]:
            if not found.in_parts:
                return set(found.files)
            return {manifest.part_name(world.rank)}

        return checkpoint.newest(tmp_path, world, reads=reads)

    assert of_both(newest) == [(new, [])] * 2
    path = new / manifest.part_name(1)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    found = of_both(newest)
    assert [path for path, _ in found] == [old, old]
    assert found[0] == found[1]
    assert found[0][1][0][1].startswith("rank 1: ")
    assert "is altered" in found[0][1][0][1]


def test_a_part_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / manifest.part_name(1)).unlink()
    with pytest.raises(CheckpointError, match=r"part-00001\.safetensors is missing"):
        checkpoint.load(folder, map_location="cpu")


def test_a_process_that_cannot_write_leaves_nothing_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parts._write

    def full(path: Path, tensors: Any) -> Any:
        if path.name == manifest.part_name(1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(parts, "_write", full)
    with pytest.raises(CheckpointError, match=r"rank 1: cannot save .*free some space"):
        saved(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_others_are_let_go_when_the_first_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(path: Path) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(atomic, "new_folder", nowhere)
    with pytest.raises(CheckpointError, match="folder that can be written"):
        saved(tmp_path)


def forged(folder: Path, tensors: dict[str, torch.Tensor], model: dict[str, Any]) -> Path:
    """A checkpoint whose checksums are right, by somebody who means no good."""
    folder = folder / "step-00000003"
    evil = Parts(ALONE, {})
    evil.take = lambda copied: None  # type: ignore[method-assign]
    evil._held = tensors
    content: dict[str, Any] = {"model": model, "training": {}}
    checkpoint.write(folder, checkpoint.prepare(**content, meta=META, in_parts=evil))
    return folder


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({name(0): W[:4]}, "do not make up a whole"),
        ({name(0): W, name(4): W[4:]}, "do not make up a whole"),
        ({name(0): W[:4], name(4): W[4:].double()}, "do not make up a whole"),
        ({name(3): W[:4]}, "is no part of what it says"),
        ({name(0, shape=(6, 4, 1)): W}, "is no part of what it says"),
        ({name(0, at=("model", "x")): W}, "has no place for"),
        ({name(0, at=("model", "b")): W}, "has no place for"),
        ({name(0, at=("model",)): W}, "has no place for"),
        ({name(0, at=("model", "b", "data")): W}, "has no place for"),
        ({name(0, at=()): W}, "does not say of what"),
        ({name(0, at={"a": 1}): W}, "does not say of what"),
        ({name(0, shape=(-6, 4)): W}, "does not say of what"),
        ({"w": W}, "does not say of what"),
        ({name(0, shape=(10**15, 10**15)): W}, "do not make up a whole"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], word: str
) -> None:
    folder = forged(tmp_path, tensors, {"w": None, "b": torch.ones(2)})
    with pytest.raises(CheckpointError, match=word):
        checkpoint.load(folder, map_location="cpu")


@pytest.mark.parametrize("said", [{"dtype": "F32"}, {"shape": [9**9]}, {"data_offsets": [8, 4]}, 3])
def test_a_header_that_cannot_be_is_refused(said: Any) -> None:
    good = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    assert tensor_file.entry(Path("f"), "w", good) == (torch.float64, (2,), 0, 16)
    with pytest.raises(CheckpointError, match="what cannot be"):
        tensor_file.entry(Path("f"), "w", good | said if isinstance(said, dict) else said)
