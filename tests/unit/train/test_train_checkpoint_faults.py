"""Checkpoints that are broken, unsafe or cannot be written; runs killed while they save."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import loader, trainer

import warm
from hasten.errors import CheckpointError
from hasten.train import atomic, checkpoint, manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", 2)


def save(folder: Path, step: int) -> Path:
    path = folder / checkpoint.name_of(step)
    weight = torch.arange(step * 100.0)
    checkpoint.save(path, model={"w": weight}, training={"s": [step]}, meta={"step": step})
    return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, map_location="cpu")
    return str(error.value)


def reseal(path: Path, change: Callable[[dict[str, Any]], None] = lambda data: None) -> None:
    """Write a manifest that fits the files again, as somebody who means harm would."""
    data = json.loads((path / "checkpoint.json").read_text())
    del data["checksum"]
    for name, entry in data["files"].items():
        raw = (path / name).read_bytes()
        entry["bytes"], entry["sha256"] = len(raw), __import__("hashlib").sha256(raw).hexdigest()
    change(data)
    (path / "checkpoint.json").write_bytes(manifest.render(data))


class Evil:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# --- altered, cut, missing ---------------------------------------------------------------------


def test_a_flipped_bit_is_found_wherever_it_is(saved: Path) -> None:
    for name in ("checkpoint.json", "model.pt", "training.pt"):
        whole = (saved / name).read_bytes()
        step = 1 if name == "checkpoint.json" else 97
        for position in range(0, len(whole), step):
            data = bytearray(whole)
            data[position] ^= 1 << (position % 8)
            (saved / name).write_bytes(data)
            message = refused(saved)
            assert name in message
            assert "altered" in message
        (saved / name).write_bytes(whole)
    checkpoint.load(saved, map_location="cpu")


@pytest.mark.parametrize("name", ["checkpoint.json", "model.pt", "training.pt"])
@pytest.mark.parametrize("left", [0, 1, 100])
def test_a_cut_file_is_found(saved: Path, name: str, left: int) -> None:
    os.truncate(saved / name, left)
    message = refused(saved)
    assert str(saved / name) in message
    assert "cut or altered" in message
    assert "older checkpoint" in message


@pytest.mark.parametrize("name", ["checkpoint.json", "model.pt", "training.pt"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert name in refused(saved)


def test_a_newer_schema_says_to_upgrade(saved: Path) -> None:
    reseal(saved, lambda data: data.update(schema=3, hasten="9.0"))
    message = refused(saved)
    assert "schema 3, made by hasten 9.0" in message
    assert "pip install --upgrade hasten" in message


def test_newest_passes_over_the_broken_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    paths = [save(folder, step) for step in (1, 2, 3, 4)]
    os.truncate(paths[0] / "model.pt", 5)  # older than the one found: not worth a word
    data = bytearray((paths[2] / "model.pt").read_bytes())
    data[-40] ^= 4
    (paths[2] / "model.pt").write_bytes(data)
    (paths[3] / "checkpoint.json").unlink()
    (folder / "step-0000001x").mkdir()

    found, passed_over = checkpoint.newest(folder)

    assert found == paths[1]
    assert [path for path, _ in passed_over] == [paths[3], paths[2]]
    assert "half written" in passed_over[0][1]
    assert "SHA-256" in passed_over[1][1]


# --- made to do harm ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "training.pt"])
def test_a_pickle_that_runs_code_is_refused_by_name(saved: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "harmed"
    torch.save({"w": Evil(target)}, saved / name)
    reseal(saved)
    message = refused(saved)
    assert str(saved / name) in message
    assert f"{os.mkdir.__module__}.mkdir" in message
    assert not target.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["files"].update({"../x": d["files"]["model.pt"]}), "it lists"),
        (lambda d: d["files"].update({"/etc/passwd": d["files"].pop("model.pt")}), "it lists"),
        (lambda d: d["files"].pop("training.pt"), "it lists"),
        (lambda d: d.update(files=["model.pt"]), "it lists"),
        (lambda d: d["files"]["model.pt"].update(bytes=-1), "its entry for model.pt"),
        (lambda d: d["files"]["model.pt"].update(bytes=True), "its entry for model.pt"),
        (lambda d: d["files"].update({"model.pt": 3}), "its entry for model.pt"),
        (lambda d: d["files"]["model.pt"].update(bytes=10**18), "1,000,000,000,000,000,000"),
        (lambda d: d["files"]["model.pt"].update(sha256="0" * 64), "SHA-256"),
        (lambda d: d.update(step="3"), "step or epoch"),
        (lambda d: d.update(epoch=-3), "step or epoch"),
        (lambda d: d.update(meta=[]), "meta"),
        (lambda d: d.pop("torch"), "versions"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    reseal(saved, change)
    assert reason in refused(saved)


def test_a_huge_manifest_is_refused_unread(saved: Path) -> None:
    os.truncate(saved / "checkpoint.json", manifest.LIMIT_BYTES + 1)
    assert "larger than any manifest" in refused(saved)


@pytest.mark.parametrize("name", ["checkpoint.json", "model.pt", "training.pt"])
def test_a_link_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (saved / name).rename(outside)
    (saved / name).symlink_to(outside)
    assert "link" in refused(saved)


def test_a_pipe_is_refused_without_waiting_for_it(saved: Path) -> None:
    (saved / "checkpoint.json").unlink()
    os.mkfifo(saved / "checkpoint.json")
    assert "no regular file" in refused(saved)


def test_an_archive_that_unpacks_to_more_is_refused(saved: Path) -> None:
    whole = zipfile.ZipFile(saved / "model.pt")
    bomb = io.BytesIO()
    with whole, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in whole.infolist():
            out.writestr(entry.filename, whole.read(entry))
        out.writestr("archive/data/9", bytes(10**6))
    (saved / "model.pt").write_bytes(bomb.getvalue())
    reseal(saved)
    assert "compressed archive" in refused(saved)


def test_an_archive_with_a_path_outside_is_refused(saved: Path) -> None:
    with zipfile.ZipFile(saved / "model.pt", "a") as archive:
        archive.writestr("../../evil", b"x")
    reseal(saved)
    assert "names a path outside itself ('../../evil')" in refused(saved)


def test_a_tensor_larger_than_its_file_is_refused(saved: Path) -> None:
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.zeros(4).untyped_storage(), dtype=torch.float32, _internal=True
    )

    class Huge:
        def __reduce__(self) -> Any:
            size = (10**11,)
            build = torch._utils._rebuild_tensor_v2
            return build, (storage, 0, size, (1,), False, OrderedDict())

    torch.save({"w": Huge()}, saved / "model.pt")
    reseal(saved)
    assert "model.pt" in refused(saved)


@pytest.mark.parametrize("raw", [b"", b"hello", b"PK\x03\x04 no", b"\x80\x02}q\x00."])
def test_other_files_are_refused(saved: Path, raw: bytes) -> None:
    (saved / "model.pt").write_bytes(raw)
    reseal(saved)
    assert "model.pt" in refused(saved)


def test_a_file_that_holds_no_dictionary_is_refused(saved: Path) -> None:
    torch.save([1, 2], saved / "training.pt")
    reseal(saved)
    assert "holds no dictionary" in refused(saved)


def test_one_saved_on_another_device_loads_here(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        torch.save({"w": torch.ones(3)}, saved / "model.pt")
    reseal(saved)
    assert b"cuda:3" in (saved / "model.pt").read_bytes()
    weight = checkpoint.load(saved, map_location="cpu").model["w"]
    assert weight.device.type == "cpu"
    assert weight.tolist() == [1, 1, 1]


# --- disks that fail ---------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"may not mount a tmpfs: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_costs_nothing_that_was_saved(tiny_disk: Path) -> None:
    folder = tiny_disk / "checkpoints"
    first = save(folder, 1)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        checkpoint.save(
            folder / "step-00000002",
            model={"w": torch.zeros(10**6)},
            training={},
            meta={"step": 2},
        )
    assert str(folder / "step-00000002") in str(error.value)
    assert "free some space" in str(error.value)
    assert [p.name for p in folder.iterdir()] == [first.name]
    assert checkpoint.newest(folder) == (first, [])
    save(folder, 3)
    assert checkpoint.newest(folder)[0] == folder / "step-00000003"


def test_a_read_only_disk_is_named(tiny_disk: Path) -> None:
    folder = tiny_disk / "checkpoints"
    first = save(folder, 1)
    remount = ["mount", "-o", "remount,ro", str(tiny_disk)]
    subprocess.run(remount, check=True, capture_output=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(folder, 2)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        checkpoint.mark_best(folder, first)
    assert checkpoint.newest(folder) == (first, [])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("after_bytes", [0, 600])
def test_a_write_that_fails_leaves_nothing_half(
    saved: Path, monkeypatch: pytest.MonkeyPatch, code: int, after_bytes: int
) -> None:
    whole = atomic.HashingFile.write

    def write(self: atomic.HashingFile, data: bytes) -> int:
        if self.bytes >= after_bytes:
            self.error = OSError(code, os.strerror(code))
            raise self.error
        return whole(self, data)

    before = {p: p.read_bytes() for p in saved.iterdir()}
    monkeypatch.setattr(atomic.HashingFile, "write", write)
    for step in (2, 3):  # replacing, and new
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            save(saved.parent, step)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    assert {p: p.read_bytes() for p in saved.iterdir()} == before


def test_a_rename_that_fails_puts_the_old_one_back(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(saved.parent, 2)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    checkpoint.load(saved, map_location="cpu")


def test_folders_are_flushed_with_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this a power cut may take a new folder with all that is in it."""
    flushed: set[int] = set()
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        whole(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "runs" / "a" / "run"
    trainer(folder=folder).fit(loader(), epochs=1)
    path = checkpoint.find(folder)
    for each in (path, *path.parents):
        if each == tmp_path.parent:
            break
        assert each.stat().st_ino in flushed, each
    assert each == tmp_path.parent


def test_a_removed_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file or directory \(was the folder remov"):
        save(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "checkpoints", 1)


# --- kill -9 at every step ---------------------------------------------------------------------

_KILLED = """
import os, sys, pathlib, torch
from hasten.train import checkpoint
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])

def save(step, value):
    checkpoint.save(folder / checkpoint.name_of(step), model={"w": torch.full((300,), value)},
                    training={}, meta={"step": step, "value": value})

def work():
    save(2, 20.0)                      # new
    checkpoint.mark_best(folder, checkpoint.name_of(2))
    save(2, 21.0)                      # in the place of another
    checkpoint.prune(folder, 1)

save(1, 10.0)
checkpoint.mark_best(folder, checkpoint.name_of(1))
watched = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.truncate"}
left = int(sys.argv[2])
armed = False

def hook(event, args):
    global left
    if armed and event in watched and str(folder) in str(args[0]):
        left -= 1
        if left == 0:
            os._exit(9)                # as kill -9: nothing is flushed, nothing cleaned up

sys.addaudithook(hook)
first = left
for left in range(1, 200):
    child = os.fork()
    if child == 0:
        import shutil
        shutil.copytree(folder, f"{folder}-{left}")
        folder = pathlib.Path(f"{folder}-{left}")
        armed = True
        work()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(left)
        break
"""


def test_a_save_killed_at_any_of_its_steps_leaves_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = warm.run(
        [sys.executable, "-c", _KILLED, str(folder), "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    steps = int(done.stdout)
    assert steps > 20
    for number in range(1, steps + 1):
        there = tmp_path / f"checkpoints-{number}"
        found, passed_over = checkpoint.newest(there)
        assert found is not None, number
        assert passed_over == [], number
        loaded = checkpoint.load(found, map_location="cpu")
        assert set(loaded.model["w"].tolist()) == {loaded.meta["value"]}
        best = checkpoint.find(there, "best")
        checkpoint.load(best, map_location="cpu")
        save(there, 4)  # the next run goes on there, and cleans up
        names = sorted(p.name for p in there.iterdir())
        assert not [name for name in names if name.startswith(".")], names
