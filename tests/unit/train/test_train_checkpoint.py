"""Checkpoints that are as they should be: saving, loading, choosing, pruning, marking the best."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hasten
from hasten.errors import CheckpointError, UsageError
from hasten.train import atomic, checkpoint, manifest


def save(folder: Path, step: int, **meta: Any) -> Path:
    path = folder / checkpoint.name_of(step)
    checkpoint.save(
        path,
        model={"weight": torch.full((2, 3), float(step))},
        training={"step": step},
        meta={"step": step, **meta},
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    training = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "groups": [{"betas": (0.9, 0.99)}],
        },
        "scheduler": OrderedDict(milestones=Counter([5, 9]), last=None),
        "shape": torch.Size([2, 3]),
        "flags": [True, 1, 0.1, "text", None],
        "random": torch.arange(5, dtype=torch.uint8),
    }
    model = {"a": torch.randn(3, 4), "b": torch.tensor(7)}
    path = folder / "step-00000012"
    checkpoint.save(path, model=model, training=training, meta={"step": 12, "epoch": 2, "né": [1]})

    saved = checkpoint.load(path, map_location="cpu")

    assert saved.path == path
    assert saved.meta == {"step": 12, "epoch": 2, "né": [1]}
    assert all(torch.equal(saved.model[name], model[name]) for name in model)
    assert saved.training["optimizer"]["state"][0]["step"] == 3.0
    assert saved.training["optimizer"]["groups"] == [{"betas": (0.9, 0.99)}]
    assert saved.training["scheduler"] == training["scheduler"]
    assert saved.training["shape"] == (2, 3)
    assert saved.training["flags"] == training["flags"]
    assert torch.equal(saved.training["random"], training["random"])
    assert checkpoint.load(path, map_location="cpu", training=False).training == {}


def test_the_manifest_says_versions_and_files(folder: Path) -> None:
    path = save(folder, 4, epoch=1)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["hasten"] == hasten.__version__
    assert manifest["torch"] == str(torch.__version__)
    assert (manifest["step"], manifest["epoch"]) == (4, 1)
    assert manifest["files"]["model.pt"]["bytes"] == (path / "model.pt").stat().st_size
    assert sorted(p.name for p in path.iterdir()) == ["checkpoint.json", "model.pt", "training.pt"]


def test_tied_tensors_are_written_once_and_views_alone(folder: Path) -> None:
    table = torch.randn(1000, 100)
    path = folder / "step-00000001"
    checkpoint.save(
        path, model={"a": table, "b": table, "c": table[:2]}, training={}, meta={"step": 1}
    )
    assert (path / "model.pt").stat().st_size < 1.1 * table.nbytes
    saved = checkpoint.load(path, map_location="cpu").model
    assert saved["a"].data_ptr() == saved["b"].data_ptr()
    assert torch.equal(saved["c"], table[:2])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (lambda: 1, "training['scheduler']['fn'][1]: function cannot go"),
        (np.float64(1), "training['scheduler']['fn'][1]: numpy.float64 cannot go"),
        (np.zeros(3), "training['scheduler']['fn'][1]: numpy.ndarray cannot go"),
        ({(1, 2): 3}, "training['scheduler']['fn'][1] has a key of type tuple"),
        (Path("x"), "Path cannot go"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(folder: Path, value: object, where: str) -> None:
    save(folder, 1)
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(
            folder / "step-00000002",
            model={},
            training={"scheduler": {"fn": [0, value]}},
            meta={"step": 2},
        )
    assert where in str(error.value)
    assert [p.name for p in folder.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    "meta",
    [{}, {"step": -1}, {"step": True}, {"step": 1, "x": float("nan")}, {"step": 1, "x": {1}}],
)
def test_meta_must_be_json_with_a_step(folder: Path, meta: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="meta"):
        checkpoint.save(folder / "step-00000001", model={}, training={}, meta=meta)


def test_saving_the_same_step_again_replaces_it(folder: Path) -> None:
    path = save(folder, 3, tries=1)
    save(folder, 3, tries=2)
    assert checkpoint.load(path, map_location="cpu").meta["tries"] == 2
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_the_newest_is_told_by_its_step_not_by_a_clock(folder: Path) -> None:
    for step in (900, 1000, 20):
        save(folder, step)
    os.utime(folder / "step-00001000", (0, 0))
    os.utime(folder / "step-00000900" / "checkpoint.json", (0, 0))
    assert checkpoint.newest(folder) == (folder / "step-00001000", [])


def test_no_folder_and_an_empty_folder_have_no_newest(folder: Path) -> None:
    assert checkpoint.newest(folder) == (None, [])
    folder.mkdir()
    assert checkpoint.newest(folder) == (None, [])


def test_prune_keeps_the_newest_the_best_and_those_named(folder: Path) -> None:
    paths = [save(folder, step) for step in range(1, 8)]
    checkpoint.mark_best(folder, paths[1], metric="val_accuracy", value=0.9)
    removed = checkpoint.prune(folder, 2, also={paths[3]})
    assert sorted(removed) == [paths[0], paths[2], paths[4]]
    left = sorted(p.name for p in folder.iterdir())
    assert left == ["best.json", *(paths[i].name for i in (1, 3, 5, 6))]


def test_prune_does_not_count_what_is_broken(folder: Path) -> None:
    paths = [save(folder, step) for step in (1, 2, 3)]
    flip(paths[2] / "model.pt", -30)
    assert checkpoint.prune(folder, 1) == [paths[0]]
    assert checkpoint.newest(folder)[0] == paths[1]


class Reads:
    """Notes the files that are read whole, against their checksums."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        read = manifest._digest

        def digest(file: Any) -> str:
            self.names.append(Path(file.name).name)
            return read(file)

        patch.setattr(manifest, "_digest", digest)

    def take(self) -> list[str]:
        names, self.names = self.names, []
        return names


def aged(path: Path) -> None:
    """As files are that nobody has touched for a while."""
    for file in path.iterdir():
        os.utime(file, (time.time() - 60,) * 2)


def test_choosing_a_checkpoint_and_loading_it_reads_it_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(folder, 1)
    aged(path)
    reads = Reads(monkeypatch)
    assert checkpoint.newest(folder)[0] == path
    checkpoint.load(path, map_location="cpu")
    assert reads.take() == ["model.pt", "training.pt"]
    flip(path / "model.pt", -30)
    assert checkpoint.newest(folder)[0] is None
    assert reads.take() == ["model.pt"]
    with pytest.raises(CheckpointError, match="is altered"):
        checkpoint.load(path, map_location="cpu")


def test_a_file_that_was_changed_just_now_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(folder, 1)
    reads = Reads(monkeypatch)
    for _ in range(2):
        checkpoint.load(path, map_location="cpu")
    assert reads.take() == ["model.pt", "training.pt"] * 2


def test_what_was_written_is_not_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    for step in (1, 2, 3, 4):
        save(folder, step)
        checkpoint.prune(folder, 2)
    assert reads.take() == []
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]
    aged(folder / "step-00000004")  # touched by somebody else
    checkpoint.prune(folder, 1)
    assert reads.take() == ["model.pt", "training.pt"]


def test_prune_refuses_to_keep_none(folder: Path) -> None:
    with pytest.raises(UsageError, match="keep"):
        checkpoint.prune(folder, 0)


def test_best_is_marked_moved_and_found(folder: Path) -> None:
    paths = [save(folder, step) for step in (1, 2, 3)]
    assert checkpoint.best(folder) is None
    assert checkpoint.find(folder, "best") == paths[2]
    checkpoint.mark_best(folder, paths[0])
    checkpoint.mark_best(folder, paths[1], value=0.5)
    assert checkpoint.best(folder) == paths[1]
    assert json.loads((folder / "best.json").read_text())["value"] == 0.5
    assert checkpoint.find(folder.parent, "best") == paths[1]


def test_a_mark_that_names_no_checkpoint_is_refused(folder: Path) -> None:
    save(folder, 1)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.mark_best(folder, "step-00000009")
    for text in ('{"folder": "../../etc"}', "[]", "{", '{"folder": "/tmp/step-00000001"}'):
        (folder / "best.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"best\.json names no checkpoint"):
            checkpoint.best(folder)
    (folder / "best.json").write_text('{"folder": "step-00000009"}')
    with pytest.raises(CheckpointError, match="names step-00000009, which is not there"):
        checkpoint.find(folder, "best")


def test_find_takes_a_run_its_checkpoints_or_one(folder: Path) -> None:
    paths = [save(folder, step) for step in (1, 2)]
    assert checkpoint.find(folder.parent) == paths[1]
    assert checkpoint.find(folder) == paths[1]
    assert checkpoint.find(str(paths[0])) == paths[0]


def test_find_says_what_was_wrong(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.find(folder)
    path = save(folder, 1)
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.find(path / "model.pt")
    (path / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint:\n.*model\.pt is missing"):
        checkpoint.find(folder)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint$"):
        checkpoint.find(folder.parent.parent)


def test_a_leftover_is_removed_when_its_writer_is_dead(folder: Path) -> None:
    path = save(folder, 1)
    host, living = atomic._host(), os.getppid()
    dead = folder / f".step-00000002.tmp-{host}-{2**22 + 7}-{'a' * 12}"
    alive = folder / f".step-00000002.tmp-{host}-{living}-{'b' * 12}"
    elsewhere = folder / f".step-00000002.tmp-{'0' * 8}-1-{'c' * 12}"
    for leftover in (dead, alive, elsewhere):
        leftover.mkdir()
        (leftover / "model.pt").write_bytes(b"half")
    stranger = folder / ".something-else"
    stranger.mkdir()

    save(folder, 3)
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()
    assert checkpoint.newest(folder) == (folder / "step-00000003", [])

    later = os.stat(elsewhere).st_mtime + atomic.STALE_AFTER_S + 1  # noqa: PTH116
    assert sorted(atomic.clean(folder, clock=lambda: later)) == sorted([alive, elsewhere])
    assert stranger.exists()
    assert path.exists()


def test_one_moved_aside_is_used_and_put_back(folder: Path) -> None:
    path = save(folder, 5)
    aside = folder / f".step-00000005.old-{atomic._host()}-{2**22 + 7}-{'a' * 12}"
    path.rename(aside)
    assert checkpoint.newest(folder) == (aside, [])
    assert checkpoint.load(aside, map_location="cpu").meta["step"] == 5
    atomic.clean(folder)
    assert checkpoint.newest(folder) == (path, [])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
