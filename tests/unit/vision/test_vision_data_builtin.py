"""Built-in data sets: what comes out, where it is looked for, and what is said of broken files."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import threading
import urllib.error
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hasten.errors import DataError, UsageError
from hasten.vision import data
from hasten.vision.data import fashion_mnist, idx
from hasten.vision.data.download import fetch
from hasten.vision.data.fashion_mnist import Part, load_fashion_mnist


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def small() -> tuple[tuple[Part, ...], dict[str, bytes]]:
    """Four small files in the place of Fashion-MNIST's."""
    random = np.random.default_rng(0)
    parts, contents = [], {}
    for part in fashion_mnist.PARTS:
        shape = (20 if part.name.startswith("train") else 10, *part.shape[1:])
        top = 256 if len(shape) == 3 else 10
        contents[part.name] = idx_bytes(random.integers(0, top, shape))
        sha256 = hashlib.sha256(contents[part.name]).hexdigest()
        parts.append(Part(name=part.name, sha256=sha256, shape=shape))
    return tuple(parts), contents


class Server:
    """An opener with files by URL; counts what it was asked for."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.asked: list[str] = []

    def __call__(self, url: str, timeout_s: float) -> io.BytesIO:
        assert url.startswith("https://")
        assert timeout_s > 0
        self.asked.append(url)
        for name, content in self.contents.items():
            if name in url:
                return io.BytesIO(content)
        raise urllib.error.URLError("no route to host")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "absent"


def write(folder: Path, contents: dict[str, bytes], *, packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
        else:
            (folder / name).write_bytes(content)
    return folder


def test_digits() -> None:
    digits = data.load("digits")
    assert isinstance(digits.train, TensorDataset)
    images, labels = digits.train.tensors
    assert images.dtype == torch.uint8
    assert images.shape == (1438, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert images.min() == 0
    assert images.max() == 255
    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")
    assert sum(digits.train_counts) + sum(digits.val_counts) == 1797
    assert all(
        round(0.2 * (train + val)) == val
        for train, val in zip(digits.train_counts, digits.val_counts, strict=True)
    )
    scaled = images.double() / 255
    assert digits.mean == pytest.approx([scaled.mean().item()], abs=1e-12)
    assert digits.std == pytest.approx([scaled.std(correction=0).item()], abs=1e-12)
    normal, _ = digits.val_transform((images, labels), None)
    assert normal.mean().item() == pytest.approx(0, abs=1e-5)
    assert normal.std().item() == pytest.approx(1, abs=1e-3)


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # set by importing scikit-learn
        monkeypatch.setenv(name, "True")
    direct = data.load("digits")
    monkeypatch.setattr("hasten.vision.data.digits._packaged", lambda: None)
    imported = data.load("digits")
    for part in ("train", "val"):
        for ours, theirs in zip(
            getattr(direct, part).tensors, getattr(imported, part).tensors, strict=True
        ):
            assert torch.equal(ours, theirs)


def test_digits_split_depends_on_the_seed_alone() -> None:
    first, again, other = (data.load(None, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.val.tensors[0], again.val.tensors[0])
    assert not torch.equal(first.val.tensors[0], other.val.tensors[0])


def test_digits_options() -> None:
    larger = data.load("digits", val_fraction=0.5, image_size=28)
    assert larger.shape == (1, 28, 28)
    assert abs(sum(larger.train_counts) - sum(larger.val_counts)) <= 10
    assert len(data.load("digits", augment="light").train_transform.transforms) == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"augment": "wild"}, "wild"),
        ({"image_size": 0}, "image size"),
        ({"val_fraction": 1.0}, "between 0 and 1"),
        ({"channels": 3}, "grey"),
        ({"channels": 2, "source": "."}, "1 or 3"),
        ({"image_size": 4096}, "GiB"),
        ({"data_dir": "here"}, "data_dir"),
        ({"source": "fashion-mnist", "val_fraction": 0.1}, "10,000"),
    ],
)
def test_unusable_arguments(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        data.load(**arguments)


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_in_data_dir(small, tmp_path: Path, nowhere: Path, packed: bool) -> None:
    parts, contents = small
    folder = write(tmp_path / "data", contents, packed=packed)
    fashion = load_fashion_mnist(
        data_dir=folder, image_size=None, augment="auto", parts=parts, installed=nowhere
    )
    images, labels = fashion.train.tensors
    assert images.numpy().tobytes() == contents[parts[0].name][16:]
    assert labels.numpy().astype(np.uint8).tobytes() == contents[parts[1].name][8:]
    assert fashion.val.tensors[0].shape == (10, 1, 28, 28)
    assert fashion.classes[9] == "Ankle boot"
    names = [part["name"] for part in fashion.train_transform.to_config()["transforms"]]
    assert names == ["random_horizontal_flip", "normalize"]
    assert labels.dtype == torch.int64


@pytest.mark.skipif(
    not fashion_mnist.DEBIAN_FOLDER.is_dir(), reason="dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_of_debian() -> None:
    fashion = data.load("fashion-mnist", download=False, augment="none")
    assert fashion.train_counts == (6000,) * 10
    assert fashion.val_counts == (1000,) * 10
    assert fashion.mean == pytest.approx([0.28604], abs=1e-5)
    assert fashion.std == pytest.approx([0.35302], abs=1e-5)


def test_download_goes_to_the_next_mirror(small, tmp_path: Path, nowhere: Path) -> None:
    parts, contents = small
    files = {f"{name}.gz": gzip.compress(content) for name, content in contents.items()}
    bad = parts[1].name
    server = Server(
        {
            f"raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{bad}": (
                files[f"{bad}.gz"][:-20]
            ),
            **files,
        }
    )
    lines: list[str] = []
    target = tmp_path / "data"
    fashion = load_fashion_mnist(
        data_dir=target,
        image_size=None,
        augment="none",
        say=lines.append,
        opener=server,
        parts=parts,
        installed=nowhere,
    )
    assert fashion.train.tensors[0].shape == (20, 1, 28, 28)
    assert len(server.asked) == 5
    assert sorted(path.name for path in target.iterdir()) == sorted(files)
    assert "Downloading" in lines[0]
    server.asked.clear()
    load_fashion_mnist(
        data_dir=target,
        image_size=None,
        augment="none",
        opener=server,
        parts=parts,
        installed=nowhere,
    )
    assert not server.asked


def test_no_network_names_the_three_ways(small, tmp_path: Path, nowhere: Path) -> None:
    server = Server({})
    with pytest.raises(DataError) as caught:
        load_fashion_mnist(
            data_dir=None,
            image_size=None,
            augment="none",
            opener=server,
            parts=small[0],
            installed=nowhere,
        )
    for way in ("apt install dataset-fashion-mnist", "--data-dir", "network", "no route to host"):
        assert way in str(caught.value)
    assert len(server.asked) == len(fashion_mnist.MIRRORS)
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_download_can_be_forbidden(small, nowhere: Path) -> None:
    server = Server({})
    with pytest.raises(DataError, match="not allowed"):
        load_fashion_mnist(
            data_dir=None,
            image_size=None,
            augment="none",
            download=False,
            opener=server,
            parts=small[0],
            installed=nowhere,
        )
    assert not server.asked


def test_without_a_home_the_three_ways_are_named(small, nowhere: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match="no home folder") as caught:
        load_fashion_mnist(
            data_dir=None,
            image_size=None,
            augment="none",
            opener=Server({}),
            parts=small[0],
            installed=nowhere,
        )
    assert "--data-dir" in str(caught.value)


def test_downloading_where_nothing_can_be_written(small, tmp_path: Path, nowhere: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="Not a directory"):
        load_fashion_mnist(
            data_dir=tmp_path / "file" / "data",
            image_size=None,
            augment="none",
            opener=Server({}),
            parts=small[0],
            installed=nowhere,
        )


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the address where its files are served on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "web"
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_fetching_over_http(web: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = web
    content = b"the contents" * 1000
    (folder / "good.gz").write_bytes(gzip.compress(content))
    (folder / "wrong.gz").write_bytes(gzip.compress(content[:-1]))
    path = tmp_path / "target.gz"
    sha256 = hashlib.sha256(content).hexdigest()
    urls = [f"{address}absent.gz", f"{address}wrong.gz", f"{address}good.gz"]
    fetch(urls, path, sha256=sha256, content_bytes=len(content))
    assert path.read_bytes() == (folder / "good.gz").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text("older")
    with pytest.raises(DataError) as caught:
        fetch(urls[:2], path, sha256=sha256, content_bytes=len(content))
    assert "absent.gz: HTTP Error 404" in str(caught.value)
    assert "SHA-256" in str(caught.value)
    assert path.read_text() == "older"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["target.gz", "web"]


def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.gz"
        with pytest.raises(DataError, match="timed out"):
            fetch([url], tmp_path / "x.gz", sha256="", content_bytes=1, timeout_s=0.05)
    assert not list(tmp_path.iterdir())


def test_an_endless_download_is_cut(small, tmp_path: Path, nowhere: Path) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(size)

    with pytest.raises(DataError, match="more than"):
        load_fashion_mnist(
            data_dir=tmp_path / "data",
            image_size=None,
            augment="none",
            opener=lambda url, timeout_s: Endless(),
            parts=small[0],
            installed=nowhere,
        )
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda packed: packed[: len(packed) // 2], "cut short"),
        (lambda packed: b"", "SHA-256"),
        (lambda packed: b"\x1f\x8b" + b"no gzip after all", "not gzip"),
        (lambda packed: gzip.compress(gzip.decompress(packed)[:-1]), "SHA-256"),
        (lambda packed: gzip.compress(gzip.decompress(packed) + b"x"), "more than"),
        (lambda packed: gzip.compress(bytes(50_000_000)), "more than"),
    ],
)
def test_a_damaged_file_is_named(small, tmp_path: Path, nowhere: Path, damage, word: str) -> None:
    parts, contents = small
    folder = write(tmp_path / "data", contents)
    path = folder / f"{parts[2].name}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=word) as caught:
        load_fashion_mnist(
            data_dir=folder, image_size=None, augment="none", parts=parts, installed=nowhere
        )
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "only 0 bytes"),
        (b"\0\0\x08\x03" + bytes(12), "should have"),
        (b"\x01\0\x08\x01" + bytes(12), "starts with"),
        (b"\0\0\x0d\x03" + bytes(12), "type 0x0d"),
        (b"\0\0\x08\x01" + bytes(12), "1 dimension"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "should have"),
        (idx_bytes(np.zeros((2, 3, 4)))[:-1], "should have 40"),
        (idx_bytes(np.zeros((2, 3, 4))) + b"x", "should have 40"),
    ],
)
def test_idx_refuses(content: bytes, word: str) -> None:
    with pytest.raises(DataError, match=word) as caught:
        idx.parse(content, dimensions=3, path=Path("some-file"))
    assert "some-file" in str(caught.value)
