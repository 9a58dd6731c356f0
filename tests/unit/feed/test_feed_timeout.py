"""`timeout=` limits the wait for a batch under each plan with workers, and says where it cannot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest

import warm
from hasten.errors import DataError
from hasten.feed import Loader


class Hanging(kinds.Fetching):
    """Its sample 6 comes when it is let go."""

    def __init__(self) -> None:
        super().__init__(40)
        self.let_go = threading.Event()

    def fetch(self, index: int, key: int) -> Any:
        if index == 6:
            self.let_go.wait(30)
        return super().fetch(index, key)


class HangingAlone(kinds.Plain):
    """The same for a data set of which only one thread may ask."""

    def __init__(self) -> None:
        super().__init__(40)
        self.let_go = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            self.let_go.wait(30)
        return super().__getitem__(index)


@pytest.fixture(params=["several", "one"])
def dataset(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = Hanging() if request.param == "several" else HangingAlone()
    yield found
    found.let_go.set()  # or its threads would outlive the test


def _loader(dataset: Any, **options: Any) -> Loader:
    many = isinstance(dataset, Hanging)
    return Loader(dataset, 4, plan="threads", num_workers=2 if many else 1, **options)


def test_threads_are_waited_for_no_longer(dataset: Any) -> None:
    found = []
    with pytest.raises(DataError, match=r"no batch came from the thread.* within timeout=0.3 s"):
        for batch in _loader(dataset, timeout=0.3):
            found.append(batch)
    assert len(found) == 1


def test_a_loader_that_was_late_can_be_iterated_again(dataset: Any) -> None:
    loader = _loader(dataset, timeout=0.3)
    with pytest.raises(DataError, match="within timeout"):
        list(loader)
    dataset.let_go.set()
    loader.close()
    assert len(list(loader)) == 10


def test_without_one_they_are_waited_for(dataset: Any) -> None:
    timer = threading.Timer(0.4, dataset.let_go.set)
    timer.start()
    assert len(list(_loader(dataset))) == 10
    timer.join()


def test_a_wait_that_is_long_enough_changes_nothing(dataset: Any) -> None:
    dataset.let_go.set()
    assert kinds.same(list(_loader(dataset, timeout=30)), list(_loader(dataset)))


_SCRIPT = """
import sys, threading
sys.path.insert(0, {folder!r})
import feed_datasets as kinds
from hasten.errors import DataError
from hasten.feed import Loader

class Hanging(kinds.Fetching):
    def fetch(self, index, key):
        threading.Event().wait()

class HangingAlone(kinds.Plain):
    def __getitem__(self, index):
        threading.Event().wait()

for dataset, count in ((Hanging(), 2), (HangingAlone(), 1)):
    try:
        list(Loader(dataset, 4, plan="threads", num_workers=count, timeout=0.2))
    except DataError as error:
        print(error)
"""


def test_threads_that_hang_for_ever_do_not_keep_the_interpreter_from_ending() -> None:
    done = warm.run(
        [sys.executable, "-c", _SCRIPT.format(folder=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("within timeout=0.2 s") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 0}, "timeout=5 limits nothing: the loop's own thread makes"),
        ({"num_workers": 2}, "waited for longer than timeout=5 s is an error"),
        ({"plan": "threads"}, "waited for longer than timeout=5 s is an error"),
    ],
)
def test_explain_says_what_it_limits(options: dict[str, Any], says: str) -> None:
    dataset = kinds.Fetching()
    assert says in Loader(dataset, 4, timeout=5, **options).explain()
    assert "timeout" not in Loader(dataset, 4, **options).explain()
