"""Caches of decoded copies: the same pixels kept or not, bounded, shared, and never in the way."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from hasten.errors import UsageError
from hasten.feed import Loader
from hasten.vision import data
from hasten.vision.cutting import Copy, Crop
from hasten.vision.data.copies import Copies, InMemory, store_of
from hasten.vision.data.disk_copies import OnDisk, default_folder
from hasten.vision.data.folder import ImageFolderDataset
from hasten.vision.data.preparation import Preparation, random_crop
from hasten.vision.decode import ImageError, decode_copy, decode_crop
from hasten.vision.settings import TrainSettings

PHOTOS = (
    Path(importlib.util.find_spec("sklearn").submodule_search_locations[0]) / "datasets" / "images"
)
DAY_S = 86400


def noise(path: Path, height: int, width: int, seed: int = 0, **options: object) -> Path:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height)).save(path, "JPEG", quality=90, **options)
    return path


def never(line: str) -> None:
    raise AssertionError(line)


def on_disk(folder: Path, limit_bytes: int | None = None, say=never, **options) -> OnDisk:
    return OnDisk(folder, limit_bytes, say=say, **options)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["ram", "disk"])
def store(request, tmp_path: Path):
    return InMemory(1 << 30) if request.param == "ram" else on_disk(tmp_path / "cache")


def key(path: Path) -> tuple[str, int, int, int, int]:
    return str(path), 1, 2, 3, 4


def copy_of(value: int, height: int = 5, width: int = 7) -> Copy:
    return Copy(np.full((height, width, 3), value, np.uint8), 50, 70, 6)


def test_what_is_kept_comes_back(store) -> None:
    assert store.get(key(Path("a"))) is None
    store.put(key(Path("a")), copy_of(9))
    found = store.get(key(Path("a")))
    assert (found.height, found.width, found.orientation) == (50, 70, 6)
    assert np.array_equal(found.content, copy_of(9).content)
    assert store.get((*key(Path("a"))[:4], 5)) is None
    assert store.get(key(Path("b"))) is None
    assert store.describe()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize(("height", "width"), [(90, 120), (150, 60)])
def test_pictures_that_are_no_larger_than_needed_are_cut_to_the_same_bits(
    store, tmp_path: Path, orientation: int, height: int, width: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise(tmp_path / "root/a/1.jpg", height, width, exif=exif.tobytes())
    plain, cached = (
        ImageFolderDataset(
            tmp_path / "root", ["a/1.jpg"], [0], preparation=Preparation(size=48), augment=True,
            copies=copies,
        )
        for copies in (None, Copies(store, size=48, channels=3))
    )  # fmt: skip
    for draw in range(20):
        want = plain.fetch(0, draw)[0]
        assert torch.equal(cached.fetch(0, draw)[0], want), draw


@pytest.mark.parametrize("photo", ["china.jpg", "flower.jpg"])
@pytest.mark.parametrize("size", [32, 64, 100])
def test_large_pictures_are_kept_small_and_cut_alike(store, photo: str, size: int) -> None:
    path = PHOTOS / photo
    copies = Copies(store, size=size, channels=3)
    copy = copies.of(str(path), name=photo)
    assert min(copy.content.shape[:2]) == 2 * size
    assert (copy.height, copy.width) == (427, 640)
    from hasten.vision.cutting import cut

    for draw in range(12):

        def choose(height: int, width: int, draw: int = draw) -> Crop:
            return random_crop(height, width, draw)

        kept = cut(copies.of(str(path), name=photo), choose, size)
        assert torch.equal(kept, cut(copy, choose, size)), "first or later, the same"
        fresh = decode_crop(path, choose, size=size)
        assert (kept.int() - fresh.int()).abs().float().mean() <= 3


def test_what_is_learned_does_not_depend_on_what_is_kept(tmp_path: Path) -> None:
    path = noise(tmp_path / "a.jpg", 400, 500)
    roomy, full = InMemory(1 << 30), InMemory(1)
    for _ in range(2):
        one = Copies(roomy, size=32, channels=3).of(str(path), name="a")
        other = Copies(full, size=32, channels=3).of(str(path), name="a")
        assert np.array_equal(one.content, other.content)
    assert full.used_bytes == 0
    assert roomy.used_bytes == one.content.nbytes


def test_later_epochs_do_not_decode(store, tmp_path: Path, monkeypatch) -> None:
    names = [f"{number}.jpg" for number in range(4)]
    for number, name in enumerate(names):
        noise(tmp_path / "root" / name, 200, 240, seed=number)
    dataset = ImageFolderDataset(
        tmp_path / "root", names, [0] * 4, preparation=Preparation(size=32), augment=True,
        copies=Copies(store, size=32, channels=3),
    )  # fmt: skip
    loader = Loader(dataset, 2, plan="threads", num_workers=2)
    first = torch.cat([images for images, _ in loader])

    def gone(*arguments: object, **options: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", gone)
    loader.set_epoch(0)
    assert torch.equal(torch.cat([images for images, _ in loader]), first)


def test_a_changed_picture_has_a_new_copy(store, tmp_path: Path) -> None:
    path = noise(tmp_path / "a.jpg", 200, 240, seed=1)
    copies = Copies(store, size=32, channels=3)
    before = copies.of(str(path), name="a").content.copy()
    noise(path, 200, 240, seed=2)
    os.utime(path, ns=(1, 1))  # whatever the file system's clock can tell apart
    after = copies.of(str(path), name="a").content
    assert not np.array_equal(before, after)
    assert np.array_equal(after, decode_copy(path, size=32).content)


def flat(path: Path, value: int, height: int, width: int, changed_ns: int) -> Path:
    """A picture of one colour, without compression: as many bytes as any other of its size."""
    Image.new("RGB", (width, height), (value, value, value)).save(path, compress_level=0)
    os.utime(path, ns=(changed_ns, changed_ns))
    return path


@pytest.mark.parametrize(
    ("height", "width", "changed_ns"),
    [
        (80, 100, 1_000_000_001),  # the same number of bytes, a nanosecond later
        (80, 101, 1_000_000_000),  # at the same time, of other bytes
    ],
)
def test_a_picture_s_time_and_its_bytes_each_tell_of_a_change(
    store, tmp_path: Path, height: int, width: int, changed_ns: int
) -> None:
    path = flat(tmp_path / "a.png", 10, 80, 100, 1_000_000_000)
    before = path.stat()
    copies = Copies(store, size=32, channels=3)
    assert copies.of(str(path), name="a").content.max() == 10
    flat(path, 200, height, width, changed_ns)
    after = path.stat()
    assert (after.st_size == before.st_size) != (after.st_mtime_ns == before.st_mtime_ns)
    assert copies.of(str(path), name="a").content.min() == 200


def test_size_and_channels_have_copies_of_their_own(store, tmp_path: Path) -> None:
    path = str(noise(tmp_path / "a.jpg", 200, 240))
    shapes = {
        Copies(store, size=size, channels=channels).of(path, name="a").content.shape
        for size, channels in [(32, 3), (40, 3), (32, 1)]
    }
    assert len(shapes) == 3


def test_a_copy_has_its_name_when_it_is_whole_and_not_before(tmp_path: Path, monkeypatch) -> None:
    store, name = on_disk(tmp_path), key(Path("a"))
    store.put(name, copy_of(1))
    opened, real = [], Path.open

    class Watching:
        def __init__(self, file, path: Path) -> None:
            self.file, self.path = file, path

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> int:
            opened.append(self.path)
            assert store.get(name).content.max() == 1, "what was there before is whole"
            if len(opened) <= 2:
                assert not store._path(key(Path("b"))).exists()
            return self.file.write(content)

    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Watching(real(self, *a, **k), self))
    store.put(key(Path("b")), copy_of(3))
    store.put(name, copy_of(2))
    monkeypatch.undo()
    assert len(opened) == 4, "header and pixels of both"
    assert all(path.name.startswith(".part-") for path in opened)
    assert store.get(name).content.max() == 2
    assert store.get(key(Path("b"))).content.max() == 3


def test_a_file_that_is_gone_or_broken_is_an_error_as_without(store, tmp_path: Path) -> None:
    copies = Copies(store, size=32, channels=3)
    path = noise(tmp_path / "a.jpg", 200, 240)
    copies.of(str(path), name="a")
    path.unlink()
    with pytest.raises(ImageError, match="a: cannot be read"):
        copies.of(str(path), name="a")
    path.write_bytes(b"no image at all")
    with pytest.raises(ImageError, match="is not an image"):
        copies.of(str(path), name="a")


def test_memory_is_bounded() -> None:
    store = InMemory(250)
    for number in range(5):
        store.put(key(Path(str(number))), copy_of(number))  # 105 bytes
    assert store.used_bytes == 210
    store.put(("0", 9, 2, 3, 4), copy_of(7))  # the file has changed: the old copy goes
    assert store.used_bytes == 210
    assert store.get(key(Path("0"))) is None
    assert store.get(("0", 9, 2, 3, 4)) is not None
    again = pickle.loads(pickle.dumps(store))
    assert (again.limit_bytes, again.used_bytes) == (250, 0)


class Kept(torch.utils.data.Dataset):
    """Keeps each sample; tells the limit of the process that makes it."""

    def __init__(self, store: InMemory) -> None:
        self.store = store

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.store.put(key(Path(str(index))), copy_of(index))  # 105 bytes
        assert self.store.used_bytes <= self.store.limit_bytes
        return torch.tensor([self.store.limit_bytes, self.store.used_bytes])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_processes_share_out_the_memory_and_that_is_said(context: str, capfd) -> None:
    store = InMemory(1000, say=never)
    store.put(key(Path("here")), copy_of(1))
    there = store.used_bytes if context == "fork" else 0
    options = {"num_workers": 3, "multiprocessing_context": context}
    log, plain = logging.getLogger("hasten.vision"), logging.StreamHandler(sys.__stderr__)
    log.addHandler(plain)  # as where nobody has set up logging, which pytest has
    with contextlib.ExitStack() as undo, Loader(Kept(store), 4, **options) as loader:
        undo.callback(log.removeHandler, plain)
        found = torch.cat(list(loader))
        assert set(found[:, 0].tolist()) == {there + (1000 - there) // 3}
        assert found[:, 1].max() > there
        list(loader)
    said = capfd.readouterr().err
    assert "3 worker processes keep copies each for itself" in said
    if context == "fork":
        assert said.count("cache:") == 1, "not in each epoch"
    assert store.limit_bytes == 1000
    assert store.used_bytes == 105


def test_threads_have_the_memory_in_common(capfd) -> None:
    store = InMemory(100_000, say=never)
    with Loader(Kept(store), 4, plan="inline") as loader:
        assert set(torch.cat(list(loader))[:, 0].tolist()) == {100_000}
    assert "cache" not in capfd.readouterr().err


def test_full_memory_is_said_once() -> None:
    said: list[str] = []
    store = InMemory(250, say=said.append)
    for number in range(2):
        store.put(key(Path(str(number))), copy_of(number))
    assert said == []
    for number in range(2, 5):
        store.put(key(Path(str(number))), copy_of(number))
    assert len(said) == 1
    assert "hold 2 pictures" in said[0]
    assert "training goes on" in said[0]


def test_the_disk_is_bounded_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    store = on_disk(tmp_path, 400, said.append)
    for number in range(5):
        store.put(key(Path(str(number))), copy_of(number))  # 169 bytes each
    assert sum(path.stat().st_size for path in files(tmp_path)) == 2 * 169
    assert len(said) == 1
    assert "is full" in said[0]
    assert "training goes on" in said[0]
    assert store.get(key(Path("0"))) is not None
    store = on_disk(tmp_path, 400, said.append)
    assert store.used_bytes == 2 * 169, "those of other runs count"


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("held", [0, 5])
def test_processes_that_write_at_once_stay_within_the_limit(
    tmp_path: Path, count: int, held: int
) -> None:
    limit = 50 * 169 + 100

    def used() -> int:
        return sum(path.stat().st_size for path in files(tmp_path))

    stores = [on_disk(tmp_path, limit, say=[].append) for _ in range(count)]
    for number in range(120):
        for which, store in enumerate(stores):
            if which or number >= held:  # one of them comes late
                store.put(key(Path(f"{which}-{number}")), copy_of(number))
            assert used() <= limit + count * 169, "for a moment, a copy of each"
    assert 0.9 * limit < used() <= limit


def put_a_hundred(folder: Path, which: int, limit: int, go: object) -> None:
    go.wait()  # type: ignore[attr-defined]
    store = OnDisk(folder, limit, say=lambda line: None)
    for number in range(100):
        store.put(key(Path(f"{which}-{number}")), copy_of(number))


def test_real_processes_that_write_at_once_leave_no_more_than_the_limit(tmp_path: Path) -> None:
    limit = 50 * 169 + 100
    context = multiprocessing.get_context("fork")
    go = context.Event()
    workers = [
        context.Process(target=put_a_hundred, args=(tmp_path, which, limit, go))
        for which in range(4)
    ]
    for worker in workers:
        worker.start()
    go.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit


def test_a_single_writer_looks_seldom(tmp_path: Path, monkeypatch) -> None:
    store, looks = on_disk(tmp_path, 1000 * 169, say=[].append), []
    count = store._count
    monkeypatch.setattr(store, "_count", lambda **o: looks.append(1) or count(**o))
    for number in range(1100):
        store.put(key(Path(str(number))), copy_of(7))
    assert len(files(tmp_path)) == 1000
    assert len(looks) <= 40


def test_copies_unused_for_a_week_give_way(tmp_path: Path) -> None:
    now = [time.time()]
    store = on_disk(tmp_path, 400, clock=lambda: now[0])
    for number in range(2):
        store.put(key(Path(str(number))), copy_of(number))
    now[0] += 8 * DAY_S
    assert store.get(key(Path("1"))) is not None, "and it counts as used now"
    os.utime(store._path(key(Path("1"))), (now[0], now[0]))
    store.put(key(Path("2")), copy_of(2))
    assert [store.get(key(Path(name))) is not None for name in "012"] == [False, True, True]


def test_use_is_noted_at_most_once_a_day(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    store.put(key(Path("0")), copy_of(0))
    path = store._path(key(Path("0")))
    for age, noted in ((3600, False), (2 * DAY_S, True)):
        then = time.time() - age
        os.utime(path, (then, then))
        store.get(key(Path("0")))
        assert (path.stat().st_mtime > then + 1) == noted


def cut_short(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        flipped,
        lambda content: b"",
        lambda content: content[:30],
        lambda content: content + b"\0" * 8,
        lambda content: content[:100] + bytes(len(content) - 100),
        lambda content: bytes(len(content)),
        lambda content: content[:17] + b"\xff" + content[18:],  # its height
        lambda content: content[:56] + b"\x09" + content[57:],  # its orientation
        lambda content: content[:64] + content[72:80] + content[64:72] + content[80:],
    ],
)
def test_a_broken_copy_is_made_again(tmp_path: Path, damage) -> None:
    path = noise(tmp_path / "a.jpg", 203, 243)
    copies = Copies(on_disk(tmp_path / "cache"), size=32, channels=3)
    want = copies.of(str(path), name="a").content
    (entry,) = files(tmp_path / "cache")
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert np.array_equal(copies.of(str(path), name="a").content, want)
    assert entry.read_bytes() == whole


def put_many(folder: Path, path: Path, go: object) -> None:
    go.wait()  # type: ignore[attr-defined]
    copies = Copies(OnDisk(folder, say=never), size=32, channels=3)
    for _ in range(30):
        copy = copies.of(str(path), name="a")
        assert copy.content.shape[0] == 64
        for entry in files(folder):
            entry.unlink(missing_ok=True)


def test_two_processes_make_read_and_remove_the_same_copy(tmp_path: Path) -> None:
    path = noise(tmp_path / "a.jpg", 200, 240)
    context = multiprocessing.get_context("fork")
    go = context.Event()
    workers = [
        context.Process(target=put_many, args=(tmp_path / "cache", path, go)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    go.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_two_writers_of_one_copy_do_not_meet(tmp_path: Path, monkeypatch) -> None:
    """The second makes the same copy while the first has written it and not given it its name."""
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    real, met = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if not met:
            met.append(path)
            second.put(key(Path("a")), copy_of(9))
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    first.put(key(Path("a")), copy_of(9))
    assert met
    (found,) = files(tmp_path)
    assert found.name[0] != "."
    for store in (first, second):
        copy = store.get(key(Path("a")))
        assert copy is not None and np.array_equal(copy.content, copy_of(9).content)


WRITES = """
import sys
from pathlib import Path
import numpy as np
from hasten.vision.cutting import Copy
from hasten.vision.data.disk_copies import OnDisk
store = OnDisk(Path(sys.argv[1]), say=print)
copy = Copy(np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8), 700, 700, 1)
print("go", flush=True)
number = 0
while True:
    store.put(("a", number % 20, 0, 0, 0), copy)
    number += 1
"""


def test_a_killed_writer_leaves_no_broken_copy(tmp_path: Path) -> None:
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        while not any(path.name[0] != "." for path in files(tmp_path)):
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = on_disk(tmp_path)
    want = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
    found = [store.get(("a", number, 0, 0, 0)) for number in range(20)]
    whole = [copy for copy in found if copy is not None]
    assert whole
    assert all(np.array_equal(copy.content, want) for copy in whole)


def test_what_dead_writers_left_goes_with_time(tmp_path: Path) -> None:
    now = [time.time()]
    store = on_disk(tmp_path)
    store.put(key(Path("0")), copy_of(0))
    left = store._path(key(Path("0"))).with_name(".part-1")
    left.write_bytes(b"half")
    on_disk(tmp_path, clock=lambda: now[0])
    assert left.exists(), "its writer may be alive"
    now[0] += 2 * 3600
    assert on_disk(tmp_path, clock=lambda: now[0]).used_bytes == 169
    assert not left.exists()


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    path = noise(tmp_path / "a.jpg", 200, 240)
    copies = Copies(on_disk(tmp_path / "cache", say=said.append), size=32, channels=3)
    real = Path.open

    class Full:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> int:
            self.file.write(content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Full(real(self, *a, **k)))
    want = decode_copy(path, size=32).content
    for _ in range(3):
        assert np.array_equal(copies.of(str(path), name="a").content, want)
    monkeypatch.undo()
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "\n" not in said[0]
    assert files(tmp_path / "cache") == [], "nothing half written stays"


def test_a_real_limit_on_files_is_met_alike(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from hasten.vision.cutting import Copy
from hasten.vision.data.disk_copies import OnDisk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = OnDisk(Path(sys.argv[1]), say=lambda line: print("said", line))
store.put(("a", 1, 1, 1, 1), Copy(np.zeros((99, 99, 3), np.uint8), 99, 99, 1))
print(store.get(("a", 1, 1, 1, 1)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert done.stdout.endswith("None\n")
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_said_once(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    path = noise(tmp_path / "a.jpg", 200, 240)
    copies = Copies(on_disk(tmp_path / "file" / "x", say=said.append), size=32, channels=3)
    for _ in range(2):
        copies.of(str(path), name="a")
    assert len(said) == 1
    assert "cannot be used" in said[0]
    assert copies.store.describe() == "", "nothing of a cache that there is not"

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    copies = Copies(on_disk(tmp_path / "cache", say=said.append), size=32, channels=3)
    monkeypatch.setattr(Path, "mkdir", refuse)
    for _ in range(2):
        copies.of(str(path), name="a")
    assert len(said) == 2
    assert "Read-only file system" in said[1]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EIO])
def test_copies_that_may_not_be_removed_are_left(tmp_path: Path, monkeypatch, error: int) -> None:
    """Another user's, damaged or unused for long, on a full disk or one to read: training ended."""
    folder, now, said = tmp_path / "cache", [time.time()], []
    path = noise(tmp_path / "a.jpg", 203, 243)
    size = 20_000
    store = on_disk(folder, size, say=said.append, clock=lambda: now[0])
    copies = Copies(store, size=32, channels=3)
    want = copies.of(str(path), name="a").content
    (entry,) = files(folder)
    entry.write_bytes(entry.read_bytes()[:-1])
    (entry.parent / ".part-dead").write_bytes(bytes(size))
    now[0] += 8 * DAY_S

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert np.array_equal(copies.of(str(path), name="a").content, want)
    store.put(key(Path("other")), copy_of(1))
    assert len(said) == 1
    assert "is full" in said[0]


def test_worker_processes_share_the_disk(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(6)]
    for number, name in enumerate(names):
        noise(tmp_path / "root" / name, 200, 240, seed=number)
    dataset = ImageFolderDataset(
        tmp_path / "root", names, [0] * 6, preparation=Preparation(size=32), augment=True,
        copies=Copies(on_disk(tmp_path / "cache"), size=32, channels=3),
    )  # fmt: skip
    with Loader(dataset, 2, plan="processes", num_workers=2) as loader:
        by_processes = torch.cat([images for images, _ in loader])
    assert len(files(tmp_path / "cache")) == 6
    by_threads = torch.cat([images for images, _ in Loader(dataset, 2, plan="threads")])
    assert torch.equal(by_processes, by_threads)


def test_a_data_set_with_a_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    for number in range(12):
        noise(tmp_path / "root" / f"class{number % 2}" / f"{number}.jpg", 160, 200, seed=number)
    said: list[str] = []
    loaded = data.load(tmp_path / "root", image_size=32, cache="disk", say=said.append)
    assert any(line.startswith("Cache: decoded copies in") for line in said)
    assert loaded.train.copies is loaded.val.copies
    loaded.val.fetch(0, 0)
    assert files(default_folder())
    assert data.load(tmp_path / "root", image_size=32, cache="ram").train.copies is not None
    assert data.load(tmp_path / "root", image_size=32).train.copies is None


def test_settings_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="cache is one of none, ram, disk"):
        TrainSettings(cache="tape")
    with pytest.raises(UsageError, match="give --cache ram"):
        store_of("none", 5, never)
    with pytest.raises(UsageError, match="above 0"):
        TrainSettings(cache="ram", cache_bytes=0)
    with pytest.raises(UsageError, match="memory of their own"):
        TrainSettings(cache="ram", num_workers=2)
    with pytest.raises(UsageError, match="memory of their own"):
        TrainSettings(cache="ram", plan="processes")
    TrainSettings(cache="ram", plan="threads", num_workers=2)
    with pytest.raises(UsageError, match="digits lies in memory"):
        data.load("digits", cache="ram")


def test_no_folder_for_a_cache(monkeypatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", "off")
    with pytest.raises(UsageError, match="HASTEN_CACHE_DIR is off"):
        store_of("disk", None, never)
