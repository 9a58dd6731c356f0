"""Odd samples, and code of a data set that wants out: no hang, one message, the same batches."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hasten
import warm
from hasten.devices import runtime
from hasten.errors import DataError, UsageError
from hasten.feed import Loader
from hasten.feed import place as place_module
from hasten.feed.plan import Plan


class Each(Dataset[Any]):
    def __init__(self, function: Callable[[int], Any], count: int = 12) -> None:
        self.function = function
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


class Leaving(Dataset[Any]):
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.kind
        return torch.tensor(index)


class LeavingStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.tensor(0)
        sys.exit(3)


LEAVING = [KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize("kind", LEAVING)
@pytest.mark.parametrize("plan", ["inline", "threads"])
def test_what_ends_a_process_comes_out_of_a_thread_as_of_the_loop(
    kind: type[BaseException], plan: str
) -> None:
    given = []
    with Loader(Leaving(kind), 4, plan=plan) as loader, pytest.raises(kind):
        given.extend(batch.tolist() for batch in loader)
    assert given == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", LEAVING[:2])
def test_in_a_worker_it_is_an_error_of_the_data_set(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(Leaving(kind), 4, num_workers=1)
    with loader, pytest.raises(DataError, match=f"raised {kind.__name__} in a worker .*odd_da"):
        list(loader)
    loader = Loader(LeavingStream(), 1, num_workers=1)
    with loader, pytest.raises(DataError, match="raised SystemExit in a worker process"):
        list(loader)
    taken = Loader.from_dataloader(DataLoader(Leaving(kind), 4, num_workers=1))
    with taken, pytest.raises(DataError, match=f"raised {kind.__name__} in a worker process"):
        list(taken)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("options", [{"plan": "inline"}, {"num_workers": 1}])
def test_an_error_that_cannot_say_what_it_is(options: dict[str, Any]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(index: int) -> Any:
        raise Mute

    with (
        Loader(Each(fail), 4, **options) as loader,
        pytest.raises(DataError, match=r"sample 0 .* raised Mute.*__str__ raised RuntimeError"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (lambda index: {"a": [index, None]}, r"sample 0 has None at \['a'\]\[1\]"),
        (lambda index: {index}, "sample 0 has a set, of which"),
        (lambda index: (index, complex(index)), r"sample 0 has a complex at \[1\]"),
    ],
)
@pytest.mark.parametrize("options", [{"plan": "inline"}, {"num_workers": 1}])
def test_what_no_batch_can_be_made_of_is_named(
    sample: Any, says: str, options: dict[str, Any]
) -> None:
    with Loader(Each(sample), 4, **options) as loader, pytest.raises(DataError, match=says):
        list(loader)


def test_samples_that_cannot_be_stacked_into_shared_memory_come_all_the_same() -> None:
    lazily_negated = torch.ones(12, 3, dtype=torch.complex64).conj().imag
    assert lazily_negated.is_neg()
    dataset = Each(lambda index: lazily_negated[index])
    with Loader(dataset, 5, num_workers=1) as loader:
        ours = list(loader)
    assert all(map(torch.equal, ours, DataLoader(dataset, 5)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_that_drops_a_loader_leaves_its_workers_to_the_parent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Loader(Each(torch.tensor), 4, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                batches.close()  # type: ignore[attr-defined]
                loader.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert [batch.tolist() for batch in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_more_processes(refuse_forks: Callable[[], None]) -> None:
    refuse_forks()
    loader = Loader(Each(torch.tensor), 4, num_workers=2)
    with loader, pytest.raises(UsageError, match=r"no more processes .* 2 workers"):
        list(loader)
    with Loader(Each(torch.tensor), 4) as loader:  # measured here, then
        assert len(list(loader)) == 3


@contextlib.contextmanager
def _files_left(count: int) -> Iterator[None]:
    """No more than so many can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at /proc")
def test_too_many_open_files() -> None:
    with Loader(Each(lambda index: torch.full((99_000,), index), 99), 1, num_workers=1) as loader:
        batches = iter(loader)
        kept = [next(batches)]
        with _files_left(10), pytest.raises(DataError, match="ulimit -n"):
            kept.extend(batches)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at /proc")
@pytest.mark.parametrize(("size", "spare"), [(1, 10), (30_000, 200)])
def test_batches_that_are_kept_are_not_open_files(size: int, spare: int) -> None:
    dataset = Each(lambda index: torch.full((size,), index), 300)
    with Loader(dataset, 1, num_workers=1) as loader:
        batches = iter(loader)
        kept = [next(batches)]
        with _files_left(spare):
            kept.extend(batches)  # DataLoader: "received 0 items of ancdata"
    assert [int(batch[0, 0]) for batch in kept] == list(range(300))


def test_batches_on_their_way_when_a_simulation_ends_are_dropped_quietly() -> None:
    plan = Plan(name="gather", reason="", copied=True, ahead_batches=2)
    with hasten.simulate():
        device = torch.device("cuda", 0)
        host = ((number, torch.ones(1000).pin_memory(), [number]) for number in range(9))
        placed = place_module.Ahead(device).place(host, plan)
        next(placed)
        assert runtime.accelerator() is not None
    placed.close()  # raised "there is no accelerator here"


_UNGUARDED = """
import torch
from hasten.feed import Loader
for batch in Loader(range(12), 4, num_workers=1, multiprocessing_context="spawn"):
    pass
"""


def test_a_script_that_is_imported_anew_by_its_workers_is_told_of_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(_UNGUARDED)
    command = [sys.executable, str(script)]
    done = warm.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "before its first batch" in done.stderr.splitlines()[-1]
    assert '`if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
