"""A process that fails where nothing is agreed on: the others end soon, and say which and why."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from test_train_ranks import HERE, launch

from hasten.errors import DataError, HastenError, Interrupted
from hasten.train import failing
from hasten.train.world import ElsewhereError


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two processes said on standard error, at each of their starts."""
    folder = tmp_path_factory.mktemp("failures")
    done = launch("--max-restarts=3", str(HERE / "rank_failures.py"), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in folder.iterdir()) == ["done-0", "done-1"]
    starts = [done.stderr.index(f"start {number}") for number in range(4)]
    ends = [*starts[1:], len(done.stderr)]
    return [done.stderr[start:end] for start, end in zip(starts, ends, strict=True)]


def test_a_sample_that_one_process_cannot_read_is_told_by_the_first_one(told: list[str]) -> None:
    said = [line for line in told[0].splitlines() if "rank 1 failed: " in line]
    assert said and all("the picture is cut off" in line for line in said)
    assert "lost its connection" not in told[0]


def test_an_error_in_ones_own_loop_is_told_too(told: list[str]) -> None:
    assert told[1].count('rank 1 failed: KeyError: "something of one\'s own"') >= 1


def test_an_error_of_all_is_printed_once(told: list[str]) -> None:
    assert told[2].count('KeyError: "something of one\'s own"') == 1
    assert "rank" not in [line.split()[0] for line in told[2].splitlines() if line.strip()]


def test_a_run_that_was_started_again_is_done(told: list[str]) -> None:
    assert "Error" not in told[3]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    made = dist.HashStore()
    monkeypatch.setattr(failing, "_store", lambda: made)
    monkeypatch.setattr(failing, "_WAIT_S", 0.0)
    return made


def test_what_the_first_process_says_the_others_need_not(store: dist.Store) -> None:
    assert failing.found(2) is None
    assert not failing.tell(0, 2, DataError("no such folder"))
    assert failing.tell(1, 2, DataError("no such folder"))
    assert not failing.tell(1, 2, DataError("another folder"))
    assert failing.found(2) == (0, "no such folder")


def test_what_came_of_another_ones_error_is_not_told_on(store: dist.Store) -> None:
    silent = ElsewhereError("rank 1 failed: it is broken")
    silent.silent = True
    assert failing.tell(2, 3, silent)
    assert failing.tell(1, 3, Interrupted("stopped", 15, resumable=True))
    agreed = HastenError("the loss became nan")
    agreed.told = True  # type: ignore[attr-defined]
    assert not failing.tell(1, 3, agreed)
    assert not failing.tell(1, 3, RuntimeError("[gloo/transport/tcp] Connection closed by peer"))
    assert not failing.tell(1, 3, KeyboardInterrupt())
    assert failing.found(3) is None


def test_a_store_that_is_gone_with_its_process_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("broken pipe")

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("broken pipe")

    monkeypatch.setattr(failing, "_store", Gone)
    monkeypatch.setattr(failing, "_WAIT_S", 0.0)
    assert failing.found(2) is None
    assert not failing.tell(1, 2, DataError("no such folder"))


def test_the_hook_is_given_back() -> None:
    before = sys.excepthook
    end = failing.watch(0, 2)
    assert sys.excepthook is not before
    end()
    assert sys.excepthook is before
