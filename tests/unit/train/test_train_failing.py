"""A process that fails where nothing is agreed on: the others end soon, and say which and why."""

from __future__ import annotations

import sys

import pytest
import rank_failures
import torch.distributed as dist
from test_train_ranks import HERE, launch

from hasten.errors import DataError, HastenError, Interrupted
from hasten.train import failing
from hasten.train.world import ElsewhereError


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two processes said on standard error, in each case."""
    folder = tmp_path_factory.mktemp("failures")
    restarts = f"--max-restarts={len(rank_failures.CASES) - 1}"
    done = launch(restarts, str(HERE / "rank_failures.py"), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(path.name for path in folder.iterdir()) == ["done-0", "done-1"]
    starts = [done.stderr.index(f"start of {name}") for name in rank_failures.CASES]
    ends = [*starts[1:], len(done.stderr)]
    parts = [done.stderr[start:end] for start, end in zip(starts, ends, strict=True)]
    return dict(zip(rank_failures.CASES, parts, strict=True))


@pytest.mark.parametrize(
    ("case", "word", "place"),
    [
        ("sample", "ValueError: the picture is cut off", "rank_failures.py:"),
        ("one loop", 'KeyError: "something of one\'s own"', "in loop)"),
        ("memory", "out of memory", ""),
        ("backward", "ArithmeticError: no gradient of this", "in backward)"),
        ("validation", "LookupError: a class that nobody knows", "in cannot_validate)"),
        ("collate", "TypeError: samples that do not go together", "collate_fn cut_off raised"),
        ("left out", "extra.weight, extra.bias got no gradient in this step", ""),
    ],
)
def test_what_one_process_fails_with_is_told_by_the_first_one(
    told: dict[str, str], case: str, word: str, place: str
) -> None:
    said = [line for line in told[case].splitlines() if "rank 1 failed: " in line]
    assert said, told[case]
    assert all(word in line and place in line for line in said), said
    assert "lost its connection" not in told[case]


def test_an_error_of_all_is_printed_once(told: dict[str, str]) -> None:
    said = told["both loops"]
    assert said.count('KeyError: "something of one\'s own"') == 1
    assert "rank" not in [line.split()[0] for line in said.splitlines() if line.strip()]


def test_one_that_is_slow_is_no_failure(told: dict[str, str]) -> None:
    assert "Error" not in told["none"]


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
