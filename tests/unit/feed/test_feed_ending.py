"""Loops in other threads than the main one, as the program ends or somebody closes the Loader."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
from typing import Any

import feed_datasets as kinds
import pytest
from torch.utils.data import DataLoader

import warm
from hasten.errors import DataError
from hasten.feed import Loader
from hasten.feed.apart import measure_apart
from hasten.feed.pool import Pool
from hasten.feed.samples import Maker

_SCRIPT = """
import os, sys, threading, time
import torch
from torch.utils.data import DataLoader
from hasten.feed import Loader

class Slow:
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.0003)
        return torch.full((4,), index).float().mul(2).sum()

class Fetching(Slow):
    def fetch(self, index, key):
        return self[index]

loader = {loader}
batches = {batches}
begun = threading.Event()

def loop():
    for number, _ in enumerate(batches):
        if number == 3:
            begun.set()

threading.Thread(target=loop, daemon=True).start()
assert begun.wait(60)
"""
_LOADERS = {
    "inline": "Loader(Slow(), 4, plan='inline')",
    "beside": "Loader(Slow(), 4, plan='threads')",
    "threads": "Loader(Fetching(), 4, plan='threads')",
    "processes": "Loader(Slow(), 4, plan='processes')",
    "device": "Loader(Slow(), 4, num_workers=2).to('cpu')",
    "taken": "Loader.from_dataloader(DataLoader(Slow(), 4, num_workers=2))",
    "ahead": "Loader.from_dataloader(DataLoader(Slow(), 4), plan='processes')",
}


@pytest.mark.parametrize(
    ("kind", "begun"),
    [*((kind, "there") for kind in _LOADERS), ("inline", "here"), ("taken", "here")],
)
def test_a_daemon_thread_that_iterates_yet_ends_without_a_word(kind: str, begun: str) -> None:
    """`here`: the main thread has begun the iterator, and the thread goes on with it."""
    batches = "iter(loader); next(batches)" if begun == "here" else "loader"
    script = _SCRIPT.format(loader=_LOADERS[kind], batches=batches)
    done = warm.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Answering:
    """Work that is done at once."""

    def start(self, worker: int) -> None: ...

    def run(self, job: Any) -> Any:
        return job

    def failed(self, job: Any, error: Exception) -> Any: ...

    def left(self, job: Any, error: BaseException) -> Any: ...


@pytest.mark.parametrize("step", ["send", "receive", "replace"])
def test_a_pool_that_another_thread_has_closed_says_so_at_every_step(step: str) -> None:
    pool = Pool(2, Answering(), context=None, jobs_each=1)
    pool.send(1, "a job")
    pool.close()
    with pytest.raises(DataError, match="were ended, by another thread"):
        getattr(pool, step)(*{"send": (1, "another")}.get(step, (1,)))
    assert len(pool) == 2, "what is counted by it goes on to that error"
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("taken", [False, True], ids=["own", "taken"])
def test_closing_a_loader_under_a_loop_in_another_thread(taken: bool) -> None:
    for _ in range(5):  # at another moment each time
        original = DataLoader(kinds.Plain(4000), 2, num_workers=2)
        options = {"num_workers": 2, "persistent_workers": True}
        loader = (
            Loader.from_dataloader(original) if taken else Loader(kinds.Plain(4000), 2, **options)
        )
        raised: list[BaseException] = []
        begun = threading.Event()

        def loop(loader: Loader = loader, begun: Any = begun, raised: Any = raised) -> None:
            try:
                for _ in loader:
                    begun.set()
            except BaseException as error:  # noqa: BLE001 - looked at below
                raised.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        assert begun.wait(60)
        loader.close()
        thread.join(60)
        assert not thread.is_alive()
        # ValueError: Python's, where both were in the iterator at the same moment.
        assert all(isinstance(each, DataError | ValueError) for each in raised), raised
        loader.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_starting_processes_warns_of_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later do, in each process that has PyTorch's: nobody asked for the fork."""
    fork, warned = os.fork, []

    def warning() -> int:
        child = fork()
        if child:
            warned.append(child)
            text = f"This process (pid={os.getpid()}) is multi-threaded, use of fork() may lead to"
            warnings.warn(f"{text} deadlocks in the child.", DeprecationWarning, stacklevel=2)
        return child

    monkeypatch.setattr(os, "fork", warning)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Loader(kinds.Plain(), 4, num_workers=2) as loader:
            assert len(list(loader)) == len(loader)
        maker = Maker(kinds.Plain(), None, seed=0, skip_errors=False, batched=True)
        assert measure_apart(maker, 24, 4, clock=time.perf_counter) is not None
        taken = Loader.from_dataloader(DataLoader(kinds.Plain(), 4), plan="processes")
        assert len(list(taken)) == 6
    assert len(warned) >= 4
    assert [str(each.message) for each in seen] == []


def test_warning_filters_are_as_they_were_after_two_threads_started_processes() -> None:
    before = list(warnings.filters)

    def epoch() -> None:
        with Loader(kinds.Plain(), 4, num_workers=2) as loader:
            list(loader)

    threads = [threading.Thread(target=epoch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before
