"""What is open when processes are forked: files at places that would be shared, and connections."""

from __future__ import annotations

import functools
import io
import logging
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hasten.feed import Loader
from hasten.feed import apart as apart_module
from hasten.feed import sizing as sizing_module
from hasten.feed.apart import measure_apart
from hasten.feed.compare import identical
from hasten.feed.measure import Measured
from hasten.feed.openfiles import OpenFiles, unshareable
from hasten.feed.samples import Maker

COUNT = 60


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "numbers"
    np.arange(COUNT, dtype=np.int32).tofile(path)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        for number in range(COUNT):
            archive.writestr(str(number), str(number))
    return path


class Reading(Dataset[Any]):
    """Opens its file when it is made, as people do."""

    wait_s = 0.003

    def __init__(self, path: Path) -> None:
        self.file: Any = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.file.seek(4 * index)
        time.sleep(self.wait_s)
        return int.from_bytes(self.file.read(4), "little")

    def close(self) -> None:
        self.file.close()

    @property
    def place(self) -> int:
        return os.lseek(self.file.fileno(), 0, os.SEEK_CUR)


class ByDescriptor(Reading):
    def __getitem__(self, index: int) -> Any:
        os.lseek(self.file.fileno(), 4 * index, os.SEEK_SET)
        time.sleep(self.wait_s)
        return int.from_bytes(os.read(self.file.fileno(), 4), "little")


class Buffered(Reading):
    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=16)
        self.file.read(4)


class Zipped(Reading):
    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path.with_name("zip"))
        self.file = self.archive.fp

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return int(self.archive.read(str(index)))

    def close(self) -> None:
        self.archive.close()


class Onwards(Reading):
    """Reads on, whatever the index is."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return int.from_bytes(self.file.read(4), "little")


class Late(Reading):
    """What a trial asks for shows nothing: only the later half looks at the file."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index >= COUNT // 2 else index


SEEKING = [Reading, ByDescriptor, Buffered, Zipped]


def dataloader(dataset: Any, **given: Any) -> Any:
    return DataLoader(dataset, 4, **given)


@pytest.mark.parametrize("kind", [*SEEKING, Onwards])
@pytest.mark.parametrize("taken", [False, True])
def test_files_opened_before_give_what_they_give_to_one_reader(
    kind: Any, taken: bool, numbers: Path
) -> None:
    dataset, other = kind(numbers), kind(numbers)
    place = dataset.place
    expected = list(dataloader(other))
    loader = Loader.from_dataloader(dataloader(dataset)) if taken else Loader(dataset, 4)
    with loader:
        plan = loader.plan
        assert plan.name == "inline" or (plan.name, plan.workers) == ("threads", 1)
        assert dataset.place == place, "as if no sample had been asked for"
        assert all(map(identical, loader, expected))
    assert dataset.place == other.place
    dataset.close()
    other.close()


@pytest.mark.parametrize("kind", SEEKING)
def test_workers_read_files_as_their_own(kind: Any, numbers: Path) -> None:
    dataset = kind(numbers)
    place = dataset.place
    with Loader(dataset, 4, shuffle=True, num_workers=2) as loader:
        seen = torch.cat(list(loader)).tolist()
    expected = torch.cat(list(Loader(range(COUNT), 4, shuffle=True, num_workers=0))).tolist()
    assert seen == expected
    assert dataset.place == place
    dataset.close()


def test_one_that_is_replaced_begins_where_the_files_are(numbers: Path) -> None:
    dataset = Reading(numbers)
    with Loader(dataset, 4, num_workers=1, persistent_workers=True) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(COUNT))
        children = multiprocessing.active_children()
        children[0].kill()
        children[0].join()
        assert torch.cat(list(loader)).tolist() == list(range(COUNT))
    dataset.close()


def test_what_is_made_ahead_is_given_only_while_files_stay_where_they_are(numbers: Path) -> None:
    dataset, other = Late(numbers), Late(numbers)
    expected = list(dataloader(other))
    with Loader.from_dataloader(dataloader(dataset), plan="processes") as loader:
        assert all(map(identical, loader, expected))
        assert loader.plan.name == "inline" and "in a file that was open" in loader.plan.reason
    assert dataset.place == other.place
    dataset.close()
    other.close()


@pytest.mark.parametrize("workers", [1])
def test_the_workers_of_a_dataloader_share_files_as_they_always_did(
    workers: int, numbers: Path
) -> None:
    dataset, other = Onwards(numbers), Onwards(numbers)
    original = dataloader(other, num_workers=workers)
    with Loader.from_dataloader(dataloader(dataset, num_workers=workers)) as loader:
        for _ in range(2):
            assert all(map(identical, loader, original))
    assert dataset.place == other.place
    dataset.close()
    other.close()


def tried(dataset: Any) -> Measured:
    maker = Maker(dataset, None, seed=0, skip_errors=False, batched=True)
    cost = measure_apart(maker, COUNT, 4, clock=time.perf_counter)
    assert cost is not None
    return cost


class Stuck(Reading):
    wait_s = 60.0


class Idle(Dataset[Any]):
    """Takes too long, and reads nothing."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        time.sleep(60)


def test_a_trial_says_whether_files_that_were_open_are_read(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, shares in ((Reading, True), (Zipped, True)):
        dataset = kind(numbers)
        assert tried(dataset).shares is shares
        dataset.close()
    dataset = Reading(numbers)
    dataset.__class__ = type("Not", (Reading,), {"__getitem__": lambda self, i: [self, i][1]})
    assert not tried(dataset).shares
    dataset.close()
    monkeypatch.setattr(apart_module, "_PATIENCE_S", 0.2)
    dataset = Stuck(numbers)
    dataset.file.seek(12)
    cost = tried(dataset)
    assert cost.cut and cost.shares, "of one that is cut short too"
    assert dataset.place == 12, "which can put nothing back"
    dataset.close()


def test_a_file_that_the_fork_has_closed_is_no_file_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the lock of a run's folder: its number is the next file's that the fork opens."""
    monkeypatch.setattr(apart_module, "_PATIENCE_S", 0.3)
    owned = OpenFiles.own

    def closing(self: OpenFiles, *, writable: bool = False) -> None:
        os.close(file.fileno())
        os.dup2(os.open(__file__, os.O_RDONLY), file.fileno())
        owned(self, writable=writable)

    monkeypatch.setattr(OpenFiles, "own", closing)
    with (tmp_path / "lock").open("w+") as file:
        file.write("a host and a process")
        file.flush()
        cost = tried(Idle())
    assert cost.cut and not cost.shares


def test_where_nothing_is_forked_it_is_said_too(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart_module.sys, "platform", "darwin")
    dataset = Reading(numbers)
    assert tried(dataset).shares
    dataset.close()


class Fetching(Reading):
    def fetch(self, index: int, key: int) -> Any:
        return os.pread(self.file.fileno(), 4, 4 * index)


BUSY = Measured(samples=9, seconds=0.05, cpu_seconds=0.05, bytes=8, free=0.0, shares=True)
WAITING = Measured(samples=9, seconds=0.05, cpu_seconds=0.0, bytes=8, shares=True)


@pytest.mark.parametrize(
    ("kind", "cost", "name"),
    [(Reading, BUSY, "inline"), (Reading, WAITING, "threads"), (Fetching, BUSY, "threads")],
)
def test_no_processes_make_samples_that_read_on(
    kind: Any, cost: Measured, name: str, numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: cost)
    dataset = kind(numbers)
    with Loader(dataset, 4) as loader:
        plan = loader.plan
        assert plan.name == name
        assert (name == "inline") == ("files that are open" in plan.reason)
        planner = loader._feeds._planner
        assert isinstance(planner.moves.larger(plan, 0.2), type(None)) or kind is Fetching
        assert planner.moves.instead(plan, "so").name == "inline"
    dataset.close()


def test_what_cannot_be_opened_again_is_put_back(
    numbers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers.open("rb", buffering=0) as file, numbers.open("ab") as log:
        file.seek(8)
        files = OpenFiles()
        log.write(b"more")
        log.flush()
        assert not files.moved(), "a file that is only written to is nobody's to read"
        with monkeypatch.context() as now:
            now.setattr(os, "open", refused)
            files.own()
        file.read(4)
        assert files.moved()
        files.put_back()
        assert file.tell() == 8 and not files.moved()


def refused(*_: Any) -> int:
    raise PermissionError


def test_files_for_reading_and_writing_are_owned_only_where_that_is_asked(numbers: Path) -> None:
    """Who writes a log that several write to, goes on where another has stopped."""
    with numbers.open("r+b", buffering=0) as file:
        for writable in (False, True):
            files = OpenFiles()
            again = os.dup(file.fileno())
            files.own(writable=writable)
            file.read(4)
            assert (os.lseek(again, 0, os.SEEK_CUR) == file.tell()) is not writable
            os.close(again)


class Holding(Dataset[Any]):
    def __init__(self, what: Any) -> None:
        self.inner = {"what": [what]}

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return index + len(self.inner) - 1


def test_connections_and_locks_that_are_held_are_seen() -> None:
    one, other = socket.socketpair()
    pipe = multiprocessing.Pipe()
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    lock, base = threading.Lock(), sqlite3.connect(":memory:")
    with lock:
        for what, name in [
            (one, "socket"), (pipe[0], "Connection"), (child, "pipe"), (lock, "lock"),
            (base, "sqlite3.Connection"), (base.cursor(), "sqlite3.Cursor"),
        ]:  # fmt: skip
            assert name in unshareable(Holding(what))
            assert name in unshareable(lambda what=what: what)
    assert child.stdout is not None
    one.close()
    other.close()
    for what in (
        one,
        lock,
        io.StringIO(),
        sys.stdout,
        logging.getLogger(),
    ):
        assert unshareable(Holding(what)) == ""
    child.stdout.close()
    child.wait()
    assert unshareable(Holding(child)) == ""
    base.close()
    for end in pipe:
        end.close()


BASE = sqlite3.connect(":memory:", check_same_thread=False)


class Asking(Holding):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return BASE.execute("select ?", (index,)).fetchone()[0]


class AskingItself(Holding):
    def __getitem__(self, index: int) -> Any:
        return self.inner["what"][0].execute("select ?", (index,)).fetchone()[0]


class InComprehension(Holding):
    def __getitem__(self, index: int) -> Any:
        return [BASE.execute("select ?", (each,)).fetchone() for each in (index,)]


class InStatic(Holding):
    @staticmethod
    def asked(index: int) -> Any:
        return BASE.execute("select ?", (index,)).fetchone()


class InProperty(Holding):
    @property
    def cursor(self) -> Any:
        return BASE.cursor()


class InCached(Holding):
    @functools.lru_cache  # noqa: B019 - as people write it
    def asked(self, index: int) -> Any:
        return BASE.execute("select ?", (index,)).fetchone()


@pytest.mark.parametrize("kind", [Asking, InComprehension, InStatic, InProperty, InCached])
def test_a_connection_is_seen_wherever_methods_name_it(kind: Any) -> None:
    assert "sqlite3.Connection" in unshareable(kind(None))
    assert "sqlite3.Connection" in unshareable(Subset(kind(None), [1, 2]), None)
    assert unshareable(Holding(None)) == ""


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("kind", [Asking, AskingItself])
def test_who_holds_a_connection_is_not_forked(
    kind: Any, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", None)
    base = sqlite3.connect(":memory:")
    dataset = kind(base)
    loader = Loader.from_dataloader(dataloader(dataset)) if taken else Loader(dataset, 4)
    with loader:
        assert torch.cat(list(loader)).tolist() == list(range(200))
        assert loader.plan.name == "inline"
        assert "sqlite3.Connection" in loader.plan.reason
    base.close()


@pytest.mark.parametrize("another", [False, True], ids=["closed", "its number is another's"])
def test_what_a_fork_has_closed_stays_closed(numbers: Path, another: bool) -> None:
    # As multiprocessing closes standard input, and a worker what its siblings speak by.
    one, other = numbers.open("rb"), numbers.with_name("zip").open("rb")
    with one, other:
        one.seek(8)
        files = OpenFiles()
        number, inheritable = one.fileno(), os.get_inheritable(one.fileno())
        kept = os.dup(number)
        try:
            if another:
                os.dup2(other.fileno(), number, inheritable)
            else:
                os.close(number)
            files.own(writable=True)
            assert not files.moved()
            files.put_back()
            if another:
                assert os.path.sameopenfile(number, other.fileno())
                assert os.lseek(number, 0, os.SEEK_CUR) == 0
            else:
                with pytest.raises(OSError, match="Bad file"):
                    os.fstat(number)
        finally:
            os.dup2(kept, number, inheritable)
            os.close(kept)
