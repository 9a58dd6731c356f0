"""Folders of images: their forms, what is passed over, and what is said where they will not do."""

from __future__ import annotations

import io
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hasten.errors import CheckpointError, DataError, UsageError
from hasten.feed import Loader
from hasten.vision import data
from hasten.vision.data import folder as folders
from hasten.vision.data.copies import Copies, store_of
from hasten.vision.data.folder import ImageFolderDataset
from hasten.vision.data.inspection import inspect
from hasten.vision.data.layout import find_layout
from hasten.vision.data.preparation import Preparation, random_crop
from hasten.vision.decode import ImageError

COLOURS = {"cats": (200, 40, 40), "dogs": (40, 200, 40), "fish": (40, 40, 200)}


def picture(path: Path, colour: tuple[int, ...] = (90, 120, 30), size=(40, 36), kind="PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, kind)
    return path


def noise(path: Path, kind: str = "JPEG", seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, kind)
    return path.read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes of ten images each."""
    top = tmp_path / "animals"
    for name, colour in COLOURS.items():
        for number in range(10):
            picture(top / name / f"{number}.png", colour)
    return top


def files(dataset: ImageFolderDataset) -> list[str]:
    return [dataset.describe_sample(index) for index in range(len(dataset))]


@pytest.mark.parametrize("cache", ["none", "ram", "disk"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_samples_are_written_into_the_batch(
    cache: str, kind: str, channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And batches into memory that is used again: nothing is allocated for each of them."""
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    names = [f"{number}.img" for number in range(24)]
    for number, name in enumerate(names):
        noise(tmp_path / "root" / name, kind, seed=number)
    store = store_of(cache, None, lambda line: None)
    dataset = ImageFolderDataset(
        tmp_path / "root",
        names,
        list(range(24)),
        preparation=Preparation(size=16, channels=channels),
        augment=True,
        copies=store and Copies(store, size=16, channels=channels),
    )
    slot = torch.zeros(channels, 16, 16, dtype=torch.uint8)
    image, _ = dataset.fetch(3, 5, [slot])
    assert image is slot
    assert torch.equal(image, dataset.fetch(3, 5)[0])

    given, real = [], ImageFolderDataset.fetch

    def fetch(self: Any, index: int, key: int, out: Any = None) -> Any:
        sample = real(self, index, key, out)
        given.append((out is not None, out is not None and sample[0] is out[0]))
        return sample

    monkeypatch.setattr(ImageFolderDataset, "fetch", fetch)
    places = set()
    with Loader(dataset, 4, plan="threads", num_workers=1) as loader:
        for _ in range(5):
            for images, _ in loader:
                places.add(images.data_ptr())
    assert all(written for offered, written in given if offered)
    assert sum(offered for offered, _ in given) >= 0.7 * len(given), "all but a batch's first"
    assert len(places) <= 12, "of 30 batches"


def test_a_folder_is_parted_by_a_seeded_stratified_split(root: Path) -> None:
    animals = data.load(root, seed=3)
    assert animals.classes == ("cats", "dogs", "fish")
    assert animals.train_counts == (8, 8, 8)
    assert animals.val_counts == (2, 2, 2)
    assert not set(files(animals.train)) & set(files(animals.val))
    assert files(data.load(root, seed=3).val) == files(animals.val)
    assert files(data.load(root, seed=4).val) != files(animals.val)
    assert data.load(root, val_fraction=0.5).val_counts == (5, 5, 5)
    assert "24 training and 6 validation images, 3 classes, 32x32 colour" in animals.describe()
    for index in range(len(animals.val)):
        image, label = animals.val[index]
        assert image.dtype == torch.uint8
        assert image.shape == (3, 32, 32)
        assert isinstance(label, int)
        assert tuple(image[:, 5, 5].tolist()) == COLOURS[animals.classes[label]]
        assert animals.val.path(index).parent.name == animals.classes[label]


def test_small_classes_are_in_both_parts(tmp_path: Path) -> None:
    for number in range(2):
        picture(tmp_path / "few" / f"{number}.png")
    for number in range(40):
        picture(tmp_path / "many" / f"{number}.png")
    picture(tmp_path / "one" / "0.png")
    lines: list[str] = []
    loaded = data.load(tmp_path, val_fraction=0.02, say=lines.append)
    assert loaded.train_counts == (1, 39, 1)
    assert loaded.val_counts == (1, 1, 0)
    assert any("one" in line for line in lines)


@pytest.mark.parametrize("val", ["val", "Valid", "validation", "test"])
def test_train_and_val_folders(root: Path, tmp_path: Path, val: str) -> None:
    top = tmp_path / "parted"
    top.mkdir()
    root.rename(top / "Train")
    for name in COLOURS:
        picture(top / val / name / "v.png")
    parted = data.load(top)
    assert parted.train_counts == (10, 10, 10)
    assert files(parted.val) == [f"{val}/{name}/v.png" for name in COLOURS]
    with pytest.raises(UsageError, match="val_fraction"):
        data.load(top, val_fraction=0.1)


def test_val_comes_before_test(root: Path, tmp_path: Path) -> None:
    top = tmp_path / "parted"
    top.mkdir()
    root.rename(top / "train")
    for part in ("val", "test"):
        for name in COLOURS:
            picture(top / part / name / f"{part}.png")
    picture(top / "extra" / "x.png")
    lines: list[str] = []
    parted = data.load(top, say=lines.append)
    assert all(name.endswith("val.png") for name in files(parted.val))
    assert any("extra, test" in line for line in lines)


def test_train_alone_is_split(root: Path, tmp_path: Path) -> None:
    top = tmp_path / "parted"
    top.mkdir()
    root.rename(top / "train")
    picture(top / "test" / "unlabelled.png")
    parted = data.load(top)
    assert parted.classes == tuple(COLOURS)
    assert parted.val_counts == (2, 2, 2)


def test_train_may_be_a_class(root: Path) -> None:
    for number in range(5):
        picture(root / "train" / f"{number}.png")
    assert data.load(root).classes == ("cats", "dogs", "fish", "train")


def test_classes_must_agree(root: Path, tmp_path: Path) -> None:
    top = tmp_path / "parted"
    top.mkdir()
    root.rename(top / "train")
    for name in ("cats", "dogs", "birds"):
        picture(top / "val" / name / "0.png")
    with pytest.raises(DataError) as caught:
        data.load(top)
    assert "train: fish" in str(caught.value)
    assert "val: birds" in str(caught.value)


def test_parts_without_classes(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "0.png")
    picture(tmp_path / "val" / "0.png")
    with pytest.raises(DataError, match="one for each class"):
        data.load(tmp_path)


def test_forms_that_will_not_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean fashion-mnist"):
        data.load("fashion_mnist")
    with pytest.raises(UsageError, match="there is no folder"):
        data.load(tmp_path / "absent")
    archive = tmp_path / "images.zip"
    archive.write_bytes(b"PK")
    with pytest.raises(UsageError, match="unpack"):
        data.load(archive)
    flat = tmp_path / "flat"
    flat.mkdir()
    with pytest.raises(DataError, match="no sub-folders"):
        data.load(flat)
    picture(flat / "0.png")
    with pytest.raises(DataError, match="directly in"):
        data.load(flat)
    for number in range(3):
        picture(tmp_path / "single" / "cats" / f"{number}.png")
    with pytest.raises(DataError, match="one class only, 'cats'"):
        data.load(tmp_path / "single")
    for name in ("a", "b"):
        picture(tmp_path / "lonely" / name / "0.png")
    with pytest.raises(DataError, match="no image to validate with"):
        data.load(tmp_path / "lonely")


def test_empty_classes_are_named(root: Path) -> None:
    (root / "birds").mkdir()
    (root / "mice").mkdir()
    (root / "mice" / "readme.txt").write_text("none yet")
    with pytest.raises(DataError, match="birds, mice"):
        data.load(root)


def test_what_is_passed_over(root: Path) -> None:
    want = set(files(data.load(root).train)) | set(files(data.load(root).val))
    picture(root / ".hidden" / "0.png")
    picture(root / "cats" / ".ipynb_checkpoints" / "0.png")
    picture(root / "cats" / "._0.png")
    picture(root / "__MACOSX" / "cats" / "0.png")
    (root / "cats" / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    (root / "cats" / "labels.csv").write_text("0.png,cat\n")
    (root / "notes.txt").write_text("about")
    os.mkfifo(root / "cats" / "pipe.png")  # opening it would wait for ever
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "cats" / "socket.jpg"))
    again = data.load(root)
    assert set(files(again.train)) | set(files(again.val)) == want
    assert len(again.problems) == 0


def test_content_counts_not_the_name(root: Path) -> None:
    picture(root / "cats" / "no-suffix")
    picture(root / "cats" / "wrong.jpg", kind="PNG")
    picture(root / "cats" / "odd.dat", kind="BMP")
    picture(root / "cats" / "LOUD.JPG", kind="JPEG")
    loaded = data.load(root)
    found = set(files(loaded.train)) | set(files(loaded.val))
    assert {f"cats/{name}" for name in ("no-suffix", "wrong.jpg", "odd.dat", "LOUD.JPG")} <= found
    for dataset in (loaded.train, loaded.val):
        for index in range(len(dataset)):
            assert dataset[index][0].shape == (3, 32, 32)


def test_names_of_any_kind(tmp_path: Path) -> None:
    names = ["two words", "naïve", "名前", "new\nline", "tab\t", "'quoted\"", "emoji 🐈"]
    for name in names:
        for number in range(2):
            picture(tmp_path / name / f"{name} {number}.png")
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    for number in range(2):
        picture(Path(os.fsdecode(raw + b"/\xff%d.png" % number)))
    loaded = data.load(tmp_path)
    assert len(loaded.classes) == 8
    assert r"caf\xe9" in loaded.classes
    assert r"new\nline" in loaded.classes
    assert "名前" in loaded.classes
    assert loaded.classes == tuple(sorted(loaded.classes))
    assert loaded.train_counts == (1,) * 8
    for dataset in (loaded.train, pickle.loads(pickle.dumps(loaded.train))):
        for index in range(len(dataset)):
            assert dataset[index][0].shape == (3, 32, 32)
            assert dataset.describe_sample(index).isprintable()
            dataset.describe_sample(index).encode("utf-8")


def test_one_class_spelled_in_two_ways(tmp_path: Path) -> None:
    for name in ("caf\u00e9", "cafe\u0301", "tea"):
        picture(tmp_path / name / "0.png")
    with pytest.raises(DataError, match="two folders for the class 'café'"):
        data.load(tmp_path)


def test_folders_inside_a_class_are_walked(root: Path) -> None:
    picture(root / "cats" / "deep" / "deeper" / "0.png")
    picture(root / "cats" / "deep" / "1.png")
    found = find_layout(root)
    assert "cats/deep/deeper/0.png" in found.train.files
    assert found.train.labels[found.train.files.index("cats/deep/1.png")] == 0
    assert len(found.train.files) == 32


def test_symbolic_links(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    picture(outside / "o.png")
    single = picture(tmp_path / "single.png")
    (root / "cats" / "folder").symlink_to(outside)
    (root / "cats" / "file.png").symlink_to(single)
    (root / "cats" / "up").symlink_to("..")  # the root, with all the other classes
    (root / "cats" / "self").symlink_to("../cats")
    (root / "dogs" / "other").symlink_to("../fish")
    (outside / "back").symlink_to(root / "cats")
    (root / "birds").symlink_to(picture(tmp_path / "birds" / "b.png").parent)
    (root / "dogs" / "gone.png").symlink_to("nowhere")
    (root / "dogs" / "round.png").symlink_to("round.png")
    found = find_layout(root)
    names = found.train.files
    assert len(names) == len(set(names)) == 33
    assert {"cats/folder/o.png", "cats/file.png", "birds/b.png"} <= set(names)
    assert sorted(found.train.dead_links) == ["dogs/gone.png", "dogs/round.png"]
    for link in ("cats/up", "cats/self", "dogs/other", "cats/folder/back"):
        assert any(link in note and "loop" in note for note in found.notes)
    loaded = data.load(root)
    assert "leads nowhere" in loaded.problems.files()["dogs/gone.png"]


def test_one_folder_may_not_be_two_classes(root: Path, tmp_path: Path) -> None:
    (root / "kittens").symlink_to("cats")
    with pytest.raises(DataError, match="same folder"):
        data.load(root)
    top = tmp_path / "parted"
    top.mkdir()
    (root / "kittens").unlink()
    root.rename(top / "train")
    (top / "val").symlink_to("train")
    with pytest.raises(DataError, match="same folder"):
        data.load(top)


@pytest.mark.parametrize("where", ["", "cats", "cats/deep"])
def test_a_folder_that_may_not_be_read(root: Path, monkeypatch, where: str) -> None:
    picture(root / "cats" / "deep" / "0.png")
    real = os.scandir

    def scandir(path: Path) -> object:
        if Path(path) == root / where:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="Permission denied") as caught:
        data.load(root)
    assert str(root / where) in str(caught.value)


def test_a_file_that_may_not_be_read(root: Path) -> None:
    path = root / "cats" / "0.png"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read every file")
    loaded = data.load(root)
    assert "Permission denied" in loaded.problems.files()["cats/0.png"]


def test_unusable_files_are_skipped_and_named(root: Path) -> None:
    whole = noise(root / "cats" / "z.jpg")
    (root / "cats" / "z.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "dogs" / "text.png").write_text("no image")
    loaded = data.load(root)
    assert sorted(loaded.problems.files()) == ["cats/z.jpg", "dogs/text.png"]
    assert "truncated" in loaded.problems.files()["cats/z.jpg"]
    assert loaded.train_counts == (8, 8, 8)
    assert "2 unusable image files were skipped" in loaded.problems.summary()


def test_more_than_a_tenth_unusable_stops(root: Path) -> None:
    for number in range(4):
        (root / "cats" / f"bad {number}.png").write_text("no image")
    with pytest.raises(DataError) as caught:
        data.load(root)
    assert "4 of 34" in str(caught.value)
    assert "cats/bad 0.png: is not an image" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")  # Pillow's, of a cut TIFF
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WebP", "BMP", "TIFF"])
def test_inspection(tmp_path: Path, kind: str) -> None:
    content = noise(tmp_path / f"whole.{kind.lower()}", kind)
    for name, data_of_it in {
        "half": content[: len(content) // 2],
        "head": content[:30],
        "tail": content + b"\0\0trailing",
    }.items():
        (tmp_path / f"{name}.{kind.lower()}").write_bytes(data_of_it)
    names = [f"{name}.{kind.lower()}" for name in ("whole", "half", "head", "tail")]
    found = inspect(str(tmp_path), names)
    assert found.sizes[0].tolist() == [40, 40]
    assert sorted(found.reasons) == [1, 2]
    assert found.sizes[3].tolist() == [40, 40]
    bomb = inspect(str(tmp_path), names[:1], max_pixels=1599)
    assert "bomb" in bomb.reasons[0]


def test_inspection_gives_the_upright_size(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("jpg", "tif"):
        Image.new("RGB", (50, 20)).save(tmp_path / f"turned.{kind}", exif=exif)
    exif[0x010E] = "x" * 9000  # the header goes on past what is read at first
    Image.new("RGB", (50, 20)).save(tmp_path / "long.jpg", exif=exif)
    found = inspect(str(tmp_path), ["turned.jpg", "turned.tif", "long.jpg"])
    assert found.sizes.tolist() == [[50, 20]] * 3


def test_of_a_large_folder_a_sample_is_inspected(root: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders, "INSPECTED_FILES", 20)
    monkeypatch.setattr(folders, "_SAMPLED_FILES", 12)
    (root / "cats" / "labels.csv").write_text("x")
    lines: list[str] = []
    loaded = data.load(root, say=lines.append)
    assert sum(loaded.train_counts) + sum(loaded.val_counts) == 30
    assert any("12 of 31" in line for line in lines)


def broken_in_the_middle(path: Path) -> None:
    """Both ends are whole: only decoding shows it."""
    content = noise(path, "PNG")
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])


def test_damage_in_the_middle_is_found_when_fetched(root: Path) -> None:
    broken_in_the_middle(root / "cats" / "3.png")
    loaded = data.load(root, val_fraction=0.2)
    dataset = next(each for each in (loaded.train, loaded.val) if "cats/3.png" in files(each))
    index = files(dataset).index("cats/3.png")
    for _ in range(2):
        with pytest.raises(ImageError, match=r"cats/3\.png") as caught:
            dataset.fetch(index, 0)
        assert caught.value.skip
    assert list(loaded.problems.files()) == ["cats/3.png"]


def test_too_much_damage_stops_the_run(root: Path, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(10)]
    for name in names[:2]:
        broken_in_the_middle(root / "cats" / name)
    dataset = ImageFolderDataset(
        root / "cats", names, [0] * 10, preparation=Preparation(size=8), total=10
    )
    with pytest.raises(ImageError):
        dataset.fetch(0, 0)
    with pytest.raises(DataError, match="2 of 10") as caught:
        dataset.fetch(1, 0)
    assert not hasattr(caught.value, "skip")
    (root / "cats" / "5.png").unlink()
    with pytest.raises(DataError, match=r"3 of 10[^$]*5\.png"):
        dataset.fetch(5, 0)


def test_fetch_follows_from_index_and_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(4):
            noise(tmp_path / name / f"{number}.jpg", seed=number)
    loaded = data.load(tmp_path, image_size=24, seed=1)
    train = loaded.train
    first = train.fetch(0, 12345)[0]
    assert first.shape == (3, 24, 24)
    assert torch.equal(first, train.fetch(0, 12345)[0])
    assert torch.equal(first, pickle.loads(pickle.dumps(train)).fetch(0, 12345)[0])
    assert not torch.equal(first, train.fetch(0, 12346)[0])
    with ThreadPoolExecutor(4) as pool:
        many = list(pool.map(lambda key: train.fetch(key % 6, key)[0], range(48)))
    for key, image in enumerate(many):
        assert torch.equal(image, train.fetch(key % 6, key)[0])
    assert torch.equal(loaded.val.fetch(0, 1)[0], loaded.val.fetch(0, 2)[0])
    plain = data.load(tmp_path, image_size=24, augment="none").train
    assert torch.equal(plain.fetch(0, 1)[0], plain.fetch(0, 2)[0])
    torch.manual_seed(0)
    drawn = [train[0][0] for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.manual_seed(0)
    assert torch.equal(drawn[0], train[0][0])
    with pytest.raises(IndexError):
        train.fetch(len(train), 0)
    assert torch.equal(plain[-1][0], plain[len(plain) - 1][0])


def test_random_crops_are_within_and_varied() -> None:
    for height, width in ((375, 500), (500, 375), (1, 1), (3, 1000), (1000, 3), (7, 5)):
        crops = [random_crop(height, width, key) for key in range(300)]
        for crop in crops:
            assert crop.height >= 1
            assert crop.width >= 1
            assert 0 <= crop.top <= height - crop.height
            assert 0 <= crop.left <= width - crop.width
        assert 100 < sum(crop.mirror for crop in crops) < 200
    crops = [random_crop(400, 400, key) for key in range(2000)]
    areas = np.array([crop.height * crop.width for crop in crops]) / 400**2
    assert areas.min() > 0.34
    assert areas.max() > 0.95
    ratios = np.array([crop.width / crop.height for crop in crops])
    assert ratios.min() > 0.74
    assert ratios.max() < 1.35
    assert abs(np.log(ratios).mean()) < 0.02
    lefts = np.array([crop.left / max(1, 400 - crop.width) for crop in crops])
    assert abs(lefts.mean() - 0.5) < 0.05


def test_grey_and_the_size_chosen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(4):
            picture(tmp_path / name / f"{number}.png", size=(100, 75))
    assert data.load(tmp_path).shape == (3, 64, 64)
    grey = data.load(tmp_path, channels=1, image_size=20)
    assert grey.shape == (1, 20, 20)
    assert len(grey.mean) == 1
    assert grey.train[0][0].shape == (1, 20, 20)
    for sizes, side in (([[9, 9]], 32), ([[90, 500], [0, 0]], 96), ([[4000, 3000]], 224)):
        assert folders._choose_size(np.array(sizes, dtype=np.int32)) == side


def test_statistics_are_of_the_training_images(tmp_path: Path) -> None:
    for name, level in (("a", 0), ("b", 255)):
        for number in range(5):
            picture(tmp_path / "train" / name / f"{number}.png", (level, level, 51))
            picture(tmp_path / "val" / name / f"{number}.png", (7, 7, 7))
    loaded = data.load(tmp_path)
    assert loaded.mean == pytest.approx((0.5, 0.5, 0.2))
    assert loaded.std == pytest.approx((0.5, 0.5, 1 / 255))


def test_images_of_known_classes(root: Path, tmp_path: Path) -> None:
    preparation = Preparation(size=16)
    known = ("birds", "cats", "dogs", "fish")
    found = data.load_labelled(root, classes=known, preparation=preparation)
    assert len(found) == 30
    assert sorted(set(found.labels.tolist())) == [1, 2, 3]
    image, label = found[0]
    assert image.shape == (3, 16, 16)
    assert tuple(image[:, 0, 0].tolist()) == COLOURS[known[label]]
    with pytest.raises(DataError, match="does not know: fish"):
        data.load_labelled(root, classes=("cats", "dogs"), preparation=preparation)
    top = tmp_path / "parted"
    top.mkdir()
    root.rename(top / "train")
    picture(top / "val" / "cats" / "v.png")
    parted = data.load_labelled(top, classes=known, preparation=preparation)
    assert files(parted) == ["val/cats/v.png"]
    digits = data.load()
    again = data.load_labelled("digits", classes=digits.classes, preparation=digits.preparation)
    assert torch.equal(again.tensors[0], digits.val.tensors[0])
    with pytest.raises(DataError, match="not those of the model"):
        data.load_labelled("digits", classes=known, preparation=digits.preparation)


def test_preparation() -> None:
    buffer = io.BytesIO()
    image = Image.new("RGB", (30, 20), "red")
    image.paste((0, 0, 255), (7, 2, 23, 18))
    image.save(buffer, "PNG")
    whole = Preparation(size=20)(buffer.getvalue())
    assert tuple(whole[:, 0, 0].tolist()) == (255, 0, 0)
    middle = Preparation(size=16, crop_fraction=0.8)(buffer.getvalue())
    assert (middle == torch.tensor([0, 0, 255])[:, None, None]).all()
    assert Preparation(size=4, channels=1)(buffer.getvalue()).shape == (1, 4, 4)
    settings = Preparation(size=20, channels=1, crop_fraction=0.5)
    assert Preparation.from_config(settings.to_config()) == settings
    for wrong in (
        {},
        {"size": 0},
        {"size": "9"},
        {"size": 9, "what": 1},
        {"size": 1, "channels": 2},
    ):
        with pytest.raises(CheckpointError, match="preparation"):
            Preparation.from_config(wrong)
    with pytest.raises(UsageError):
        Preparation(size=8, crop_fraction=0)


def test_files_that_are_left_out_are_told_of_where_nobody_listens(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "cats" / "z.jpg").write_bytes(noise(root / "cats" / "z.jpg")[:400])
    said: list[str] = []
    loaded = data.load(root, say=said.append)
    assert not caplog.messages, "who listens is told by say"
    loaded = data.load(root)
    (message,) = caplog.messages
    assert "1 unusable image file was skipped" in message and "cats/z.jpg" in message
    assert "cats/z.jpg" in repr(loaded.problems)
    (root / "cats" / "z.jpg").unlink()
    caplog.clear()
    assert repr(data.load(root).problems) == "<Problems: no file was skipped>"
    assert not caplog.messages
