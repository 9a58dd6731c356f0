"""Workers are really killed, at many moments: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import feed_datasets as kinds
import pytest
import torch
from feed_datasets import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import warm
from hasten.errors import DataError
from hasten.feed import Loader
from hasten.feed.obituary import obituary
from hasten.feed.pool import Pool

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")


def _kill(which: int, how: int = signal.SIGKILL) -> None:
    """Kill one of the workers, if any is left, and see it dead."""
    children = multiprocessing.active_children()
    if not children:  # what they had sent before they were killed is still to be given
        return
    child = children[which % len(children)]
    assert child.pid is not None
    os.kill(child.pid, how)
    child.join(10)


class Slow(kinds.Drawing):
    """Slow enough for workers to be in the middle of a sample when they are killed."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


class Bulky(kinds.Plain):
    """Samples whose batches fill any pipe: a killed worker leaves half a message."""

    def __getitem__(self, index: int) -> Any:
        return chr(97 + index) * 150_000


class SlowStream(kinds.Stream):
    def __iter__(self) -> Any:
        for sample in super().__iter__():
            time.sleep(0.001)
            yield sample


DATASETS = {"map": Slow(30), "bulky": Bulky(12), "stream": SlowStream(30)}


def _expected(kind: str) -> Any:
    with Loader(DATASETS[kind], 2, num_workers=2, seed=3) as loader:
        return list(loader)


@pytest.mark.parametrize("kind", DATASETS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kills=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    wait_ms=st.integers(0, 8),
    persistent=st.booleans(),
)
def test_killed_at_any_moment(kind: str, kills: list[int], wait_ms: int, persistent: bool) -> None:
    expected = _expected(kind)
    options: Any = {"num_workers": 2, "seed": 3, "persistent_workers": persistent}
    with Loader(DATASETS[kind], 2, **options) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number in kills:
                time.sleep(wait_ms / 1000)
                _kill(number)
        assert same(found, expected)
        loader.set_epoch(0)
        assert same(list(loader), expected), "the next epoch is none the worse"


def test_all_of_them_at_once_before_the_first_batch_is_asked_for_and_after_the_last() -> None:
    expected = _expected("map")
    with Loader(DATASETS["map"], 2, num_workers=2, seed=3, persistent_workers=True) as loader:
        found = list(loader)
        _kill(0)
        _kill(0)
        loader.set_epoch(0)
        assert same(found, expected)
        assert same(list(loader), expected)


def test_after_an_epoch_that_was_left() -> None:
    expected = _expected("map")
    with Loader(DATASETS["map"], 2, num_workers=2, seed=3, persistent_workers=True) as loader:
        next(iter(loader))
        _kill(0)
        loader.set_epoch(0)
        assert same(list(loader), expected)


LIKELY = {"SIGKILL": "out of memory", "SIGTERM": "told it to end", "SIGUSR1": "native code"}


def test_a_bus_error_is_likely_of_memory_that_was_cut_short() -> None:
    said = obituary(7, -signal.SIGBUS)  # not done to a worker, where pytest prints the stacks
    assert said.startswith("worker process 7 was killed by SIGBUS. Likely a file that the data set")
    assert "/dev/shm, in which its code shares tensors, is full" in said


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("how", LIKELY)
def test_it_is_told_with_the_signal_and_the_likely_cause(
    how: str, kind: str, taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "hasten.feed")
    if taken:
        loader = Loader.from_dataloader(DataLoader(DATASETS[kind], 2, num_workers=1))
    else:
        loader = Loader(DATASETS[kind], 2, num_workers=1, seed=3)
    with loader:
        for number, _ in enumerate(loader):
            if number == 4:
                _kill(0, signal.Signals[how])
    (message,) = caplog.messages
    assert f"was killed by {how}" in message
    assert LIKELY[how] in message
    again = "reads its part again" if kind == "stream" else "makes its batches again, from 5 on"
    assert f"A new one {again}" in message


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
def test_a_new_worker_is_started_as_the_first_ones_were(kind: str) -> None:
    with Loader(Slow(30), 2, num_workers=1, seed=3, multiprocessing_context=kind) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch)
            if number == 6:
                _kill(0)
    assert same(found, _expected("map"))


class Suicidal(kinds.Drawing):
    """Dies of sample 8, as often as there are files to take away."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.lives = [folder / str(number) for number in range(times)]
        for life in self.lives:
            life.touch()

    def die(self, index: int) -> None:
        if index == 8:
            for life in self.lives:
                if life.exists():
                    life.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, index: int) -> Any:
        self.die(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_of_a_batch_twice_is_forgiven(tmp_path: Path, workers: int) -> None:
    expected = list(Loader(kinds.Drawing(), 4, plan="inline"))
    with Loader(Suicidal(tmp_path, 2), 4, num_workers=workers) as loader:
        assert same(list(loader), expected)


def test_three_times_at_one_batch_is_the_batch_s_fault(tmp_path: Path) -> None:
    found = []
    said = r"3rd to die at batch 2 .* samples 8, 9, 10, 11: look at sample 8, of which alone"
    with pytest.raises(DataError, match=said):
        for batch in Loader(Suicidal(tmp_path, 9), 4, num_workers=2):
            found.append(batch)
    assert len(found) == 2


class SuicidalStream(kinds.Stream):
    """Dies where its sample 8 was to come, as often as there are files to take away."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__()
        self.suicidal = Suicidal(folder, times)

    def __iter__(self) -> Any:
        for number, sample in enumerate(super().__iter__()):
            self.suicidal.die(number)
            yield sample


@pytest.mark.parametrize("taken", [False, True])
def test_a_stream_s_worker_that_dies_twice_is_forgiven_and_three_times_is_not(
    tmp_path: Path, taken: bool
) -> None:
    def loader(dataset: Any) -> Loader:
        if taken:
            return Loader.from_dataloader(DataLoader(dataset, 4, num_workers=1))
        return Loader(dataset, 4, num_workers=1)

    torch.manual_seed(1)
    with loader(kinds.Stream()) as other:
        expected = list(other)
    torch.manual_seed(1)
    with loader(SuicidalStream(tmp_path, 2)) as stream:
        assert same(list(stream), expected)
    found = []
    with (
        loader(SuicidalStream(tmp_path, 9)) as stream,
        pytest.raises(DataError, match=r"killed by SIGKILL.*It was the 3rd to die at its batch 2"),
    ):
        for batch in stream:
            found.append(batch)
    assert len(found) == 2


def test_a_batch_of_which_no_sample_alone_is_at_fault(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples 8, 9, 10, 11: look at those"):
        list(Loader(Suicidal(tmp_path, 3), 4, num_workers=2))


class Ending(kinds.Plain):
    """Its sample 8 has an end of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            self.end()
        return super().__getitem__(index)

    def end(self) -> None:
        if self.how == "exit status":
            os._exit(7)
        elif self.how == "abort":
            signal.signal(signal.SIGABRT, signal.SIG_DFL)  # pytest's own prints the stacks
            os.abort()
        elif self.how == "segmentation fault":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.how == "base exception":
            raise BaseException("odd")
        elif self.how == "dies with a child":
            if os.fork() == 0:
                time.sleep(20)  # it holds all that its parent held
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit status", r"exit status 7. Likely the data set's code.*look at sample 8"),
        ("abort", r"killed by SIGABRT. Likely native code.*look at sample 8"),
        ("segmentation fault", r"killed by SIGSEGV.*look at sample 8"),
        ("base exception", r"the data set raised BaseException in a worker process"),
        ("dies with a child", r"killed by SIGKILL.*look at sample 8"),
    ],
)
def test_ways_to_end(how: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=says):
        list(Loader(Ending(how), 4, num_workers=2))
    assert "Traceback" not in capfd.readouterr().err


class Forking(kinds.Plain):
    """Comes back twice from each fifth sample, as code that forks and forgets to leave."""

    def __getitem__(self, index: int) -> Any:
        if index % 5 == 0:
            os.fork()
        return super().__getitem__(index)


def test_a_fork_that_comes_back_from_a_sample_is_no_second_worker() -> None:
    with Loader(Forking(60), 4, num_workers=2) as loader:
        assert same(list(loader), list(Loader(kinds.Plain(60), 4, num_workers=0)))


@pytest.mark.parametrize("kind", ["processes", "persistent", "threads", "stream"])
@pytest.mark.parametrize("way", ["two at once", "cycle", "another thread", "fork", "fork iterates"])
def test_nothing_is_left_of(kind: str, way: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": kind == "persistent"}
    dataset: Any = Bulky(12)
    if kind == "threads":
        dataset, options = kinds.Fetching(40), {"plan": "threads"}
    elif kind == "stream":
        dataset = kinds.Stream(40)
    loader = Loader(dataset, 2, **options)
    expected = list(loader)
    loader.close()
    loader.set_epoch(0)
    before = _open()
    WAYS[way](loader, expected)
    loader.close()
    del loader
    gc.collect()
    assert _open() == before
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if t.name.startswith("hasten-feed")]


def _open() -> tuple[int, int]:
    """Files, and pieces of the feed's memory."""
    if not Path("/proc/self/maps").exists():
        return 0, 0
    files = len(list(Path("/proc/self/fd").iterdir()))
    return files, Path("/proc/self/maps").read_text().count("hasten-feed")


def _two_at_once(loader: Loader, expected: list[Any]) -> None:
    first, second = iter(loader), iter(loader)
    for batch in expected[:4]:
        assert same(next(first), batch) and same(next(second), batch)
    del first
    assert same(list(second), expected[4:])


def _cycle(loader: Loader, expected: list[Any]) -> None:
    class Holder:
        pass

    holder: Any = Holder()
    holder.batches, holder.itself = iter(loader), holder
    next(holder.batches)


def _another_thread(loader: Loader, expected: list[Any]) -> None:
    batches: Any = iter(loader)
    next(batches)
    thread = threading.Thread(target=batches.close)
    thread.start()
    thread.join()


def _fork(loader: Loader, expected: list[Any], *, iterates: bool = False) -> None:
    batches: Any = iter(loader)
    found = [next(batches)]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if iterates:
                status = int(not same(next(iter(loader)), expected[0]))
            else:
                batches.close()
                loader.close()
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert same([*found, *batches], expected)


WAYS: dict[str, Any] = {
    "two at once": _two_at_once,
    "cycle": _cycle,
    "another thread": _another_thread,
    "fork": _fork,
    "fork iterates": lambda *both: _fork(*both, iterates=True),
}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("stuck", [False, True])
def test_a_worker_whose_main_process_is_killed_ends_too(method: str, stuck: bool) -> None:
    script = f"""
import sys, time, multiprocessing
sys.path.insert(0, {str(Path(__file__).parent)!r})
import feed_datasets as kinds
from hasten.feed import Loader
dataset = kinds.Stuck() if {stuck} else kinds.Plain(1000)
loader = Loader(dataset, 4, num_workers=2, multiprocessing_context={method!r})
batches = iter(loader)
next(batches)
next(batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        process.kill()
    assert len(pids) == 2
    ended = time.monotonic() + 30
    while any(map(_runs, pids)) and time.monotonic() < ended:
        time.sleep(0.02)
    assert not any(map(_runs, pids))


class Sleeping:
    """Work that takes long."""

    def start(self, worker: int) -> None: ...

    def run(self, job: Any) -> Any:
        time.sleep(60)

    def failed(self, job: Any, error: Exception) -> Any: ...

    def left(self, job: Any, error: BaseException) -> Any: ...


def test_workers_that_another_thread_ends_meanwhile_are_no_riddle() -> None:
    pool = Pool(1, Sleeping(), context=None, jobs_each=1)
    pool.send(0, "a job")
    timer = threading.Timer(0.2, pool.close)
    timer.start()
    with pytest.raises(DataError, match="were ended, by another thread"):
        pool.receive(0)
    timer.join()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_a_killed_worker_left_in_shared_memory_goes() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    left = None
    with Loader(DATASETS["map"], 2, num_workers=1) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                (child,) = multiprocessing.active_children()
                left = Path(f"/dev/shm/torch_{child.pid}_12_0")
                left.touch()  # it dies between making a segment and unlinking it
                _kill(0)
    assert left is not None
    assert not left.exists()


def test_the_generators_of_the_main_process_see_nothing_of_it() -> None:
    torch.manual_seed(5)
    random.seed(6)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(6)
    with Loader(DATASETS["map"], 2, num_workers=2) as loader:
        for number, _ in enumerate(loader):
            if number == 3:
                _kill(0)
    assert same((torch.rand(1), random.random()), expected)
