"""Worker processes of a plan that was chosen: kept, at low priority, with a head start."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from hasten.devices import runtime
from hasten.errors import DataError
from hasten.feed import Loader
from hasten.feed import sizing as sizing_module
from hasten.feed.adapt import Watch
from hasten.feed.compare import identical
from hasten.feed.fingerprint import fingerprint
from hasten.feed.measure import Measured

COST = Measured(samples=9, seconds=0.03, cpu_seconds=0.03, free=0.0, bytes=16)


class Telling(kinds.Drawing):
    """Tells in which process, and at what priority, each sample was made."""

    def __init__(self, count: int = 40) -> None:
        super().__init__(count)
        self.table = np.zeros(3)
        self.more: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        where = os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
        return super().__getitem__(index)[0], index + len(self.more), *where


@pytest.fixture(autouse=True)
def no_change_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the loop waits, and the feed would try more workers, or fewer."""
    monkeypatch.setattr(Watch, "decide", lambda _self, plan, _left=None: plan)


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: COST)


def pids(loader: Loader) -> list[int]:
    return [batch[2][0].item() for batch in loader]


def test_workers_that_are_there_leave_the_loop_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing_module, "_HEAD_S", 10.0)
    with Loader(Telling(), 4) as loader:
        assert loader.plan.head_batches == 3
        for epoch, head in enumerate((3, 1, 1)):
            assert [pid == os.getpid() for pid in pids(loader)] == [True] * head + [False] * (
                10 - head
            ), epoch
        iterator = iter(loader)  # left in the middle: its workers end
        next(iterator)
        iterator.close()
        assert pids(loader)[:4].count(os.getpid()) == 3


def test_the_loop_makes_the_first_batches_and_the_workers_the_rest() -> None:
    with Loader(Telling(), 4) as loader:
        assert (loader.plan.name, loader.plan.workers, loader.plan.head_batches) == (
            "processes",
            2,
            1,
        )
        found = list(loader)
        mine = [batch[2][0].item() == os.getpid() for batch in found]
        assert mine == [True] + [False] * 9
        here = os.getpriority(os.PRIO_PROCESS, 0)
        assert found[0][3][0] == here
        assert found[-1][3][0] == min(19, here + loader.plan.niceness)
        expected = list(Loader(Telling(), 4, plan="inline"))
        assert identical([b[:2] for b in found], [b[:2] for b in expected])


def test_workers_are_kept_while_the_data_set_stays_the_same() -> None:
    dataset = Telling()
    with Loader(dataset, 4) as loader:
        first, second = pids(loader), pids(loader)
        assert set(first) == set(second)
        dataset.table[1] = 5
        third = pids(loader)
        assert not set(third[1:]) & set(first[1:])
        dataset.more.append(1)
        assert [batch[1][0].item() for batch in loader][-1] == 37
        loader.close()
        assert loader.plan.kept


class Keeping(Telling):
    """Keeps in itself what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.known:
            self.known[index] = torch.tensor(index)
        return self.known[index], len(self.more), os.getpid()


class KeepingInClass(Keeping):
    kept: dict[int, Any] = {}  # noqa: RUF012 - shared by all, as that is the point

    def __init__(self) -> None:
        super().__init__()
        del self.known

    def __getattr__(self, name: str) -> Any:
        if name != "known":
            raise AttributeError(name)
        return type(self).kept


@pytest.mark.parametrize("kind", [Keeping, KeepingInClass])
def test_what_the_loop_s_batches_leave_in_a_cache_ends_no_workers(kind: Any) -> None:
    """They began anew in each epoch, with nothing of what they had kept."""
    KeepingInClass.kept.clear()
    dataset = kind()
    with Loader(dataset, 4, shuffle=True) as loader:
        found = [[int(batch[2][0]) for batch in loader] for _ in range(3)]
        assert all(os.getpid() in each for each in found)
        assert len({pid for each in found for pid in each} - {os.getpid()}) == 2
        iterator = iter(loader)
        next(iterator)
        dataset.more.append(1)  # by the loop, right after a batch that it has made itself
        list(iterator)
        assert [batch[1][0].item() for batch in loader] == [1] * 10


def test_what_the_loop_changes_between_its_own_first_batches_comes_with_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing_module, "_HEAD_S", 10.0)
    dataset = Keeping()
    with Loader(dataset, 4) as loader:
        assert loader.plan.head_batches == 3
        iterator = iter(loader)
        next(iterator)
        dataset.more.append(1)
        list(iterator)
        assert [batch[1][0].item() for batch in loader] == [1] * 10


class Scaled(Telling):
    scale = 1
    bank = [0]  # noqa: RUF012

    def __getitem__(self, index: int) -> Any:
        return index * 0 + self.scale + self.bank[0]


class Holding(Telling):
    """Of what somebody else's class holds."""

    def __init__(self) -> None:
        super().__init__()
        self.more.append(Scaled())

    def __getitem__(self, index: int) -> Any:
        return self.more[0][index]


@pytest.mark.parametrize("kind", [Scaled, Holding])
def test_no_epoch_mixes_a_class_s_attributes_of_then_and_now(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "scale", 1)
    monkeypatch.setattr(Scaled, "bank", [0])
    with Loader(kind(), 4) as loader:
        for epoch in range(3):
            assert {int(each) for batch in loader for each in batch} == {1 + 11 * epoch}
            Scaled.scale += 1
            Scaled.bank[0] += 10


SCALE = 1
BY_NAME = {"scale": 1}


class Meta(type(Telling)):  # type: ignore[misc]
    scale = 1


class OfMeta(Telling, metaclass=Meta):
    def __getitem__(self, index: int) -> Any:
        return type(type(self)).scale


class OfVariable(Telling):
    def __getitem__(self, index: int) -> Any:
        return SCALE


class OfDict(Telling):
    @property
    def scale(self) -> int:
        return BY_NAME["scale"]

    def __getitem__(self, index: int) -> Any:
        return self.scale


class OfAnother(Telling):
    """Of a function of another module, which names a variable of that."""

    def __getitem__(self, index: int) -> Any:
        import scales_of_mine  # type: ignore[import-not-found]

        return scales_of_mine.scaled()


def collate(samples: list[Any]) -> Any:
    return torch.tensor([collate.scale for _ in samples])  # type: ignore[attr-defined]


def write(scale: int) -> None:
    global SCALE
    SCALE = scale
    BY_NAME["scale"] = Meta.scale = scale
    collate.scale = scale  # type: ignore[attr-defined]
    sys.modules["scales_of_mine"].SCALE = scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [OfMeta, OfVariable, OfDict, OfAnother, Telling])
def test_no_epoch_mixes_variables_of_then_and_now(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scales_of_mine.py").write_text("SCALE = 1\ndef scaled():\n    return SCALE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("scales_of_mine")
    write(1)
    with Loader(kind(), 4, collate_fn=collate if kind is Telling else None) as loader:
        assert loader.plan.kept
        for epoch in range(1, 4):
            assert {int(each) for batch in loader for each in batch} == {epoch}
            write(epoch + 1)
    del sys.modules["scales_of_mine"]


class Naming(Telling):
    def __getitem__(self, index: int) -> Any:
        assert BY_NAME and torch and SCALE and collate and identical and LOCK
        return super().__getitem__(index)


LOCK = threading.Lock()  # a variable that no pickle has


class First:
    def give(self) -> int:
        return 1


class Second:
    def give(self) -> int:
        return 2


class Giving:
    def __init__(self, value: int) -> None:
        self.value = value

    def give(self) -> int:
        return self.value


def with_default(value: int = 1) -> int:
    return value


def closed_over(value: int) -> Any:
    held = {0: value}
    give = lambda: held[0]  # noqa: E731
    give.held = held  # type: ignore[attr-defined]
    return give


FUNCTION: Any = lambda: 1  # noqa: E731
KIND: Any = First
BOUND: Any = Giving(1).give
CLOSED: Any = closed_over(1)


class OfFunction(Telling):
    def __getitem__(self, index: int) -> Any:
        return FUNCTION()


class OfKind(Telling):
    def __getitem__(self, index: int) -> Any:
        return KIND().give()


class OfBound(Telling):
    def __getitem__(self, index: int) -> Any:
        return BOUND()


class OfDefault(Telling):
    def __getitem__(self, index: int) -> Any:
        return with_default()


class OfClosed(Telling):
    def __getitem__(self, index: int) -> Any:
        return CLOSED()


class OfMethod(Telling):
    def give(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self.give()


def _rebind(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(sys.modules[__name__], name, value)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (OfFunction, _rebind("FUNCTION", lambda: 2)),
        (OfKind, _rebind("KIND", Second)),
        (OfKind, lambda patch: patch.setattr(First, "give", Second.give)),
        (OfBound, _rebind("BOUND", Giving(2).give)),
        (OfBound, lambda patch: patch.setattr(BOUND.__self__, "value", 2)),
        (OfDefault, lambda patch: patch.setattr(with_default, "__defaults__", (2,))),
        (OfClosed, _rebind("CLOSED", closed_over(2))),
        (OfClosed, lambda patch: patch.setitem(CLOSED.held, 0, 2)),
        (OfMethod, lambda patch: patch.setattr(OfMethod, "give", lambda self: 2)),
    ],
)
def test_no_epoch_mixes_functions_of_then_and_now(
    kind: Any, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loader(kind(), 4) as loader:
        assert loader.plan.kept
        assert {int(each) for batch in loader for each in batch} == {1}
        change(monkeypatch)
        assert {int(each) for batch in loader for each in batch} == {2}


def test_variables_that_stay_as_they_are_end_no_workers() -> None:
    with Loader(Naming(), 4) as loader:
        assert len({pid for _ in range(3) for pid in pids(loader)} - {os.getpid()}) == 2


def test_a_data_set_that_cannot_be_compared_gets_new_workers_each_epoch() -> None:
    dataset = Telling()
    dataset.more.append(lambda: None)
    with Loader(dataset, 4) as loader:
        assert not set(pids(loader)[1:]) & set(pids(loader)[1:])


def test_files_that_samples_leave_open_mean_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = replace(COST, opens=True)
    monkeypatch.setattr(sizing_module, "measure_apart", lambda *_, **__: opens)
    with Loader(Telling(), 4) as loader:
        assert os.getpid() not in pids(loader)


def test_a_data_set_that_cannot_be_sent_to_processes_is_fed_inline() -> None:
    class Local(kinds.Plain):
        pass

    with Loader(Local(40), 4, multiprocessing_context="spawn", shuffle=True) as loader:
        expected = list(Loader(Local(40), 4, plan="inline", shuffle=True))
        assert identical(list(loader), expected)
        assert loader.plan.name == "inline"
        assert "cannot be sent to worker processes" in str(loader.plan)


# A change of plan ------------------------------------------------------------------------------


class Numbering(Telling):
    """Tells by how many workers each sample believes to be made, too."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return *super().__getitem__(index), 0 if info is None else info.num_workers


def change(loader: Loader, workers: int, each: int = 2) -> None:
    """Have it changed at the next batch, as if waiting had asked for it."""
    feed = loader._feeds._feed(None)
    plan = feed.executor.plan
    feed.wanted = replace(plan, workers=workers, prefetch_batches=each * workers)


def until(iterator: Any, count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def makers(batches: list[Any]) -> set[int]:
    return {batch[2][0].item() for batch in batches} - {os.getpid()}


@pytest.mark.parametrize(("first", "then", "each"), [(2, 4, 2), (4, 1, 2), (2, 2, 6), (3, 2, 4)])
def test_workers_that_run_stay_where_their_number_changes(
    first: int, then: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cores", lambda: first)
    expected = [batch[:2] for batch in Loader(Numbering(200), 4, True, plan="inline")]
    with Loader(Numbering(200), 4, True) as loader:
        iterator = iter(loader)
        before = until(iterator, 15)
        change(loader, then, each)
        after = list(iterator)
        assert identical([batch[:2] for batch in before + after], expected)
        old, new = makers(before), makers(after[2 * first :])
        assert (len(old), len(new)) == (first, then)
        assert old <= new or new <= old, "only the difference was started, or ended"
        assert {batch[4][0].item() for batch in after[2 * first + 1 :]} - {0} == {then}
        assert len(multiprocessing.active_children()) == then
        loader.set_epoch(0)
        again = list(loader)
        assert identical([batch[:2] for batch in again], expected)
        assert makers(again) == new


@pytest.mark.parametrize("when", ["before", "after", "between epochs"])
@pytest.mark.parametrize("then", [1, 3, 4])
def test_a_worker_that_is_killed_as_their_number_changes(when: str, then: int) -> None:
    expected = [batch[:2] for batch in Loader(Telling(120), 4, True, plan="inline")]

    def kill() -> None:
        child = multiprocessing.active_children()[-1]
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(10)

    with Loader(Telling(120), 4, True) as loader:
        iterator = iter(loader)
        found = until(iterator, 12)
        if when == "before":
            kill()
        change(loader, then)
        found += until(iterator, 7)
        if when == "after":
            kill()
        found += list(iterator)
        assert identical([batch[:2] for batch in found], expected)
        if when == "between epochs":
            kill()
        loader.set_epoch(0)
        assert identical([batch[:2] for batch in loader], expected)
        assert len(multiprocessing.active_children()) == then


def test_workers_of_a_large_data_set_stay_for_the_rest_of_the_epoch_alone() -> None:
    dataset = Telling(80)
    dataset.more.append(lambda: None)  # what it is cannot be compared
    with Loader(dataset, 4) as loader:
        iterator = iter(loader)
        before = until(iterator, 8)
        change(loader, 3)
        after = list(iterator)
        assert makers(before) < makers(after)
        assert not multiprocessing.active_children()
        assert not makers(list(loader)) & makers(after), "it may be another one by now"


def test_a_change_after_the_last_indices_were_given_out_keeps_none_for_the_next_epoch() -> None:
    dataset = Telling(80)
    dataset.more.append(lambda: None)
    with Loader(dataset, 4) as loader:
        iterator = iter(loader)
        before = until(iterator, 18)
        change(loader, 3)
        after = list(iterator)
        assert len(before + after) == 20
        assert not multiprocessing.active_children()


def test_workers_begin_anew_where_the_data_set_has_changed_meanwhile() -> None:
    dataset = Telling(80)
    with Loader(dataset, 4) as loader:
        iterator = iter(loader)
        before = until(iterator, 8)
        dataset.table[1] = 5
        change(loader, 3)
        after = list(iterator)
        assert len(makers(after) - makers(before)) == 3


def test_a_pool_that_another_thread_has_closed_starts_no_more() -> None:
    with Loader(Telling(40), 4) as loader:
        list(loader)
        pool = loader._feeds._feed(None).executor._source._lasting
        pool.close()
        with pytest.raises(DataError, match="were ended, by another thread"):
            pool.resize(3, 2)
        assert not multiprocessing.active_children()


def test_fingerprints() -> None:
    same = [
        (torch.arange(5), torch.arange(5)),
        ({"a": np.ones(3), "b": [1, "x"]}, {"a": np.ones(3), "b": [1, "x"]}),
        (Telling(), Telling()),
        (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(2, 3).t()),
    ]
    for a, b in same:
        assert fingerprint(a) == fingerprint(b) is not None
    other = [
        (torch.arange(5), torch.arange(5).int()),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (np.zeros(3), np.array([0.0, 0.0, -0.0])),
        ([1], [1.0]),
        (Telling(40), Telling(41)),
    ]
    for a, b in other:
        assert fingerprint(a) != fingerprint(b)
    for untold in (lambda: 0, (n for n in ()), torch.zeros(1 << 23), open(__file__)):  # noqa: SIM115, PTH123
        assert fingerprint(untold) is None
        if hasattr(untold, "close"):
            untold.close()


class Locking(Telling):
    """Its class holds what cannot be pickled."""

    lock = threading.Lock()
    named: dict[str, Any] = {"same": lambda index: index}  # noqa: RUF012


def test_what_a_class_holds_and_cannot_be_pickled_is_looked_at() -> None:
    before = fingerprint(Locking())
    assert before is not None
    assert fingerprint(Locking()) == before
    same = Locking.named["same"]
    Locking.named["same"] = lambda index: index + 1
    assert fingerprint(Locking()) not in (None, before)
    Locking.named["same"] = same
    assert fingerprint(Locking()) == before
