"""The settings of a training: what is refused, and in an edited ``config.json`` too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import CheckpointError, HastenError, UsageError
from hasten.train.batch_size import batch_line
from hasten.vision import recipe
from hasten.vision.settings import TrainSettings, new_folder, resumed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": -1}, "seed is -1: a whole number from 0 to 2"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": True}, "seed is True: it is a whole number"),
        ({"clip_norm": "a"}, "clip-norm is 'a': it is a number or nothing"),
        ({"val_fraction": "x"}, "val-fraction is 'x': it is a number or nothing"),
        ({"model": 7}, "model is 7: it is text"),
        ({"data": None}, "data is None: it is text"),
        ({"normalize": "x"}, "normalize is 'x': it is true or false"),
        ({"epochs": 1e9}, "epochs is 1000000000.0: it is a whole number"),
        ({"checkpoint_every": 4}, "checkpoint-every is 4: it is text"),
        ({"batch_size": [1]}, r"batch-size is \[1\]: it is a whole number or text"),
    ],
)
def test_values_of_another_kind_or_range(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        TrainSettings(**settings)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"settings": settings}}))
    with pytest.raises(CheckpointError, match=f"config.json: {said}.*; mend the file, or start"):
        resumed(tmp_path, {})


@pytest.mark.parametrize(
    ("settings", "said", "word"),
    [
        ({"lr": float("inf")}, "lr is inf: a finite number", "Infinity"),
        ({"weight_decay": float("nan")}, "weight-decay is nan: a finite number", "NaN"),
    ],
)
def test_numbers_are_finite(settings: dict[str, Any], said: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        TrainSettings(**settings)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"settings": settings}}))
    with pytest.raises(CheckpointError, match=f"it has {word}, which is no number of JSON"):
        resumed(tmp_path, {})


def test_whole_numbers_are_numbers() -> None:
    assert TrainSettings(lr=1, clip_norm=2, seed=2**64 - 1).learning_rate == 1


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"config": 1}', '{"config": {"settings": []}}']
)
def test_settings_of_another_form(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: not as hasten writes it"):
        resumed(tmp_path, {})


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data is caf\\xe9: not valid UTF-8"):
        TrainSettings(data="caf\udce9")
    settings = TrainSettings()
    with pytest.raises(UsageError, match=r"name is .*not valid UTF-8"):
        new_folder(tmp_path, "caf\udce9", settings)
    with pytest.raises(UsageError, match=r"runs is .*not valid UTF-8"):
        new_folder(tmp_path / "caf\udce9", None, settings)


def test_an_error_of_the_model_s_own_file_says_where(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        if self.training: raise ValueError('only while training')\n"
        "        return super().forward(x)\n"
        "def make(): return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    settings = TrainSettings(model=f"{path}:make", epochs=1, device="cpu", num_workers=0)
    around = recipe.Surroundings(progress="off", say=lambda _: None)
    with pytest.raises(HastenError, match="failed at line 4: ValueError: only while training"):
        recipe.train(settings, around)


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    settings = TrainSettings()
    with pytest.raises(UsageError, match="--name is 256 bytes long"):
        new_folder(tmp_path, "é" * 128, settings)
    assert new_folder(tmp_path, "é" * 127, settings).parent == tmp_path


def test_the_batch_is_told_in_whole_samples() -> None:
    assert batch_line("128", 128, 1, 1, 0.003) == "Batch size: 128; learning rate 0.003"
    told = batch_line("128 fits", 128, 2, 3, 0.1)
    assert told == (
        "Batch size: 128 fits, 42 or 43 on each of 3 devices,"
        " accumulated 2 times (effective batch 256); learning rate 0.1"
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [({"strategy": "dp"}, "the only one of its kind"), ({"sync_batchnorm": True}, "there is one")],
)
def test_what_devices_cannot_do_is_said_before_the_data_is_read(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    settings = TrainSettings(data=str(tmp_path / "nowhere"), device="cpu", **change)
    with pytest.raises(UsageError, match=word):
        recipe.train(settings, recipe.Surroundings(say=lambda _: None))
