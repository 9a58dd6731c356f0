"""Sample predictions of a report: which images are shown, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hasten.observe.report
from hasten.observe.report import ReportData
from hasten.train import result
from hasten.vision import recipe
from hasten.vision.decode import ImageError
from hasten.vision.gallery import samples
from hasten.vision.settings import TrainSettings


class Images:
    """A label is the brightness of a corner, 0 to 2; every fifth image cannot be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % 5 == 0:
            raise ImageError("broken")
        image = torch.zeros(3, 8, 8, dtype=torch.uint8)
        image[:, 0, 0] = index % 3
        return image, index % 3

    def describe_sample(self, index: int) -> str:
        return f"{index}.jpg"


class Brightness(torch.nn.Module):
    """Says the brightness, but never 2."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        seen = images[:, 0, 0, 0].long().clamp(max=1)
        return torch.nn.functional.one_hot(seen, 3).float()


def test_twelve_right_and_twelve_wrong_are_looked_for_in_batches() -> None:
    model = Brightness()
    run = SimpleNamespace(device=torch.device("cpu"), autocast=torch.no_grad)
    trainer: Any = SimpleNamespace(model=model, run=run)
    data: Any = SimpleNamespace(val=Images(), classes=("dark", "grey", "light"))
    found = samples(trainer, data, lambda batch, rng: batch)
    right, wrong = found[:12], found[12:]
    assert [one.label == one.predicted for one in found] == [True] * 12 + [False] * 12
    assert {one.label for one in wrong} == {"light"} and {one.predicted for one in wrong} == {
        "grey"
    }
    for one in right:
        number = int(one.name.removesuffix(".jpg"))
        assert number % 5 and one.label == ("dark", "grey", "light")[number % 3]
        assert one.png.startswith(b"\x89PNG")
    assert len({one.name for one in found}) == 24
    assert len(model.batches) < 5 and max(model.batches) <= 32


def test_the_report_is_written_once_with_all_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[ReportData] = []
    real = hasten.observe.report.write_report

    def write(folder: Path, data: ReportData) -> Path:
        written.append(data)
        return real(folder, data)

    monkeypatch.setattr(result, "write_report", write)
    net = tmp_path / "net.py"
    net.write_text(
        "import torch\n"
        "def make(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    settings = TrainSettings(
        model=f"{net}:make", epochs=1, device="cpu", precision="float32", channels_last="off"
    )
    around = recipe.Surroundings(folder=tmp_path / "run", progress="off", say=lambda _: None)
    trained = recipe.train(settings, around)
    assert len(written) == 1
    shown = written[0]
    assert shown.classes == trained.data.classes and shown.samples
    assert shown.train_images == sum(trained.data.train_counts)
    assert trained.result.report_data == shown
