"""The cause of a DataError: the exception that the data set raised, under each plan."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from test_feed_messages import WAYS, failure
from torch.utils.data import DataLoader, IterableDataset, Subset

import hasten
from hasten.errors import DataError
from hasten.feed.failure import RemoteError

PROCESSES = ("processes", "taken, workers")
"""Where a worker tells: what it made ahead for a DataLoader without workers is made again here."""
every_way = pytest.mark.parametrize("way", WAYS)


class Unreadable(Exception):
    """Takes two arguments, and has one in `args`: pickle's own way calls it with too few."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} cannot be read")
        self.path, self.line = path, line


class Prefixed(Exception):
    """Pickle's own way would say the first words twice."""

    def __init__(self, path: str) -> None:
        super().__init__(f"cannot read {path}")


class Reduced(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not to be pickled")


class Leaving(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class Unopened(Exception):
    """Comes out of no pickle."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Another(Exception):
    """Comes out of it as something else."""

    def __reduce__(self) -> Any:
        return ValueError, ("another",)


class Picky(Exception):
    def __new__(cls, *args: Any) -> Picky:
        if args != (1, 2):
            raise TypeError("1 and 2")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any) -> None:
        super().__init__("picky")


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("of a function")


def holding(value: Any) -> Exception:
    error = ValueError("holds much")
    error.value = value  # type: ignore[attr-defined]
    return error


def deep() -> Exception:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return holding(value)


SENT: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("bad picture"),
    "KeyError": lambda: KeyError("label"),
    "of an object": lambda: KeyError(Unreadable),
    "OSError": lambda: FileNotFoundError(2, "No such file", "cats/5.jpg"),
    "of two arguments": lambda: Unreadable("cats/5.jpg", 7),
    "of words of its own": lambda: Prefixed("cats/5.jpg"),
    "DataError": lambda: DataError("broken JPEG"),
}
TOLD: dict[str, Callable[[], Exception]] = {
    "local": local,
    "whose __reduce__ raises": lambda: Reduced("no"),
    "whose __reduce__ leaves": lambda: Leaving("no"),
    "that cannot be opened": lambda: Unopened("no"),
    "that is another when opened": lambda: Another("no"),
    "whose __new__ is picky": lambda: Picky(1, 2),
    "with a lock": lambda: holding(__import__("threading").Lock()),
    "with a large array": lambda: holding(np.zeros(1 << 19)),
    "with a large tensor": lambda: holding(torch.zeros(1 << 19)),
    "too deep": deep,
}


class Raises(kinds.Plain):
    """Sample 5 does."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        super().__init__(9)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.make()
        return index


@every_way
@pytest.mark.parametrize("kind", SENT)
def test_the_original_is_the_cause(way: str, kind: str) -> None:
    wanted = SENT[kind]()
    error = failure(way, Raises(SENT[kind]))
    cause: Any = error.__cause__
    assert type(cause) is type(wanted)
    assert (str(cause), cause.args) == (str(wanted), wanted.args)
    assert vars(wanted).items() <= vars(cause).items()
    told = "".join(traceback.format_exception(cause))
    assert "in __getitem__\n    raise self.make()" in told


@every_way
@pytest.mark.parametrize("kind", TOLD)
def test_what_cannot_be_sent_is_told(way: str, kind: str) -> None:
    wanted = TOLD[kind]()
    error = failure(way, Raises(TOLD[kind]))
    assert f"raised {type(wanted).__name__}: {wanted}" in str(error)
    cause = error.__cause__
    assert type(cause).__name__ == ("RemoteError" if way in PROCESSES else type(wanted).__name__)
    told = "".join(traceback.format_exception(cause))
    assert "in __getitem__\n    raise self.make()" in told


@pytest.mark.parametrize("way", PROCESSES)
@pytest.mark.parametrize("kind", ["ValueError", "local"])
def test_what_is_printed_says_things_once(way: str, kind: str) -> None:
    error = failure(way, Raises((SENT | TOLD)[kind]))
    text = str((SENT | TOLD)[kind]())
    printed = "".join(traceback.format_exception(error))
    assert printed.count(str(error)) == 1
    assert printed.count(text) == 2, "of the cause, and of the DataError that names the sample"
    told = "".join(traceback.format_exception(error.__cause__))
    assert "/hasten/feed/" not in told
    assert len(told.splitlines()) <= 8


@pytest.mark.parametrize("way", ["processes", "taken, workers"])
def test_what_led_to_it_is_told_too(way: str) -> None:
    class Nested(kinds.Plain):
        def __getitem__(self, index: int) -> Any:
            try:
                return {}[index]
            except KeyError as error:
                raise ValueError("no entry") from error

    cause: Any = failure(way, Nested()).__cause__
    assert type(cause) is ValueError
    (note,) = cause.__notes__
    assert note.index("KeyError: 0") < note.index("direct cause") < note.index("no entry")


@every_way
def test_a_part_of_a_data_set_that_gives_batches(way: str) -> None:
    """A Subset has `__getitems__`: what it raised is not told beside what the sample did."""
    part: Any = Subset(Raises(SENT["ValueError"]), range(9))
    cause = failure(way, part).__cause__
    assert type(cause) is ValueError
    told = "".join(traceback.format_exception(cause))
    assert told.count("bad picture") == 1


class Together(kinds.Plain):
    def __getitems__(self, indices: list[int]) -> Any:
        raise ValueError("not together")


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("taken")])
def test_batches_that_fail_though_no_sample_does(way: str) -> None:
    error = failure(way, Together())
    assert "__getitems__ of Together raised ValueError: not together on the samples" in str(error)
    assert type(error.__cause__) is ValueError


def spoil(samples: list[Any]) -> Any:
    raise LookupError("no batch")


@every_way
def test_of_a_collate_function(way: str) -> None:
    given: Any = {"collate_fn": spoil}
    if way.startswith("taken"):
        workers = 2 if way in ("taken, workers", "taken, played") else 0
        plan = {"taken, made ahead": "processes", "taken, played": "inline"}.get(way, "auto")
        original: Any = DataLoader(kinds.Plain(), 4, num_workers=workers, **given)
        loader = hasten.Loader.from_dataloader(original, plan=plan)
    else:
        loader = WAYS[way](kinds.Plain(), 4, **given)
    with loader, pytest.raises(DataError, match="no batch") as info:
        list(loader)
    assert type(info.value.__cause__) is LookupError


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 0
        raise KeyError("of a stream")


def refuse(worker: int) -> None:
    raise PermissionError(13, "no entry", "samples.db")


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_stream(taken: bool, workers: int) -> None:
    if taken:
        loader = hasten.Loader.from_dataloader(DataLoader(Stream(), 1, num_workers=workers))
    else:
        loader = hasten.Loader(Stream(), 1, num_workers=workers)
    with loader, pytest.raises(DataError, match="of a stream") as info:
        list(loader)
    assert type(info.value.__cause__) is KeyError


@pytest.mark.parametrize("way", ["processes", "taken, workers", "taken, played"])
def test_of_a_worker_init_fn(way: str) -> None:
    if way == "processes":
        loader = hasten.Loader(kinds.Plain(), 4, num_workers=2, worker_init_fn=refuse)
    else:
        plan: Any = "inline" if way == "taken, played" else "auto"
        original: Any = DataLoader(kinds.Plain(), 4, num_workers=2, worker_init_fn=refuse)
        loader = hasten.Loader.from_dataloader(original, plan=plan)
    with loader, pytest.raises(DataError, match="worker_init_fn refuse") as info:
        list(loader)
    cause: Any = info.value.__cause__
    assert type(cause) is PermissionError and cause.filename == "samples.db"


def test_where_only_the_worker_knows_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own name for what it raises may be gone by the time that it is told."""
    loader = hasten.Loader(Raises(SENT["of two arguments"]), 4, num_workers=2)
    with loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.delattr(f"{__name__}.Unreadable")
        with pytest.raises(DataError) as info:
            list(batches)
    assert isinstance(info.value.__cause__, RemoteError)
    assert "raise self.make()" in str(info.value.__cause__)
