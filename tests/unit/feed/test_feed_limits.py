"""Machines that are short of something, for real: cores, processes, files, memory, /dev/shm."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import warm
from hasten.devices import runtime
from hasten.errors import UsageError
from hasten.feed import Loader
from hasten.feed.lateness import Lock

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")

_SCRIPT = """
import json, os, resource, sys, time
import torch
from torch.utils.data import DataLoader
from hasten.devices import runtime
from hasten.errors import HastenError
from hasten.feed import Loader

class Costly:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass
        return torch.full((64, 1024), float(index))  # a batch is 1 MiB

asked = json.loads(sys.argv[1])
{before}
found = []
for taken, options in asked:
    try:
        original = DataLoader(Costly(), 4, **options) if taken else None
        loader = Loader.from_dataloader(original) if taken else Loader(Costly(), 4, **options)
        plans = []
        for _ in range(4):
            given = [int(value) for batch in loader for value in batch[:, 0, 0]]
            assert given == list(range(48)), given
            plans.append(loader.plan.name)
        found.append([plans, loader.plan.workers, loader.plan.reason])
        loader.close()
        del loader
    except HastenError as error:
        found.append(str(error))
memory = runtime.memory(torch.device("cpu"))
print(json.dumps({{"cores": runtime.cores(), "free": memory.free_bytes, "found": found}}))
"""

OWN: tuple[bool, dict[str, Any]] = (False, {})
TWO: tuple[bool, dict[str, Any]] = (False, {"num_workers": 2})
EIGHT: tuple[bool, dict[str, Any]] = (False, {"num_workers": 8})
TAKEN_TWO: tuple[bool, dict[str, Any]] = (True, {"num_workers": 2})


def _run(
    *asked: Any, before: str = "", around: list[str] | None = None, join: Path | None = None
) -> Any:
    """What the script sees: of itself, and [plans, workers, reason] or an error for each asked."""

    def join_group() -> None:
        assert join is not None
        (join / "cgroup.procs").write_text("0")

    command = [sys.executable, "-c", _SCRIPT.format(before=before), json.dumps(asked)]
    how: dict[str, Any] = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 200}
    how |= {"capture_output": True, "text": True}
    if around is not None or join is not None or "RLIMIT_AS" in before:
        started = None if join is None else join_group
        done = subprocess.run([*(around or []), *command], preexec_fn=started, check=False, **how)
    else:
        done = warm.run(command, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _own_group(controller: str) -> Path:
    """The control group of this process, where a group may be made below it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folder = Path("/sys/fs/cgroup", controllers)
        elif not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            folder = Path("/sys/fs/cgroup")
        else:
            continue
        # One that somebody made for this process is his, and so is what lies below it.
        if path == "/" and folder.is_dir():
            return folder
    pytest.skip(f"no group of one's own for {controller}")


@contextmanager
def _group(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A group below this process's own with some limits: those of its files that there are."""
    folder = _own_group(controller) / f"hasten-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    try:
        there = [name for name in limits if (folder / name).exists()]
        if not there:
            pytest.skip(f"{controller} is not given on to groups below")
        for name in there:
            (folder / name).write_text(limits[name])
        yield folder
    finally:
        limit = time.monotonic() + 20
        while (members := (folder / "cgroup.procs").read_text().split()) and (
            time.monotonic() < limit
        ):
            for pid in members:
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        folder.rmdir()


@pytest.mark.parametrize("quota", [0.5, 1.0])
def test_a_cpu_quota_counts_as_cores(quota: float) -> None:
    limit = str(int(quota * 100_000))
    files = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": limit, "cpu.max": f"{limit} 100000"}
    with _group("cpu", files) as group:
        seen = _run(OWN, TWO, TAKEN_TWO, join=group)
    own, two, taken = seen["found"]
    assert seen["cores"] == 1
    assert own[0] == ["inline"] * 4
    assert "and one core" in own[2]
    assert (two[0], two[1]) == (["processes"] * 4, 2)
    assert "more than the 1 core" in two[2]
    assert (taken[0], taken[1]) == (["processes"] * 4, 2)


def test_a_group_without_room_for_processes() -> None:
    with _group("pids", {"pids.max": "3"}) as group:
        own, eight, taken = _run(OWN, EIGHT, (True, {"num_workers": 8}), join=group)["found"]
    assert set(own[0]) <= {"inline", "threads", "processes"}
    for message in (eight, taken):
        assert "no more processes can be started" in message
        assert "pids of the container" in message


def test_one_core() -> None:
    before = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    seen = _run(OWN, TWO, TAKEN_TWO, before=before)
    own, two, taken = seen["found"]
    assert seen["cores"] == 1
    assert own[0] == ["inline"] * 4
    assert [two[1], taken[1]] == [2, 2]


def test_few_open_files() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
    found = _run(OWN, TWO, EIGHT, TAKEN_TWO, before=limit.format(64))["found"]
    assert [each[1] for each in found[1:]] == [2, 8, 2], found
    _, eight, taken = _run(OWN, EIGHT, (True, {"num_workers": 8}), before=limit.format(24))["found"]
    for message in (eight, taken):
        assert "no more processes can be started (Too many open files)" in message
        assert "ulimit -n" in message


def test_little_address_space() -> None:
    """As schedulers set it; where the feed's batches have no room, an error says what to do."""
    before = """
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (200 << 20),) * 2)
"""
    seen = _run(OWN, TWO, TAKEN_TWO, before=before)
    assert seen["free"] <= 208 << 20, "the process may have given some back by then"
    assert [each[1] for each in seen["found"][1:]] == [2, 2]


def test_a_small_dev_shm() -> None:
    """Of 1 MiB, as a container's may be; a batch is as large."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounts are for root")
    mounted = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    around = ["unshare", "-m", "--propagation", "private", "sh", "-c", mounted, "sh"]
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount may be made")
    own, two, taken = _run(OWN, TWO, TAKEN_TWO, around=around)["found"]
    assert isinstance(own, list)
    assert [two[1], taken[1]] == [2, 2]


class Costly(Dataset[Any]):
    """3 ms of computing a sample."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass
        return torch.tensor(index)


class Fetching(Costly):
    def fetch(self, index: int, key: int) -> Any:
        return self[index]


def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.parametrize("dataset", [Costly, Fetching])
@pytest.mark.parametrize("threads", [False, True], ids=["no threads", "threads"])
def test_where_nothing_can_be_started_the_loop_makes_all(
    dataset: type[Costly],
    threads: bool,
    monkeypatch: pytest.MonkeyPatch,
    refuse_forks: Callable[[], None],
) -> None:
    refuse_forks()
    if not threads:
        _no_threads(monkeypatch)
    with Loader(dataset(), 4) as loader:
        for _ in range(10):
            assert [int(value) for batch in loader for value in batch] == list(range(48))
        said = loader.explain()
    for name in ("processes",) if threads else ("processes", "threads"):
        assert said.count(f" to {name},") <= 1, "what could not be started is not tried again"


def test_a_dataloader_taken_over_where_no_process_can_be_started(
    refuse_forks: Callable[[], None],
) -> None:
    wanted = [batch.tolist() for batch in DataLoader(Costly(), 4)]
    refuse_forks()
    with Loader.from_dataloader(DataLoader(Costly(), 4)) as loader:
        assert [batch.tolist() for batch in loader] == wanted
        assert "no more processes can be started" in loader.plan.reason
    asked = Loader.from_dataloader(DataLoader(Costly(), 4), plan="processes")
    with asked, pytest.raises(UsageError, match="no more processes can be started"):
        list(asked)


def test_a_dataloader_taken_over_whose_workers_can_be_started_no_more(
    refuse_forks: Callable[[], None],
) -> None:
    """The trial found room for them, and then it is gone."""

    class Many(Costly):
        def __len__(self) -> int:
            return 400  # an epoch's worth of workers

    with Loader.from_dataloader(DataLoader(Many(), 40)) as loader:
        assert loader.plan.name == "processes"
        refuse_forks()
        given = [int(value) for batch in loader for value in batch]
        assert given == list(range(400))
        assert loader.plan.name == "inline"


@pytest.mark.parametrize("dataset", [Costly, Fetching])
def test_threads_that_were_asked_for_and_cannot_be_started(
    dataset: type[Costly], monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_threads(monkeypatch)
    loader = Loader(dataset(), 4, plan="threads")
    with loader, pytest.raises(UsageError, match="no more threads can be started"):
        list(loader)


def test_workers_do_without_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return chr(97 + index) * 300_000  # more than a socket holds

    main = os.getpid()
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if os.getpid() != main:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Loader(Large(), 2, num_workers=2) as loader:
        batches = []
        for batch in loader:
            time.sleep(0.01)  # so that replies wait for the loop
            batches += batch
    assert [text[0] for text in batches] == [chr(97 + index) for index in range(12)]


def test_the_lock_is_not_watched_where_no_thread_can(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_threads(monkeypatch)
    with Lock() as lock:
        time.sleep(0.01)
    assert lock.free(1.0) is None


@pytest.mark.parametrize(
    ("free_mib", "name"), [(8, "inline"), (4000, "processes")], ids=["short", "enough"]
)
def test_batches_are_made_ahead_only_where_there_is_memory_for_them(
    free_mib: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(Costly):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return torch.rand(1).expand(1 << 18).clone()  # 1 MiB; drawing keeps it from threads

    memory: Callable[..., Any] = runtime.memory

    def little(device: torch.device) -> Any:
        return dataclasses.replace(memory(device), free_bytes=free_mib << 20)

    monkeypatch.setattr(runtime, "memory", little)
    plan = Loader(Wide(), 4).plan
    assert plan.name == name
    assert ("memory has room for no batches ahead" in plan.reason) == (name == "inline")
