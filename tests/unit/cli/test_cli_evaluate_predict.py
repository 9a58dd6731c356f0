"""`hasten evaluate` and `hasten predict`: streams, exit statuses, and words for bad input."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from hasten.cli.app import _run
from hasten.train import checkpoint, manifest


@pytest.fixture
def images(photos: Path) -> list[str]:
    return sorted(map(str, photos.glob("*/*.png")))[:4]


class Ran:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def hasten(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Ran:
        status = _run([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(status, captured.out, captured.err)

    return run


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


# --- predict --------------------------------------------------------------------------------------


def test_a_line_for_each_file(hasten: Any, photos_run: Path, images: list[str]) -> None:
    ran = hasten("predict", photos_run, *images, "--top", 2, "--device", "cpu")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert len(lines) == len(images)
    for line, path in zip(lines, images, strict=True):
        name, guesses = line.split("  ")
        assert name == path
        (first, a), (second, b) = (each.rsplit(" ", 1) for each in guesses.split(", "))
        assert {first, second} < {"blau", "grün", "rot und rosa"}
        assert 100 >= float(a.rstrip("%")) >= float(b.rstrip("%")) >= 0
    assert "the best by validation" in ran.err and "Using device: cpu" in ran.err


def test_json_says_the_same(hasten: Any, photos_run: Path, images: list[str]) -> None:
    ran = hasten("predict", photos_run, *images, "--json", "--top", 2)
    text = hasten("predict", photos_run, *images, "--top", 2)
    assert ran.json["schema"] == 1 and ran.json["hasten"]
    assert ran.json["checkpoint"] == str(checkpoint.find(photos_run, "best"))
    assert ran.json["skipped"] == []
    lines = [
        f"{each['file']}  "
        + ", ".join(f"{guess['class']} {guess['probability']:.1%}" for guess in each["top"])
        for each in ran.json["predictions"]
    ]
    assert lines == text.out.splitlines()


def test_what_cannot_be_read_is_named_and_the_status_is_one(
    hasten: Any, photos_run: Path, images: list[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_text("no")
    (tmp_path / "empty").mkdir()
    arguments = (bad, images[0], tmp_path / "gone.png", tmp_path / "empty", images[1])
    ran = hasten("predict", photos_run, *arguments)
    assert ran.status == 1
    assert [line.split("  ")[0] for line in ran.out.splitlines()] == images[:2]
    assert f"skipped {bad}: is not an image" in ran.err
    assert f"skipped {tmp_path / 'empty'}: is a folder without image files" in ran.err
    assert "3 files could not be used" in ran.err

    ran = hasten("predict", photos_run, *arguments, "--json")
    assert ran.status == 1
    assert [each["file"] for each in ran.json["predictions"]] == images[:2]
    assert [each["file"] for each in ran.json["skipped"]] == list(
        map(str, (bad, tmp_path / "gone.png", tmp_path / "empty"))
    )
    assert all(each["reason"] for each in ran.json["skipped"])


def test_standard_input(
    hasten: Any, standard_input: Any, photos_run: Path, images: list[str]
) -> None:
    standard_input("\n".join(images[:2]).encode())
    ran = hasten("predict", photos_run, "-", images[3])
    assert ran.status == 0
    assert [line.split("  ")[0] for line in ran.out.splitlines()] == [*images[:2], images[3]]

    standard_input("\0".join(images).encode())
    ran = hasten("predict", photos_run, "-0", "-", "--num-workers", 0, "--batch-size", 1)
    assert [line.split("  ")[0] for line in ran.out.splitlines()] == images

    standard_input("\0".join(images).encode())
    ran = hasten("predict", photos_run, "-")
    assert ran.status == 2 and "give -0 too" in ran.err

    standard_input(b"")
    ran = hasten("predict", photos_run, "-", "--json")
    assert ran.status == 0 and ran.json["predictions"] == []


def test_more_classes_than_there_are(hasten: Any, photos_run: Path, images: list[str]) -> None:
    ran = hasten("predict", photos_run, images[0], "--top", 9)
    assert ran.status == 0 and ran.out.count("%") == 3
    assert "--top 9: the model knows 3 classes; all of them are given" in ran.err
    assert "--top" not in hasten("predict", photos_run, images[0]).err


def test_names_that_a_terminal_must_not_be_given(
    hasten: Any, photos_run: Path, images: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "\x1b[2Jred\n.png"
    shutil.copy(images[0], path)
    ran = hasten("predict", photos_run, path)
    assert ran.status == 0 and "\x1b" not in ran.out and len(ran.out.splitlines()) == 1
    ran = hasten("predict", photos_run, path, "--json")
    assert ran.json["predictions"][0]["file"] == str(path)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["predict"], 2, "CKPT"),
        (["predict", "RUN"], 2, "no files to predict for"),
        (["predict", "RUN", "IMAGE", "-0"], 2, "give - among the files"),
        (["predict", "RUN", "IMAGE", "--top", "0"], 2, "--top is 0"),
        (["predict", "RUN", "IMAGE", "--batch-size", "0"], 2, "--batch-size is 0"),
        (["predict", "RUN", "IMAGE", "--num-workers", "-1"], 2, "--num-workers is -1"),
        (["predict", "RUN", "IMAGE", "--num-workers", "x"], 2, "--num-workers"),
        (["predict", "RUN", "IMAGE", "--which", "first"], 2, "best or last"),
        (["predict", "RUN", "IMAGE", "--device", "xpu:7"], 2, "xpu:7"),
        (["predict", "RUN", "IMAGE", "--precision", "int8"], 2, "int8"),
        (["predict", "RUN", "IMAGE", "--model", "lesson"], 2, "leave out --model"),
        (["predict", "RUN", "IMAGE", "--classes", "3"], 2, "leave out --classes"),
        (["predict", "RUN", "IMAGE", "--mean", "0,b", "--std", "1"], 2, "--mean is a number"),
        (["predict", "IMAGE", "IMAGE"], 1, "is an image"),
        (["predict", "gone", "IMAGE"], 1, "gone does not exist"),
        (["evaluate"], 2, "CKPT"),
        (["evaluate", "gone"], 1, "gone does not exist"),
        (["evaluate", "RUN", "gone"], 2, "neither a data set nor a folder"),
        (["evaluate", "RUN", "digits"], 1, "not those of the model"),
        (["evaluate", "RUN", "--batch-size", "0"], 2, "--batch-size is 0"),
        (["evaluate", "RUN", "--num-workers", "-1"], 2, "--num-workers is -1"),
        (["evaluate", "RUN", "--progress", "loud"], 2, "loud"),
        (["evaluate", "RUN", "--device", "xpu:7"], 2, "xpu:7"),
    ],
)
def test_bad_input(
    hasten: Any,
    photos_run: Path,
    images: list[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    known = {"RUN": str(photos_run), "IMAGE": images[0]}
    ran = hasten(*(known.get(each, each) for each in arguments))
    assert ran.status == status
    assert message in ran.err


def test_a_broken_byte_in_the_checkpoint(
    hasten: Any, digits_run: Path, images: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    path = checkpoint.find(run, "best") / "model.pt"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    for command in (["predict", run, images[0]], ["evaluate", run]):
        ran = hasten(*command)
        assert ran.status == 1 and "model.pt is altered" in ran.err and not ran.out


def test_weights_alone(hasten: Any, photos_run: Path, images: list[str], tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    shutil.copy(photos_run / "model.safetensors", bare)
    ran = hasten("predict", bare, images[0])
    assert ran.status == 2 and "--model NAME" in ran.err
    names = tmp_path / "names.txt"
    names.write_text("blau\ngrün\nrot und rosa\n", encoding="utf-8")
    config = manifest.read(checkpoint.find(photos_run, "best")).meta["config"]["transform"]
    told = ["--model", "small", "--classes", names, "--image-size", 128]
    for option in ("mean", "std"):
        told += [f"--{option}", ",".join(map(str, config[option]))]
    ran = hasten("predict", bare, *told, images[0], "--top", 1)
    assert ran.status == 0
    assert ran.out.split("  ")[1].rsplit(" ", 1)[0] in ("blau", "grün", "rot und rosa")


def test_a_reader_that_goes_away_is_met_in_silence(photos_run: Path, images: list[str]) -> None:
    command = [sys.executable, "-m", "hasten", "predict", str(photos_run), "-", "--device", "cpu"]
    with warm.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(f"{images[0]}\n".encode() * 200)
        process.stdin.flush()
        assert process.stdout.readline().startswith(images[0].encode())
        process.stdout.close()
        process.stdin.write(f"{images[0]}\n".encode() * 200)
        process.stdin.close()
        words = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "Traceback" not in words and "BrokenPipe" not in words


# --- evaluate -------------------------------------------------------------------------------------


def test_evaluate_for_people(hasten: Any, digits_run: Path) -> None:
    ran = hasten("evaluate", digits_run, "digits", "--num-workers", 0)
    assert ran.status == 0 and not ran.err
    want = manifest.read(checkpoint.find(digits_run, "best")).meta["history"][-1]["val_accuracy"]
    assert f"Accuracy: {want:.2%} ({round(want * 359)} of 359 images)" in ran.out
    assert "Data: digits, those the training left out" in ran.out
    lines = [line.split() for line in ran.out.splitlines()]
    start = lines.index(["class", "images", "right", "precision", "recall"])
    rows = lines[start + 1 : start + 11]
    assert [row[0] for row in rows] == list("0123456789")
    assert sum(int(row[1]) for row in rows) == 359
    matrix = lines[lines.index(["true", *"0123456789"]) + 1 :][:10]
    counts = [[0 if cell == "." else int(cell) for cell in row[1:]] for row in matrix]
    assert [sum(row) for row in counts] == [int(row[1]) for row in rows]
    assert [counts[k][k] for k in range(10)] == [int(row[2]) for row in rows]


def test_evaluate_for_machines(hasten: Any, photos_run: Path, photos: Path, tmp_path: Path) -> None:
    for name in ("blau", "grün"):
        shutil.copytree(photos / name, tmp_path / name)
    (tmp_path / "blau" / "bad.png").write_bytes(b"no")
    ran = hasten("evaluate", photos_run, tmp_path, "--json", "--num-workers", 0)
    assert ran.status == 0 and "Accuracy" in ran.err
    found = ran.json
    assert found["schema"] == 1 and found["images"] == 20
    assert [each["class"] for each in found["per_class"]] == ["blau", "grün", "rot und rosa"]
    assert [each["images"] for each in found["per_class"]] == [10, 10, 0]
    assert found["per_class"][2]["recall"] is None
    confusion = found["confusion"]
    assert [sum(row) for row in confusion] == [10, 10, 0]
    assert found["accuracy"] == (confusion[0][0] + confusion[1][1]) / 20
    for place, each in enumerate(found["per_class"][:2]):
        assert each["accuracy"] == each["recall"] == confusion[place][place] / 10
        column = sum(row[place] for row in confusion)
        assert each["precision"] == (confusion[place][place] / column if column else None)
    assert found["checkpoint"] == str(checkpoint.find(photos_run, "best"))
    assert [each["file"] for each in found["skipped"]] == ["blau/bad.png"]
    assert found["loss"] > 0 and found["device"] and found["precision"] == "float32"


def test_many_classes_show_mistakes_and_no_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    from hasten.cli.evaluate import _print
    from hasten.cli.output import console
    from hasten.observe.confusion import per_class
    from hasten.train.evaluation import Evaluation
    from hasten.vision.evaluating import Measured

    names = tuple(f"[red]class {k}" for k in range(21))
    confusion = [[5 if i == j else 0 for j in range(21)] for i in range(21)]
    confusion[3][4] = 7
    evaluation = Evaluation(loss=1.0, samples=112, accuracy=105 / 112, confusion=confusion)
    skipped = {f"{k}.png": "is cut short" for k in range(7)}
    figures = tuple(per_class(confusion, names))
    measured = Measured(evaluation=evaluation, data="x", classes=figures, skipped=skipped)
    _print(measured, names, console())
    text = capsys.readouterr().out
    assert "7 × [red]class 3 taken for [red]class 4" in text
    assert "Confusion matrix" not in text
    assert "[red]class 20" in text and "Skipped 7 files in all" in text


def test_long_class_names_are_numbered_over_the_columns(hasten: Any, photos_run: Path) -> None:
    lines = hasten("evaluate", photos_run, "--num-workers", 0).out.splitlines()
    head = next(line.split() for line in lines if line.startswith("true"))
    assert head == ["true", "#1", "#2", "#3"]
    assert any(line.startswith("#3 rot und rosa") for line in lines)
