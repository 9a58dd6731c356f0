"""Files made to do harm: no code of theirs is run, and none takes memory that it does not have."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_helpers import loader, trainer

from hasten.errors import CheckpointError, HastenError
from hasten.train import agreement, checkpoint, manifest, weights


class Evil:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


MKDIR = f"{os.mkdir.__module__}.mkdir"

# Pickles by hand, each of which runs or builds something when it is loaded as pickle does.
BY_HAND = {
    "global, reduce": b"cposix\nmkdir\n(S'{}'\ntR.",
    "inst": b"(S'{}'\niposix\nmkdir\n.",
    "obj": b"(cposix\nmkdir\nS'{}'\no.",
    "builtin": b'c__builtin__\neval\n(S\'__import__("os").mkdir("{}")\'\ntR.',
    "build": b"\x80\x02ccollections\nOrderedDict\n)R(cposix\nmkdir\nS'{}'\ntb.",
    "newobj": b"\x80\x02csubprocess\nPopen\n(S'mkdir {}'\nt\x81.",
    "getattr": b"c__builtin__\ngetattr\n(cos\npath\nS'x'\ntR.",
    "a function of torch": b"\x80\x02ctorch.hub\nload\n(X\x01\x00\x00\x00xtR.",
    "a file that torch opens": b"\x80\x02ctorch\nload\n(X\x01\x00\x00\x00xtR.",
    "extension": b"\x80\x02\x82\x01.",
}


def archive(pickled: bytes, name: str = "archive/data.pkl") -> bytes:
    """What torch.save writes, with another pickle in it."""
    whole = io.BytesIO()
    torch.save({"w": torch.ones(7)}, whole)
    made = io.BytesIO()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(made, "w") as target:
        for entry in source.infolist():
            inner = entry.filename.partition("/")[2]
            content = pickled if inner == "data.pkl" else source.read(entry)
            target.writestr(name if inner == "data.pkl" else f"archive/{inner}", content)
    return made.getvalue()


def refused(path: Path) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError) as error:
            weights.read(path)
    assert not told, "one message is enough"
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare"])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_pickle_by_hand_is_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    harmed, path = tmp_path / "harmed", tmp_path / "w.pt"
    pickled = BY_HAND[name].replace(b"{}", str(harmed).encode())
    path.write_bytes(archive(pickled) if zipped else pickled)
    refused(path)
    assert not harmed.exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_in_every_protocol_it_is_named_what_would_run(
    tmp_path: Path, protocol: int, zipped: bool
) -> None:
    harmed, path = tmp_path / "harmed", tmp_path / "w.pt"
    pickled = pickle.dumps(Evil(harmed), protocol)
    path.write_bytes(archive(pickled) if zipped else pickled)
    message = refused(path)
    if protocol >= 2 or "posix" in message:  # older ones hold text by other instructions first
        assert MKDIR in message
        assert "--trust" in message
    assert not harmed.exists()


@pytest.mark.parametrize("deep", [False, True])
def test_in_the_optimizer_s_state_and_deep_in_a_nest(tmp_path: Path, deep: bool) -> None:
    harmed = tmp_path / "harmed"
    folder = tmp_path / "run"
    trainer(folder=folder).fit(loader(), epochs=1)
    kept = checkpoint.find(folder)
    state: Any = torch.load(kept / "training.pt", weights_only=False)
    if deep:
        state["schedulers"] = [[({"a": (1, [Evil(harmed)])},)]]
    else:
        state["optimizers"][0]["state"][0]["momentum_buffer"] = Evil(harmed)
    torch.save(state, kept / "training.pt")
    sealed = json.loads((kept / "checkpoint.json").read_text())
    del sealed["checksum"]
    for name, entry in sealed["files"].items():
        raw = (kept / name).read_bytes()
        entry["bytes"], entry["sha256"] = len(raw), hashlib.sha256(raw).hexdigest()
    (kept / "checkpoint.json").write_bytes(manifest.render(sealed))
    with pytest.raises(CheckpointError, match=MKDIR):
        trainer(folder=folder, resume=True).fit(loader(), epochs=2)
    assert not harmed.exists()


def test_a_whole_module_is_loaded_only_when_trusted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    torch.save(model, tmp_path / "whole.pt")
    torch.save({"model": model, "epoch": 3}, tmp_path / "inside.pt")
    for name in ("whole.pt", "inside.pt"):
        assert "torch.nn.modules.container.Sequential" in refused(tmp_path / name)
        state = weights.read(tmp_path / name, trust=True)
        assert state.keys() == {"0.weight", "0.bias"}
        assert torch.equal(state["0.weight"], model[0].weight)


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.ones(2), "b": torch.ones(3).half()},
        OrderedDict(w=nn.Parameter(torch.ones(2, 3).t())),
        {"state_dict": {"w": torch.ones(()), "n": torch.tensor(3), "s": torch.eye(3).to_sparse()}},
        {
            "model": {"w": torch.ones(0, 4)},
            "args": {"lr": 0.1, "names": ["a"], "raw": b"x", 3: None},
        },
        {"w": torch.zeros(1).expand(1000, 1000)},
        {"w": torch.arange(10)[2:8:2], "c": torch.ones(2, dtype=torch.complex64)},
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "old"])
def test_what_torch_saves_of_plain_things_loads(tmp_path: Path, content: Any, zipped: bool) -> None:
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    assert weights.read(tmp_path / "w.pt")


# --- what would take more memory than there is --------------------------------------------------


def op(text: str) -> bytes:
    return b"\x80\x02" + text.encode("latin-1") + b"."


def doubled(times: int) -> bytes:
    """A tuple of two of a tuple of two of ... : 2^times values in a few bytes."""
    parts = [b"\x80\x02K\x01q\x00"]
    parts += [b"h\x00h\x00\x86q\x00" for _ in range(times)]
    return b"".join([*parts, b"."])


BOMBS = {
    "bytearray": op("cbuiltins\nbytearray\n(J\xff\xff\xff\x7ft\x52"),
    "tensor of a size": op("ctorch\nTensor\n(J\xff\xff\xff\x7ftR"),
    "float tensor of a size": op("ctorch\nFloatTensor\n(J\xff\xff\xff\x7ftR"),
    "storage by hand": op("ctorch.storage\nUntypedStorage\n(J\xff\xff\xff\x7ftR"),
    "a text that is not there": b"\x80\x02X\xff\xff\xff\xffabc.",
    "doubled": doubled(60),
    "doubled as a key": doubled(60)[:-1] + b"}h\x00K\x01s.",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "itself in a tuple": b"\x80\x02]q\x00h\x00\x85a.",
    "empty": b"",
    "no end": b"\x80\x02]q\x00",
    "nothing to take": b"\x80\x02a.",
    "marks": b"\x80\x02" + b"(" * 1000 + b".",
}


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "bare"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_would_grow_is_refused(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(archive(BOMBS[name]) if zipped else BOMBS[name])
    refused(path)


def tensor_of(size: str, held: str, tmp_path: Path) -> Path:
    """A file with one tensor, of other sizes than it has."""
    whole = io.BytesIO()
    torch.save({"w": torch.ones(7)}, whole)
    with zipfile.ZipFile(io.BytesIO(whole.getvalue())) as source:
        pickled = source.read("archive/data.pkl")
    # BININT1 7 occurs twice: in the storage's name, and as the tensor's size.
    first, second, third = pickled.split(b"K\x07")
    numbers = {
        "7": b"K\x07",
        "huge": b"\x8a\x05\x00\x00\x00\x00\x10",
        "minus": b"J\xff\xff\xff\xff",
    }
    path = tmp_path / "w.pt"
    path.write_bytes(archive(first + numbers[held] + second + numbers[size] + third))
    return path


def test_tensors_that_claim_more_than_there_is_are_refused(tmp_path: Path) -> None:
    assert "values in 7" in refused(tensor_of("huge", "7", tmp_path))
    assert "in a file of" in refused(tensor_of("huge", "huge", tmp_path))
    assert "no counts" in refused(tensor_of("minus", "7", tmp_path))
    assert weights.read(tensor_of("7", "7", tmp_path))["w"].tolist() == [1.0] * 7


_BOUNDED = """
import resource, sys
import torch
from hasten.errors import HastenError
from hasten.train import weights
free = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (free, free))
for path in sys.argv[1:]:
    try:
        weights.read(path)
    except HastenError as error:
        print(path.rpartition("/")[2], type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_all_of_it_within_little_memory(tmp_path: Path) -> None:
    for number, (name, bomb) in enumerate(BOMBS.items()):
        (tmp_path / f"{number}-a.pt").write_bytes(archive(bomb))
        (tmp_path / f"{number}-b.pt").write_bytes(bomb)
        assert name
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("archive/data.pkl", bytes(2**20))
    (tmp_path / "zip.pt").write_bytes(compressed.getvalue())
    header = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "deep.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    for number, length in enumerate((2**63, 2**60, 2**31)):
        raw = struct.pack("<Q", length) + b"{}" + bytes(100)
        (tmp_path / f"{number}.safetensors").write_bytes(raw)
    with (tmp_path / "sparse.safetensors").open("wb") as file:  # 8 GiB that take no disk
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**33)
    paths = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, *paths], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(paths), done.stdout
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"CheckpointError"}


def test_json_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    deep = b"[" * 200_000
    path = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.save(path, model={"w": torch.ones(2)}, training={}, meta={"step": 1})
    (path.parent / "best.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        checkpoint.find(tmp_path, "best")
    body = deep + b',\n "checksum": "'
    (path / "checkpoint.json").write_bytes(
        body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
    )
    with pytest.raises(CheckpointError, match="no JSON"):
        checkpoint.load(path, map_location="cpu")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 1, "step": 1, "step": 2', "it says something twice"),
        ('{"schema": 1, "step": NaN', "NaN, which is no number"),
        ('{"schema": 1, "step": -Infinity', "-Infinity, which is no number"),
        ('{"schema": 1, "meta": {"a": {"b": 1, "b": 1}}', "it says something twice"),
        ('{"schema": 1, "step": ' + "9" * 5000, "no JSON"),
        ('{"schema": 1, "step": ' + "9" * 30 + ', "files": {"model.pt": {"bytes": 1, "sha256":'
         ' ""}, "training.pt": {"bytes": 1, "sha256": ""}}', "no count"),
    ],
)  # fmt: skip
def test_a_manifest_by_hand_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "step-00000001"
    checkpoint.save(path, model={"w": torch.ones(2)}, training={}, meta={"step": 1})
    body = text.encode() + b',\n "checksum": "'
    sealed = body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
    (path / "checkpoint.json").write_bytes(sealed)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(path, map_location="cpu")


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**70]}},
        {"w": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}},
        {"../../w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"w": [1]},
        [1],
    ],
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_header_by_hand_is_refused(tmp_path: Path, header: Any, in_parts: bool) -> None:
    """Of a file of weights, and of a part of a checkpoint."""
    if in_parts and isinstance(header, dict):
        place = json.dumps([["model", "w"], [1], [0]])
        header = {place if name == "w" else name: entry for name, entry in header.items()}
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(4)
    if not in_parts:
        (tmp_path / "w.safetensors").write_bytes(raw)
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            weights.load_into(
                nn.ParameterDict({"w": torch.ones(1)}),
                weights.read(tmp_path / "w.safetensors"),
                source=str(tmp_path / "w.safetensors"),
            )
        return
    path = tmp_path / "step-00000001"
    checkpoint.save(path, model={"w": None}, training={}, meta={"step": 1})
    (path / "part-00000.safetensors").write_bytes(raw)
    resealed(path, lambda d: d.update(schema=2), extra=["part-00000.safetensors"])
    with pytest.raises(CheckpointError):
        saved = checkpoint.load(path, map_location="cpu")
        weights.load_into(nn.ParameterDict({"w": torch.ones(1)}), saved.model, source="it")


def resealed(path: Path, change: Any, extra: Any = ()) -> None:
    """A checkpoint whose files and manifest were changed, with right checksums."""
    data = json.loads((path / "checkpoint.json").read_text())
    del data["checksum"]
    for name in (*data["files"], *extra):
        raw = (path / name).read_bytes()
        sha256 = hashlib.sha256(raw).hexdigest()
        data["files"][name] = {"sha256": sha256, "bytes": len(raw)}
    change(data)
    (path / "checkpoint.json").write_bytes(manifest.render(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["meta"].pop("kinds"),
        lambda d: d["meta"].update(history=[{"epoch": "1"}]),
        lambda d: d["meta"]["history"][0].update(loss="x"),
        lambda d: d["meta"]["history"][0].update(phases={"wait": "x"}),
        lambda d: d["meta"].update(best="x"),
        lambda d: d["meta"].update(best=[1]),
        lambda d: d["meta"].update(precision=3),
        lambda d: d["meta"].update(kinds=[]),
    ],
)
def test_a_run_is_not_gone_on_with_from_what_somebody_made_up(tmp_path: Path, change: Any) -> None:
    folder = tmp_path / "run"
    trainer(folder=folder).fit(loader(), epochs=1)
    resealed(checkpoint.find(folder), change)
    with pytest.raises(CheckpointError, match="hasten does not write"):
        trainer(folder=folder, resume=True).fit(loader(), epochs=2)


@pytest.mark.parametrize("name", ["rng", "sources", "optimizers", "loss", "spent"])
def test_nor_from_a_state_that_somebody_made_up(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    trainer(folder=folder).fit(loader(), epochs=1)
    path = checkpoint.find(folder)
    for junk in ("x", 3, [[3]], {"a": torch.ones(2)}):
        state = torch.load(path / "training.pt", weights_only=True)
        torch.save(state | {name: junk}, path / "training.pt")
        resealed(path, lambda data: None)
        with pytest.raises(CheckpointError):
            trainer(folder=folder, resume=True).fit(loader(), epochs=2)
        torch.save(state, path / "training.pt")


@pytest.mark.parametrize("path", ["/etc/passwd", sys.executable, "/dev/zero", "/dev/stdin"])
def test_files_of_other_kinds_are_named_as_such(path: str) -> None:
    if not Path(path).exists():
        pytest.skip("there is none here")
    message = refused(Path(path))
    assert "list index" not in message
    assert "cannot be read as a file of torch.save" in message or "no regular file" in message


# --- links -------------------------------------------------------------------------------------


def test_a_link_in_a_run_s_folder_is_not_written_through(tmp_path: Path) -> None:
    for name in ("checkpoints", "metrics.jsonl", "config.json", "ranks", ".ranks"):
        folder, outside = tmp_path / f"run-{name}", tmp_path / f"outside-{name}"
        folder.mkdir()
        outside.mkdir() if "." not in name[1:] else outside.write_text("mine\n")
        (folder / name).symlink_to(outside)
        with pytest.raises(HastenError, match="symbolic link"):
            trainer(folder=folder, resume=True).fit(loader(), epochs=1)
        assert (
            list(outside.iterdir()) == [] if outside.is_dir() else (outside.read_text() == "mine\n")
        )


def test_a_rank_s_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "outside").write_text("mine\n")
    (tmp_path / "ranks" / "rank-1.log").symlink_to(tmp_path / "outside")
    with pytest.raises(HastenError, match=r"rank-1\.log"):
        agreement.RankLog(1).open(tmp_path)
    assert (tmp_path / "outside").read_text() == "mine\n"


def test_a_checkpoint_that_is_a_link_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step, where in ((1, folder), (2, tmp_path / "elsewhere")):
        (tmp_path / "run").mkdir(exist_ok=True)
        where.mkdir(exist_ok=True)
        path = where / checkpoint.name_of(step)
        checkpoint.save(path, model={"w": torch.ones(2)}, training={}, meta={"step": step})
    (folder / "step-00000002").symlink_to(tmp_path / "elsewhere" / "step-00000002")
    found, passed_over = checkpoint.newest(folder)
    assert found == folder / "step-00000001"
    assert "link" in passed_over[0][1]
    assert checkpoint.prune(folder, 1) == []
    assert (tmp_path / "elsewhere" / "step-00000002").is_dir()
    assert checkpoint.load(tmp_path / "elsewhere" / "step-00000002", map_location="cpu").model


# --- weights that were exported ----------------------------------------------------------------


def test_exports_of_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).half()
    metadata = {str(n): "x" * n for n in range(20)}
    made = set()
    for _ in range(3):
        metadata = dict(reversed(metadata.items()))
        weights.export(model, tmp_path / "w.safetensors", metadata)
        made.add((tmp_path / "w.safetensors").read_bytes())
    assert len(made) == 1


def test_a_flipped_bit_in_an_export_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    weights.export(nn.Linear(3, 4), path, {"a": "b"})
    whole = path.read_bytes()
    for position in range(len(whole)):
        if whole[position : position + 1] == b" ":
            continue  # the header's padding is of no meaning
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"w\.safetensors"):
            weights.read(path)
    path.write_bytes(whole)
    assert weights.read(path)
