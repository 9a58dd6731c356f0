"""A classifier from its files alone: what is found, refused, needed, and never run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hasten.devices import runtime
from hasten.errors import CheckpointError, DataError, HastenError, OutOfDeviceMemory, UsageError
from hasten.train import checkpoint, manifest, weights
from hasten.train.precision import Precision
from hasten.vision import data
from hasten.vision.classify import Classifier, load, settle
from hasten.vision.evaluating import measure
from hasten.vision.facts import Facts, Given, class_names

CPU = torch.device("cpu")


def only_checkpoint(run: Path) -> Path:
    return checkpoint.find(run, "newest")


def copy(run: Path, where: Path) -> Path:
    shutil.copytree(run, where)
    return where


def rewrite(run: Path, to: Path, **changes: Any) -> Path:
    """A checkpoint with the run's weights and another config."""
    saved = checkpoint.load(only_checkpoint(run), map_location="cpu")
    meta = dict(saved.meta)
    meta["config"] = {**meta["config"], **changes}
    path = to / "checkpoints" / checkpoint.name_of(meta["step"])
    path.parent.parent.mkdir(exist_ok=True)
    checkpoint.save(path, model=saved.model, training=saved.training, meta=meta)
    return path


def given_for_digits(run: Path) -> Given:
    (normalize,) = [load(run, "cpu").facts.transform]
    config = normalize.to_config()
    return Given(
        model="small",
        classes=10,
        image_size=8,
        channels=1,
        mean=config["mean"],
        std=config["std"],
    )


def eight() -> torch.Tensor:
    return data.load("digits").val[3][0]


def history(run: Path) -> dict[str, Any]:
    return manifest.read(only_checkpoint(run)).meta["history"][-1]


def probabilities(classifier: Classifier) -> torch.Tensor:
    return classifier.probabilities(data.load("digits").val[:16][0])


# --- what a run gives -----------------------------------------------------------------------------


def test_a_run_has_all_that_is_needed(digits_run: Path) -> None:
    classifier = load(digits_run, "cpu")
    assert classifier.classes == tuple("0123456789")
    assert classifier.device == CPU
    assert classifier.path == only_checkpoint(digits_run)
    assert not any(module.training for module in classifier.model.modules())
    assert (classifier.precision.name, classifier.precision.channels_last) == ("bfloat16", True)
    assert classifier.preparation.size == 8 and classifier.preparation.channels == 1
    rows = probabilities(classifier)
    assert rows.dtype == torch.float32 and rows.shape == (16, 10)
    assert torch.allclose(rows.sum(1), torch.ones(16), atol=1e-5)


@pytest.mark.parametrize("name", ["digits_run", "photos_run"])
def test_measuring_gives_the_figures_of_the_training(
    name: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(name)
    measured = measure(load(run, "cpu"), num_workers=0)
    want = history(run)
    assert measured.evaluation.accuracy == want["val_accuracy"]
    assert measured.evaluation.loss == pytest.approx(want["val_loss"], rel=1e-6)


def test_another_precision_may_be_asked_for(digits_run: Path) -> None:
    plain = load(digits_run, "cpu", precision="float32")
    assert plain.precision.name == "float32"
    trained = load(digits_run, "cpu")
    difference = (probabilities(plain) - probabilities(trained)).abs().max()
    assert 0 < difference < 0.02
    with pytest.raises(UsageError, match="float8"):
        load(digits_run, "cpu", precision="float8")


def test_best_and_last(digits_run: Path, tmp_path: Path) -> None:
    run = copy(digits_run, tmp_path / "run")
    saved = checkpoint.load(only_checkpoint(run), map_location="cpu")
    blank = {key: torch.zeros_like(value) for key, value in saved.model.items()}
    meta = {**saved.meta, "step": 99, "epoch": 2}
    later = run / "checkpoints" / checkpoint.name_of(99)
    checkpoint.save(later, model=blank, training=saved.training, meta=meta)

    best, last = load(run, "cpu"), load(run, "cpu", which="last")
    assert best.path == saved.path and "the best" in best.about
    assert last.path == later and "epoch 2, step 99, the last" in last.about
    assert not any(value.any() for value in last.model.state_dict().values())

    (run / "checkpoints" / checkpoint.BEST).unlink()
    assert load(run, "cpu").path == later
    with pytest.raises(UsageError, match="best or last"):
        load(run, "cpu", which="first")
    with pytest.raises(UsageError, match="is no run"):
        load(later, "cpu", which="best")


def test_one_checkpoint_and_its_files(digits_run: Path) -> None:
    path = only_checkpoint(digits_run)
    want = probabilities(load(digits_run, "cpu"))
    for each in (path, path / "checkpoint.json", path / "model.pt", path.parent):
        assert torch.equal(probabilities(load(each, "cpu")), want)


def test_exported_weights_take_the_facts_beside_them(digits_run: Path, tmp_path: Path) -> None:
    want = probabilities(load(digits_run, "cpu", precision="float32"))
    exported = load(digits_run / "model.safetensors", "cpu", precision="float32")
    assert "config.json" in exported.about
    assert torch.equal(probabilities(exported), want)

    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(digits_run / name, kept / name)
    alone = load(kept, "cpu", precision="float32")
    assert alone.path == kept / "model.safetensors"
    assert torch.equal(probabilities(alone), want)

    (kept / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON"):
        load(kept, "cpu")
    (kept / "config.json").write_text('{"config": {}}', encoding="utf-8")
    with pytest.raises(UsageError, match="--model, --classes, --image-size"):
        load(kept, "cpu")


# --- weights alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_plain_weights_with_what_is_said_of_them(
    digits_run: Path, tmp_path: Path, prefix: str
) -> None:
    state = weights.read(digits_run)
    path = tmp_path / "weights.pth"
    torch.save({prefix + key: value for key, value in state.items()}, path)
    given = given_for_digits(digits_run)
    classifier = load(path, "cpu", given=given)
    assert classifier.precision.name == "float32"
    want = load(digits_run, "cpu", precision="float32")
    assert torch.allclose(probabilities(classifier), probabilities(want), atol=1e-6)


def test_weights_of_a_wrapped_model(digits_run: Path, tmp_path: Path) -> None:
    model = nn.DataParallel(load(digits_run, "cpu").model)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "dp.pt")
    classifier = load(tmp_path / "dp.pt", "cpu", given=given_for_digits(digits_run))
    want = load(digits_run, "cpu", precision="float32")
    assert torch.allclose(probabilities(classifier), probabilities(want), atol=1e-6)


def test_what_is_missing_is_named(digits_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(weights.read(digits_run), path)
    with pytest.raises(UsageError, match=r"give --model, --classes, --image-size too"):
        load(path, "cpu")
    with pytest.raises(UsageError, match=r"give --image-size too"):
        load(path, "cpu", given=Given(model="small", classes=10))
    with pytest.raises(UsageError, match="no model named"):
        load(path, "cpu", given=Given(model="smal", classes=10, image_size=8, channels=1))
    with pytest.raises(CheckpointError, match="10 in the file, 9 in the model"):
        load(path, "cpu", given=Given(model="small", classes=9, image_size=8, channels=1))
    with pytest.raises(UsageError, match="2 values and the images 1 channels"):
        given = Given(model="small", classes=10, image_size=8, channels=1, mean=[0, 0], std=[1, 1])
        load(path, "cpu", given=given)
    with pytest.raises(UsageError, match="go together"):
        Given(mean=[0.5])
    unscaled = load(path, "cpu", given=Given(model="small", classes=10, image_size=8, channels=1))
    assert any("only scaled to 0..1" in note for note in unscaled.notes)


def test_names_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ufeffcat\n\n  dog \nété\n", encoding="utf-8")
    assert class_names(path) == class_names(str(path)) == ("cat", "dog", "été")
    assert class_names("3") == class_names(3) == ("0", "1", "2")
    assert class_names(["a", "b"]) == ("a", "b")
    for bad, message in (
        (0, "from 1 up"),
        ("0", "from 1 up"),
        (["a", "a"], "twice"),
        ([], "names no class"),
        (tmp_path / "none", "no such file"),
        (tmp_path, "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            class_names(bad)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        class_names(path)


def test_a_checkpoint_is_not_contradicted(digits_run: Path) -> None:
    with pytest.raises(UsageError, match="leave out --classes, --channels"):
        load(digits_run, "cpu", given=Given(classes=3, channels=1))
    with pytest.raises(UsageError, match="holds the model small"):
        load(digits_run, "cpu", given=Given(model="lesson"))
    assert load(digits_run, "cpu", given=Given(model="small")).classes


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_no_checkpoint(digits_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "nothing", "cpu")
    with pytest.raises(CheckpointError, match="is no run and no checkpoint"):
        load(tmp_path, "cpu")
    with pytest.raises(CheckpointError, match=r"it holds runs, give one of them: .*digits"):
        load(digits_run.parent, "cpu")
    (tmp_path / "cat.JPG").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is an image"):
        load(tmp_path / "cat.JPG", "cpu")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        load(tmp_path / "notes.txt", "cpu")


def test_a_broken_byte(digits_run: Path, tmp_path: Path) -> None:
    run = copy(digits_run, tmp_path / "run")
    path = only_checkpoint(run) / "model.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.pt is altered"):
        load(run, "cpu")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_file_that_would_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"weight": Evil(mark)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load(tmp_path / "evil.pt", "cpu", given=Given(model="small", classes=2, image_size=8))
    assert not mark.exists()


def test_a_model_from_a_file_is_run_only_when_asked_for(digits_run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = tmp_path / "net.py"
    code.write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from hasten.vision.models import create\n"
        "def make(classes, channels, image_size):\n"
        "    return create('small', classes=classes, channels=channels, image_size=image_size)\n"
    )
    name = f"{code}:make"
    description = {"name": name, "classes": 10, "channels": 1, "image_size": 8}
    path = rewrite(digits_run, tmp_path / "run", architecture=description)
    with pytest.raises(UsageError, match="never runs code by itself: pass --model"):
        load(path, "cpu")
    assert not mark.exists()
    classifier = load(path, "cpu", given=Given(model=name))
    assert mark.exists()
    assert torch.equal(probabilities(classifier), probabilities(load(digits_run, "cpu")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ["a", "b"]}, "does not fit its classes"),
        ({"classes": []}, "its classes are"),
        ({"classes": "0123456789"}, "its classes are"),
        ({"classes": ["a"] * 10}, "same name"),
        ({"classes": None}, "its classes are"),
        ({"shape": [1, 8]}, "describes its model wrongly"),
        ({"shape": [1, 8, 9]}, "does not fit"),
        ({"shape": None}, "describes its model wrongly"),
        ({"architecture": "small"}, "describes its model wrongly"),
        ({"transform": {"name": "os.system"}}, "unknown"),
        ({"transform": None}, "JSON object"),
        ({"settings": 3}, "its settings are"),
        ({"preparation": {"size": -1}}, "preparation"),
    ],
)
def test_a_config_that_cannot_be(
    digits_run: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = rewrite(digits_run, tmp_path / "run", **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path, "cpu")
    assert str(path) in str(caught.value)


def test_a_config_with_something_missing(digits_run: Path, tmp_path: Path) -> None:
    shutil.copy(digits_run / "model.safetensors", tmp_path)
    content = json.loads((digits_run / "config.json").read_text(encoding="utf-8"))
    del content["config"]["transform"]
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="says nothing of the model's transform"):
        load(tmp_path, "cpu")


def test_a_checkpoint_of_another_kind_of_run(digits_run: Path, tmp_path: Path) -> None:
    saved = checkpoint.load(only_checkpoint(digits_run), map_location="cpu")
    path = tmp_path / "checkpoints" / checkpoint.name_of(1)
    meta = {"step": 1, "config": {}}
    checkpoint.save(path, model=saved.model, training={}, meta=meta)
    with pytest.raises(UsageError, match="--model, --classes"):
        load(path, "cpu")
    assert load(path, "cpu", given=given_for_digits(digits_run)).classes[9] == "9"


# --- predicting -----------------------------------------------------------------------------------


def test_paths_tensors_and_arrays_are_one(photos_run: Path, photos: Path) -> None:
    from hasten.vision import decode

    classifier = load(photos_run, "cpu")
    paths = sorted(photos.glob("*/*.png"))
    found = classifier.predict(paths, top=3)
    assert len(found) == len(paths)
    for path, prediction in zip(paths, found, strict=True):
        array = decode.decode(path)
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        backwards = array[:, :, ::-1].copy()[:, :, ::-1]
        for image in (path, str(path), array, backwards, tensor, tensor[None]):
            (again,) = classifier.predict(image, top=3, batch_size=1)
            assert [guess.label for guess in again.top] == [g.label for g in prediction.top]
            assert again.probability == pytest.approx(prediction.probability, abs=1e-5)


def test_top_is_sorted_and_no_longer_than_the_classes(digits_run: Path) -> None:
    classifier = load(digits_run, "cpu")
    (found,) = classifier.predict(eight(), top=50)
    values = [guess.probability for guess in found.top]
    assert len(values) == 10 and values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(1)
    assert (found.label, found.probability) == (found.top[0].label, values[0])
    assert classifier.predict([]) == []
    assert len(classifier.predict(data.load("digits").val[:7][0], batch_size=3)) == 7
    with pytest.raises(UsageError, match="top is 0"):
        classifier.predict(eight(), top=0)


def test_equally_probable_classes_stay_in_order(digits_run: Path) -> None:
    classifier = load(digits_run, "cpu")
    for parameter in classifier.model.parameters():
        parameter.data.zero_()
    (found,) = classifier.predict(eight(), top=4)
    assert [guess.label for guess in found.top] == ["0", "1", "2", "3"]


def test_any_image_file_comes_in_grey_and_of_the_right_size(digits_run: Path, photos: Path) -> None:
    classifier = load(digits_run, "cpu")
    image = classifier.prepare(next(photos.glob("*/*.jpg")))
    assert image.shape == (1, 8, 8) and image.dtype == torch.uint8


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(1, 8, 8),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        np.zeros((8, 8, 3), dtype=np.uint8),
        np.zeros((8, 8), dtype=np.float32),
        np.array([None]),
        torch.zeros(1, 0, 8, dtype=torch.uint8),
        5,
    ],
)
def test_pixels_of_another_kind(digits_run: Path, image: Any) -> None:
    with pytest.raises(UsageError, match="image"):
        load(digits_run, "cpu").predict([image])


def test_a_file_that_is_no_image(digits_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(DataError, match=r"a\.png: is not an image"):
        load(digits_run, "cpu").predict(tmp_path / "a.png")


# --- models that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return self.w.reshape(3, 7)", "1 channels and 8×8 at line 7: RuntimeError: shape"),
        ("return x.flatten(1)[:, :4] * self.w", r"gives \[1, 4\] .* scores .* \[1, 10\]"),
        ("return None", "gives a NoneType"),
        ("raise KeyError('x')", "at line 7: KeyError: 'x'"),
    ],
)
def test_a_model_that_fails_says_so_at_once(tmp_path: Path, body: str, message: str) -> None:
    code = tmp_path / "bad.py"
    code.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, x):\n"
        f"        {body}\n"
    )
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    given = Given(model=f"{code}:Net", classes=10, image_size=8, channels=1)
    with pytest.raises(HastenError, match=message):
        load(tmp_path / "w.pt", "cpu", given=given)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda x: x.reshape(3, 7), r"small fails on images \[1, 1, 8, 8\]: shape"),
        (lambda x: x.flatten(1)[:, :4], r"gives \[1, 4\] .* not scores \[1, 10\]"),
        (lambda x: None, "gives NoneType"),
    ],
)
def test_a_model_that_fails_later(digits_run: Path, gives: Any, message: str) -> None:
    class Later(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return gives(x)

    classifier = dataclasses.replace(load(digits_run, "cpu"), model=Later())
    with pytest.raises(HastenError, match=message):
        classifier.predict(eight()[:1])


def test_output_that_is_no_number(digits_run: Path) -> None:
    classifier = load(digits_run, "cpu")
    next(classifier.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(HastenError, match="NaN or infinite"):
        classifier.predict(eight())


def test_a_batch_that_does_not_fit(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = load(digits_run, "cpu")

    def forward(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(classifier.model, "forward", forward)
    with pytest.raises(OutOfDeviceMemory, match=r"batch of 16 .* --batch-size below 16"):
        probabilities(classifier)
    with pytest.raises(OutOfDeviceMemory, match="batch of 16"):
        measure(classifier, "digits", batch_size=16, num_workers=0)


def test_tensors_left_on_another_device(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.errors import DeviceMismatch

    classifier = load(digits_run, "cpu")
    classifier.model.mask = torch.zeros(2, device="meta")  # type: ignore[assignment]

    def forward(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(classifier.model, "forward", forward)
    with pytest.raises(DeviceMismatch, match="mask"):
        probabilities(classifier)


# --- precision ------------------------------------------------------------------------------------


def facts(precision: str, device: str, run: Path) -> Facts:
    known = load(run, "cpu").facts
    return Facts(
        architecture=known.architecture,
        classes=known.classes,
        preparation=known.preparation,
        transform=known.transform,
        precision=Precision(name=precision, channels_last=True),
        device=device,
    )


def test_as_trained_where_the_device_does_it_well(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "fast_dtypes", lambda _: (torch.float32,))
    monkeypatch.setattr(runtime, "autocast_dtypes", lambda _: (torch.bfloat16,))
    here = settle("auto", facts("bfloat16", "cpu", digits_run), CPU)
    assert (here.name, here.channels_last) == ("bfloat16", True)
    elsewhere = settle("auto", facts("bfloat16", "cuda:0", digits_run), CPU)
    assert elsewhere.name == "float32" and "trained in bfloat16" in elsewhere.reason
    assert settle("auto", facts("float16", "cpu", digits_run), CPU).name == "float32"
    assert settle("bfloat16", facts("float32", "cuda", digits_run), CPU).name == "bfloat16"
    monkeypatch.setattr(runtime, "fast_dtypes", lambda _: (torch.bfloat16,))
    assert settle("auto", facts("bfloat16", "cuda:0", digits_run), CPU).name == "bfloat16"
