"""Weights: any common file, any wrapper, all of them or none."""

from __future__ import annotations

import errno
import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten
from hasten.errors import CheckpointError, UsageError
from hasten.train import checkpoint, weights


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Wake the compiler once: it sets an environment variable of its own for the process."""
    torch.compile(nn.Identity())


class Net(nn.Module):
    """With a module of its own that is called like a wrapper's."""

    def __init__(self, classes: int = 3, channels: int = 1, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3)
        self.module = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(self.conv(x)).mean((2, 3)))


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        if tie:
            self.out.weight = self.embed.weight


def compiled_inside(model: Net) -> nn.Module:
    model.conv = torch.compile(model.conv)  # type: ignore[assignment]
    model.module[0] = torch.compile(model.module[0])  # type: ignore[assignment]
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda m: m,
    "DataParallel": nn.DataParallel,
    "compiled": lambda m: torch.compile(m),  # type: ignore[return-value]
    "compiled DataParallel": lambda m: torch.compile(nn.DataParallel(m)),  # type: ignore
    "DataParallel of compiled": lambda m: nn.DataParallel(torch.compile(m)),  # type: ignore
    "twice": lambda m: nn.DataParallel(nn.DataParallel(m)),
    "compiled inside": compiled_inside,
    "compiled inside DataParallel": lambda m: nn.DataParallel(compiled_inside(m)),
}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights.state_of(model).items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def misfit(model: nn.Module, state: dict[str, Any]) -> str:
    before = values(model)
    with pytest.raises(CheckpointError) as error:
        weights.load_into(model, state, source="runs/a/model.pt")
    assert same(values(model), before)
    assert "runs/a/model.pt" in str(error.value)
    return str(error.value)


# --- wrappers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_has_the_names_of_the_plain_model(wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](Net())
    assert list(weights.state_of(wrapped)) == list(Net().state_dict())
    assert type(weights.plain(wrapped)) is Net


@pytest.mark.parametrize("saved", WRAPPERS)
@pytest.mark.parametrize("loaded", WRAPPERS)
def test_any_wrapping_loads_into_any_other(saved: str, loaded: str) -> None:
    source, target = WRAPPERS[saved](Net()), WRAPPERS[loaded](Net())
    for state in (source.state_dict(), dict(source.state_dict()), weights.state_of(source)):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        assert weights.load_into(target, state, source="x") == []
        assert same(values(target), values(source))


def test_ddp_is_unwrapped(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(Net())
        assert list(weights.state_of(wrapped)) == list(Net().state_dict())
        assert isinstance(weights.plain(torch.compile(wrapped)), Net)  # type: ignore[arg-type]
        assert weights.load_into(wrapped, Net().state_dict(), source="x") == []
    finally:
        torch.distributed.destroy_process_group()


# --- what does not fit -------------------------------------------------------------------------


def test_another_number_of_classes_is_said() -> None:
    message = misfit(Net(classes=7), Net(classes=3).state_dict())
    assert "head.weight is [3, 4] in the file and [7, 4] in the model" in message
    assert "another number of classes: 3 in the file, 7 in the model" in message


def test_another_number_of_channels_is_said() -> None:
    message = misfit(Net(channels=3), Net().state_dict())
    assert "another number of channels: 1 in the file, 3 in the model" in message


def test_other_widths_are_said() -> None:
    message = misfit(Net(width=8), Net().state_dict())
    assert "check --model" in message
    assert "and 2 more" in message


def test_missing_and_unknown_names_are_listed_shortly() -> None:
    state = OrderedDict(Net().state_dict())
    for index in range(17):
        state[f"extra.{index}"] = torch.zeros(1)
    del state["head.bias"]
    message = misfit(Net(), state)
    assert "missing in the file: head.bias\n" in message
    assert (
        "unknown to the model: extra.0, extra.1, extra.2, extra.3, extra.4 and 12 more" in message
    )
    assert "check --model" in message


def test_a_file_of_another_model_is_said() -> None:
    message = misfit(Net(), nn.Linear(2, 2).state_dict())
    assert "No name is in both" in message


def test_two_names_for_one_tensor_are_refused() -> None:
    state = dict(nn.Linear(2, 2).state_dict())
    state["module.weight"] = torch.ones(2, 2)
    assert "weight and module.weight, which are both weight" in misfit(nn.Linear(2, 2), state)


def test_a_dtype_that_would_lose_its_meaning_is_refused() -> None:
    state = Net().state_dict() | {"head.bias": torch.zeros(3, dtype=torch.complex64)}
    assert "head.bias is complex64 in the file and float32 in the model" in misfit(Net(), state)


def test_a_tensor_without_values_is_refused() -> None:
    state = Net().state_dict() | {"head.bias": torch.zeros(3, device="meta")}
    assert "head.bias has no values" in misfit(Net(), state)


def test_lazy_and_meta_models_say_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="run one batch through it"):
        weights.load_into(nn.LazyLinear(3), nn.Linear(2, 3).state_dict(), source="x")
    with pytest.raises(CheckpointError, match="to_empty"):
        weights.load_into(nn.Linear(2, 3, device="meta"), nn.Linear(2, 3).state_dict(), source="x")


# --- what fits with a word ---------------------------------------------------------------------


def test_casts_are_made_and_said() -> None:
    source, target = Net(), Net()
    notes = weights.load_into(target, source.bfloat16().state_dict(), source="x")
    assert notes == ["8 tensors cast from bfloat16 to float32"]
    assert target.head.weight.dtype is torch.float32
    assert torch.equal(target.head.weight, source.head.weight.float())
    halves = {name: value.half() for name, value in Net().state_dict().items()}  # counters too
    assert len(weights.load_into(Net(), halves, source="x")) == 2


def test_counters_that_old_files_lack_are_left() -> None:
    state = {k: v for k, v in Net().state_dict().items() if not k.endswith("num_batches_tracked")}
    assert weights.load_into(Net(), state, source="old.pt") == [
        "old.pt lacks module.0.num_batches_tracked; left as they are"
    ]


def test_tied_weights_load_from_either_name() -> None:
    whole = Tied().state_dict()
    for name in ("embed.weight", "out.weight"):
        model = Tied()
        assert weights.load_into(model, {name: whole[name]}, source="x") == []
        assert torch.equal(model.out.weight, whole[name])
        assert model.out.weight is model.embed.weight
    assert "are one tensor in the model and differ" in misfit(Tied(), Tied(tie=False).state_dict())


def test_the_versions_of_modules_reach_the_modules() -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state: Any, prefix: Any, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    source = nn.DataParallel(nn.Sequential(Versioned(2, 2)))
    weights.load_into(nn.Sequential(Versioned(2, 2)), source.state_dict(), source="x")
    weights.load_into(source, weights.state_of(source), source="x")
    assert seen == [3, 3]


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapping", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_save_files_are_read(tmp_path: Path, wrapping: str | None, zipped: bool) -> None:
    state = Net().state_dict()
    content = state if wrapping is None else {wrapping: state, "epoch": 3, "optimizer": {"a": 1}}
    path = tmp_path / "net.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert same(weights.read(path), dict(state))


def test_a_file_from_another_device_is_read_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    assert weights.read(tmp_path / "x.pt")["w"].device.type == "cpu"


def test_a_run_gives_its_best_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        path = folder / checkpoint.name_of(step)
        state = {"w": torch.tensor(float(step))}
        checkpoint.save(path, model=state, training={}, meta={"step": step})
    assert weights.read(tmp_path)["w"] == 3
    checkpoint.mark_best(folder, checkpoint.name_of(2))
    assert weights.read(tmp_path)["w"] == 2
    assert weights.read(folder / "step-00000001")["w"] == 1
    assert weights.read(folder / "step-00000001" / "checkpoint.json")["w"] == 1
    assert weights.read(folder / "step-00000001" / "model.pt")["w"] == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1], "it is a list"),
        ({}, "is empty"),
        ({"epoch": 3}, "'epoch' is a int"),
        ({3: torch.ones(1)}, "the key 3"),
        ({"state_dict": {"model": {"w": "text"}}}, "'w' is a str"),
    ],
)
def test_files_without_weights_are_refused(tmp_path: Path, content: Any, reason: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=reason):
        weights.read(tmp_path / "x.pt")


def test_a_whole_pickled_model_is_refused_by_the_class_it_needs(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        weights.read(tmp_path / "x.pt")


def test_missing_files_and_strange_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.pt: No such file"):
        weights.read(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        weights.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        weights.read(tmp_path / "pipe")


def test_export_and_read_back(tmp_path: Path) -> None:
    model = nn.DataParallel(Net().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    path = tmp_path / "model.safetensors"
    weights.export(model, path, {"classes": '["a"]'})
    weights.export(model, path, {"classes": '["b"]'})
    assert same(weights.read(path), values(model))
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
        assert len(metadata.pop("hasten_sha256")) == 64
        assert metadata == {
            "classes": '["b"]',
            "format": "pt",
            "hasten": hasten.__version__,
        }
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_tied_and_overlapping_weights_are_exported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = Tied()
    weights.export(model, path, {})
    assert list(weights.read(path)) == ["embed.weight"]
    other = Tied()
    weights.load_into(other, weights.read(path), source="x")
    assert torch.equal(other.out.weight, model.embed.weight)

    views = nn.Module()
    table = torch.randn(6, 4)
    views.register_buffer("low", table[:4])
    views.register_buffer("high", table[2:])
    views.register_buffer("empty", torch.zeros(0))
    views.register_buffer("turned", table.t())
    weights.export(views, path, {})
    assert same(weights.read(path), values(views))


def test_export_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    for metadata in ({"a": 1}, {"hasten": "2"}):
        with pytest.raises(UsageError, match="must be strings"):
            weights.export(Net(), tmp_path / "x.safetensors", metadata)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    weights.export(Net(), path, {})
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: No space left on device"):
        weights.export(Net(), path, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_export_into_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save"):
        weights.export(Net(), tmp_path / "gone" / "model.safetensors", {})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"abc",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 56) + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}  ',
    ],
)
def test_safetensors_that_lie_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        weights.read(path)


def test_a_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights.export(Net(), path, {})
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="cut or altered"):
        weights.read(path)
