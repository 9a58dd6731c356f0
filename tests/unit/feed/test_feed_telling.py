"""The line that says a plan and why: who sees it, and how often."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.devices.launchers import is_first
from hasten.feed import Loader, telling

TENSORS = TensorDataset(torch.arange(100.0))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(telling, "_told", set())
    found = Terminal()
    monkeypatch.setattr(telling, "sys", SimpleNamespace(stderr=found, modules=sys.modules))
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.WARNING)  # pytest may have been told otherwise
    yield found
    root.setLevel(before)


def made(taken: bool) -> Loader:
    return Loader.from_dataloader(DataLoader(TENSORS, 10)) if taken else Loader(TENSORS, 10)


@pytest.mark.parametrize("taken", [False, True])
def test_it_is_said_once_when_batches_are_first_made(taken: bool, terminal: Terminal) -> None:
    loader = made(taken)
    assert loader.plan.name == "gather" and "gather" in loader.explain()
    assert terminal.lines == [], "who asks for it has it"
    for _ in range(3):
        assert len(list(loader)) == 10
    assert len(list(made(taken))) == 10
    [line] = terminal.lines
    assert line.startswith("feed: gather, 1 thread - 100 samples in memory, ")


def test_another_kind_is_said_too(terminal: Terminal) -> None:
    list(Loader(TENSORS, 10))
    list(Loader(TENSORS, 10, plan="inline"))
    list(Loader([1, 2, 3], 2, plan="inline"))
    assert [line.split(" - ")[0] for line in terminal.lines] == [
        "feed: gather, 1 thread",
        "feed: inline",
        "feed: inline",
    ]


def test_no_file_pipe_or_test_gets_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telling, "_told", set())
    list(Loader(TENSORS, 10))
    assert capfd.readouterr() == ("", "")


def test_a_program_without_stderr_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_told", set())
    monkeypatch.setattr(sys, "stderr", None)
    assert len(list(Loader(TENSORS, 10))) == 10


@pytest.mark.parametrize(
    "name", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"]
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_rank_says_it_for_all(
    name: str, rank: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_first({name: rank}) == (rank == "0")
    monkeypatch.setenv(name, rank)
    list(Loader(TENSORS, 10))
    assert len(terminal.lines) == (rank == "0")
    monkeypatch.undo()


def test_worker_processes_do_not(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    list(Loader(TENSORS, 10))
    assert terminal.lines == []


def test_where_logging_says_it_it_is_not_said_twice(
    terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        list(Loader(TENSORS, 10))
    assert any(message.startswith("feed: gather") for message in caplog.messages)
    assert terminal.lines == []


def test_it_can_be_turned_off(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hasten.feed"):
        list(Loader(TENSORS, 10))
    assert terminal.lines == []


def test_a_simulated_device_s_plan_is_not_this_machine_s(terminal: Terminal) -> None:
    with hasten.simulate():
        list(Loader(TENSORS, 10).to("cuda"))
    assert terminal.lines == []
    list(Loader(TENSORS, 10))
    assert len(terminal.lines) == 1


@pytest.mark.parametrize("taken", [False, True])
def test_a_run_tells_of_it_itself(taken: bool, terminal: Terminal) -> None:
    run = hasten.Run(progress="off")
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TENSORS, 10) if taken else Loader(TENSORS, 10)
    for _ in run.epochs(1):
        for (data,) in run.batches(loader):
            model(data[:, None])
    assert run.feed.startswith("gather")
    assert terminal.lines == []


SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from hasten import Loader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((3,), float(index))

if __name__ == "__main__":
    for epoch in range(2):
        with Loader(Rows(), 8, num_workers=2) as loader:
            for _ in loader:
                pass
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_a_plain_script_on_a_terminal_says_it_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ours, theirs = os.openpty()
    try:
        done: Any = subprocess.run(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=theirs, timeout=120
        )
        os.close(theirs)
        theirs = -1
        text = _all_of(ours)
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    assert (done.returncode, done.stdout) == (0, b"")
    [line] = text.splitlines()
    assert line == "feed: processes, 2 processes - num_workers=2 asked for"


def _all_of(terminal: int) -> str:
    found = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # so Linux says that nobody writes there any more
            part = b""
        if not part:
            return found.decode()
        found += part
