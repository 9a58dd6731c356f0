"""Predicting for many files, and measuring on folders: order, what is skipped, what is refused."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hasten.errors import DataError, UsageError
from hasten.vision import predicting
from hasten.vision.classify import Classifier, load
from hasten.vision.evaluating import measure
from hasten.vision.predicting import Answer, expand


@pytest.fixture(scope="module")
def classifier(photos_run: Path) -> Classifier:
    return load(photos_run, "cpu")


def names(answers: Iterator[Answer]) -> list[str]:
    return [answer.file for answer in answers]


# --- which files are meant ------------------------------------------------------------------------


def test_files_in_their_order_and_folders_sorted(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.JPG", "b/a/3.webp", "b/.hidden.png", "b/notes.txt", "z.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "b/.git").mkdir()
    (tmp_path / "b/.git/4.png").touch()
    (tmp_path / "b/loop").symlink_to(tmp_path / "b", target_is_directory=True)
    top = str(tmp_path)
    found = names(expand([f"{top}/z.png", f"{top}/b", f"{top}/z.png", f"{top}/gone"]))
    assert found == [
        f"{top}/{name}" for name in ("z.png", "b/1.JPG", "b/2.png", "b/a/3.webp", "z.png", "gone")
    ]


def test_a_folder_without_images_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (found,) = expand([str(tmp_path)])
    assert found.problem == "is a folder without image files"


def test_paths_on_standard_input(tmp_path: Path) -> None:
    lines = b"a b.png\r\n\nc\xff.png\nlast.png"
    found = names(expand(["first.png", "-"], listed=io.BytesIO(lines)))
    assert found == ["first.png", "a b.png", os.fsdecode(b"c\xff.png"), "last.png"]

    odd = tmp_path / "a\nb\r"
    odd.mkdir()
    (odd / "1.png").touch()
    listed = io.BytesIO(os.fsencode(odd) + b"\0\0x.png\0")
    assert names(expand(["-"], listed=listed, null=True)) == [str(odd / "1.png"), "x.png"]

    with pytest.raises(UsageError, match="give -0 too"):
        list(expand(["-"], listed=io.BytesIO(b"a\0b\0")))
    with pytest.raises(UsageError, match="there is none"):
        list(expand(["-"]))


def test_paths_are_taken_as_they_come() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream, os.fdopen(write, "wb", buffering=0) as pipe:
        found = expand(["-"], listed=stream)
        pipe.write(b"one.png\ntw")
        assert next(found).file == "one.png"
        pipe.write(b"o.png\n")
        assert next(found).file == "two.png"


# --- answers --------------------------------------------------------------------------------------


@pytest.fixture
def mixed(photos: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "bad.png").write_bytes(b"no image")
    good = sorted(map(str, photos.glob("*/*")))[:7]
    whole = Path(good[0]).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    bad = [str(tmp_path / name) for name in ("bad.png", "gone.png", "cut.jpg")]
    return [bad[0], *good[:3], bad[1], *good[3:], bad[2]]


@pytest.mark.parametrize("workers", [0, 3, "auto"])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_answers_come_in_order_whatever_the_batches(
    classifier: Classifier, mixed: list[str], workers: int | str, batch_size: int
) -> None:
    answers = list(
        predicting.predict(
            classifier, expand(mixed), top=2, batch_size=batch_size, num_workers=workers
        )
    )
    assert [answer.file for answer in answers] == mixed
    problems = {answer.file: answer.problem for answer in answers if answer.problem}
    assert list(problems) == [mixed[0], mixed[4], mixed[-1]]
    assert "is not an image" in problems[mixed[0]]
    assert "No such file" in problems[mixed[4]]
    good = [answer for answer in answers if not answer.problem]
    want = classifier.predict([answer.file for answer in good], top=2)
    for answer, prediction in zip(good, want, strict=True):
        assert [guess.label for guess in answer.top] == [guess.label for guess in prediction.top]
        assert answer.top[0].probability == pytest.approx(prediction.probability, abs=1e-5)


def test_files_are_read_a_bounded_number_ahead(classifier: Classifier, photos: Path) -> None:
    path = str(next(photos.glob("*/*")))
    asked: list[int] = []

    def endless() -> Iterator[Answer]:
        while True:
            asked.append(1)
            yield Answer(file=path)

    answers = predicting.predict(classifier, endless(), batch_size=1, num_workers=0)
    next(answers)
    assert len(asked) == 1, "without workers, an answer comes before the next file is asked for"
    answers.close()  # type: ignore[attr-defined]

    asked.clear()
    answers = predicting.predict(classifier, endless(), batch_size=4, num_workers=2)
    for _ in range(8):
        next(answers)
    assert len(asked) <= 8 + 4 + 2 * 2 + 1
    answers.close()  # type: ignore[attr-defined]  # and no thread is left: see conftest


def test_output_that_is_no_number_is_a_problem(photos_run: Path, photos: Path) -> None:
    broken = load(photos_run, "cpu")
    next(broken.model.parameters()).data.fill_(float("inf"))
    (answer,) = predicting.predict(broken, expand([str(next(photos.glob("*/*")))]))
    assert answer.problem == "the model's output is NaN or infinite" and not answer.top


@pytest.mark.parametrize(
    ("option", "value"), [("top", 0), ("batch_size", 0), ("num_workers", -1), ("num_workers", "a")]
)
def test_numbers_out_of_range(classifier: Classifier, option: str, value: int | str) -> None:
    with pytest.raises(UsageError, match=option):
        list(predicting.predict(classifier, [], **{option: value}))  # type: ignore[arg-type]


# --- measuring ------------------------------------------------------------------------------------


def test_a_folder_with_some_of_the_classes(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    for name in ("rot und rosa", "blau"):
        shutil.copytree(photos / name, tmp_path / name)
    measured = measure(classifier, str(tmp_path), num_workers=0, batch_size=7)
    assert measured.evaluation.samples == 20
    assert [(c.name, c.images) for c in measured.classes] == [
        ("blau", 10),
        ("grün", 0),
        ("rot und rosa", 10),
    ]
    right = 0
    for place, name in ((0, "blau"), (2, "rot und rosa")):
        found = classifier.predict(sorted((tmp_path / name).iterdir()), top=1)
        row = [sum(p.label == label for p in found) for label in classifier.classes]
        assert measured.confusion[place] == row
        right += row[place]
    assert measured.evaluation.accuracy == right / 20


def test_the_val_part_is_measured(classifier: Classifier, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "train")
    shutil.copytree(photos / "blau", tmp_path / "val" / "blau")
    assert measure(classifier, str(tmp_path), num_workers=0).evaluation.samples == 10


def test_the_folder_trained_on_means_its_validation_images(
    classifier: Classifier, photos: Path
) -> None:
    by_name = measure(classifier, f"{photos}/.", num_workers=0)
    assert by_name.evaluation == measure(classifier, num_workers=0).evaluation
    assert by_name.evaluation.samples == 6 and "validated with" in by_name.data


def test_unusable_images_are_skipped_and_named(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "copy")
    broken = tmp_path / "copy" / "blau" / "0 é.png"
    content = broken.read_bytes()
    middle = len(content) // 2
    broken.write_bytes(content[:middle] + bytes(300) + content[middle + 300 :])
    measured = measure(classifier, str(tmp_path / "copy"), num_workers=0)
    assert measured.evaluation.samples == 29
    assert list(measured.skipped) == ["blau/0 é.png"]
    assert measured.classes[0].images == 9


def test_data_that_does_not_serve(
    classifier: Classifier, photos: Path, tmp_path: Path, digits_run: Path
) -> None:
    shutil.copytree(photos / "blau", tmp_path / "lila")
    with pytest.raises(DataError, match="does not know: lila"):
        measure(classifier, str(tmp_path))
    with pytest.raises(UsageError, match="there is no folder"):
        measure(classifier, str(tmp_path / "gone"))
    with pytest.raises(DataError, match="not those of the model"):
        measure(classifier, "digits")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no sub-folders"):
        measure(classifier, str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="batch_size is 0"):
        measure(classifier, batch_size=0)
    with pytest.raises(UsageError, match="does not use it"):
        measure(load(digits_run, "cpu"), "digits", data_dir=str(tmp_path))


def test_the_data_trained_on_has_gone_or_changed(
    classifier: Classifier, photos: Path, tmp_path: Path
) -> None:
    import dataclasses

    def moved(where: Path) -> Classifier:
        settings = {**classifier.facts.settings, "data": str(where)}
        return dataclasses.replace(
            classifier, facts=dataclasses.replace(classifier.facts, settings=settings)
        )

    with pytest.raises(UsageError, match=r"was trained on .*gone.* give DATA"):
        measure(moved(tmp_path / "gone"))
    shutil.copytree(photos, tmp_path / "more")
    shutil.copytree(photos / "blau", tmp_path / "more" / "zusätzlich")
    with pytest.raises(DataError, match="has changed since the training"):
        measure(moved(tmp_path / "more"))
    nothing = dataclasses.replace(classifier.facts, settings={})
    with pytest.raises(UsageError, match="does not say what it was trained on: give DATA"):
        measure(dataclasses.replace(classifier, facts=nothing))


def test_measuring_leaves_the_random_state_and_the_model(
    classifier: Classifier, photos: Path
) -> None:
    before = {key: value.clone() for key, value in classifier.model.state_dict().items()}
    state = torch.get_rng_state()
    measure(classifier, num_workers=0)
    assert torch.equal(torch.get_rng_state(), state)
    after = classifier.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
