"""Checkpoints that are written beside training: what is in them, who waits, who is told."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import QUIET, assert_same, loader, mlp, sgd, state, trainer

import hasten
import warm
from hasten.devices import runtime
from hasten.simulate import Hazard
from hasten.train import checkpoint, unpickle
from hasten.train.background import Background
from hasten.train.buffers import HostBuffers


class Held:
    """A writer of checkpoints that writes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, hold: bool = True) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.threads: list[str] = []
        write = checkpoint.write

        def waiting(folder: Path, prepared: checkpoint.Prepared) -> None:
            self.steps.append(prepared.head["step"])
            self.threads.append(threading.current_thread().name)
            self.began.set()
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(60)
            write(folder, prepared)

        monkeypatch.setattr(checkpoint, "write", waiting)
        if not hold:
            self.go.set()


def train(run: hasten.Run, epochs: int, at_step: dict[int, Any]) -> torch.nn.Module:
    model = mlp()
    optimizer = sgd(model.parameters())
    run.prepare(model, optimizer)
    for _ in run.epochs(epochs):
        for data, labels in run.batches(loader()):
            run.backward(torch.nn.functional.cross_entropy(model(data), labels))
            run.step(optimizer)
            at_step.get(run.global_step + 1, lambda: None)()
    return model


def test_training_goes_on_while_a_checkpoint_is_written_of_how_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="never", keep=9)
    kept: list[dict[str, torch.Tensor]] = []

    def save() -> None:
        kept.append(state(run.modules[0]))
        assert run.save(wait=False) == tmp_path / "run" / "checkpoints" / "step-00000002"

    def later() -> None:
        assert held.began.wait(60)
        assert not (tmp_path / "run" / "checkpoints").exists()  # three steps were taken meanwhile
        held.go.set()

    train(run, 1, {2: save, 5: later})
    found = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000002", map_location="cpu")
    assert_same(found.model, kept[0])
    assert held.steps == [2, 5]
    assert held.threads == ["hasten-checkpoint", "MainThread"]


def test_one_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="1 steps", keep=9)

    seen: list[list[int]] = []

    def look() -> None:
        assert held.began.wait(60)
        held.go.wait(0.1)  # time for a second one to begin, were it to
        seen.append(list(held.steps))
        held.go.set()

    looker = threading.Thread(target=look)
    looker.start()
    train(run, 1, {})
    looker.join()
    assert seen == [[1]]
    assert held.steps == [1, 2, 3, 4, 5, 5]  # the last in the epoch and after it
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 5


def test_by_the_clock_a_checkpoint_that_is_due_waits_for_the_disk_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    now = [0.0]

    def clock() -> float:
        now[0] += 100.0
        return now[0]

    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="1 s", keep=9, clock=clock)

    def go() -> None:
        assert held.steps == [1]
        held.go.set()
        assert run.last_good is not None

    train(run, 1, {4: go})
    # Whether the fourth step's is written by the time the fifth is due is the disk's to say; the
    # last comes once more after the epoch then.
    assert held.steps in ([1, 4, 5], [1, 4, 5, 5])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_it_is_written_disturbs_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers that load data are made."""
    held = Held(monkeypatch)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="2 steps", keep=9)
    ended: list[int] = []

    def fork() -> None:
        assert held.began.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads and forks, which is what is tried
            pid = os.fork()
        if pid:
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            held.go.set()
            return
        status = 1
        try:  # it has no writer to wait for, and leaves what is being written alone
            assert run._writer is not None
            assert not run._writer.busy
            run.close()
            status = 0
        finally:
            os._exit(status)

    train(run, 1, {4: fork})
    assert ended == [0]
    folder = tmp_path / "run" / "checkpoints"
    assert [checkpoint.load(path, map_location="cpu").meta["step"] for path in
            sorted(folder.glob("step-*"))] == [2, 4, 5]  # fmt: skip
    assert not (tmp_path / "run" / ".lock").exists()


def test_an_error_waits_for_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    class Fails:
        calls = 0

        def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 4:
                threading.Timer(0.05, held.go.set).start()
                raise ValueError("mine")
            return torch.nn.functional.cross_entropy(outputs, labels)

    training = trainer(loss=Fails(), folder=tmp_path / "run", checkpoint_every="2 steps")
    with pytest.raises(ValueError, match="mine"):
        training.fit(loader(), epochs=1)
    assert checkpoint.find(tmp_path / "run").name == f"step-{held.steps[-1]:08d}"


def test_a_process_that_ends_without_a_word_ends_after_its_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib, torch\n"
        "from hasten.train import checkpoint\n"
        "from hasten.train.background import Background\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "made = checkpoint.prepare(model={'w': torch.ones(9)}, training={}, meta={'step': 1})\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    checkpoint.write(folder / 'step-00000001', made)\n"
        "Background('test').start(work)\n"
        "raise SystemExit(3)\n"
    )
    done = warm.run([sys.executable, "-c", script, str(tmp_path)])
    assert done.returncode == 3
    assert checkpoint.newest(tmp_path)[0] == tmp_path / "step-00000001"


def test_what_nobody_expects_is_raised_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path, prepared: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "write", broken)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="1 steps")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(run, 1, {})
    run.close()


def test_without_memory_for_the_copy_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: HostBuffers, tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    held = Held(monkeypatch)
    monkeypatch.setattr(HostBuffers, "copy", full)
    run = hasten.Run(**QUIET, folder=tmp_path / "run", checkpoint_every="3 steps")
    train(run, 1, {})
    assert held.steps == [3, 5]
    assert set(held.threads) == {"MainThread"}


# --- the buffers -------------------------------------------------------------------------------


def test_buffers_are_used_again() -> None:
    buffers = HostBuffers()
    tensors = [
        torch.randn(4, 3),
        torch.randn(4, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    places = []
    for _ in range(3):
        buffers.begin()
        copies = [buffers.copy(tensor) for tensor in tensors]
        buffers.end()
        buffers.wait()
        assert all(torch.equal(a, b) for a, b in zip(copies, tensors, strict=True))
        assert [c.stride() for c in copies] == [t.stride() for t in tensors]
        places.append({copy.data_ptr() for copy in copies})
        assert len(places[-1]) == 3
        for tensor in tensors:
            tensor.add_(1)
    assert places[0] == places[1] == places[2]
    assert buffers.held_bytes == sum(tensor.nbytes for tensor in tensors)
    buffers.begin()
    buffers.copy(tensors[0])
    buffers.end()
    assert buffers.held_bytes == tensors[0].nbytes, "what is no longer needed is given back"
    buffers.release()
    assert buffers.held_bytes == 0


def test_a_copy_keeps_ties_and_parts_views() -> None:
    buffers = HostBuffers()
    table = torch.randn(100, 10)
    given = {"a": table, "b": table, "part": table[3:5], "turned": table.T, "none": table[:0]}
    copied = unpickle.to_host(given, "model", {}, buffers.copy)
    assert copied["a"] is copied["b"]
    assert copied["part"].untyped_storage().nbytes() == 80
    assert all(torch.equal(copied[name], given[name]) for name in given)
    assert copied["a"].data_ptr() != table.data_ptr()


def test_sparse_and_expanded_tensors_are_copied_too() -> None:
    sparse = torch.eye(4).to_sparse()
    one = torch.ones(1).expand(5)
    copied = unpickle.to_host({"s": sparse, "e": one}, "model", {}, HostBuffers().copy)
    sparse.values().zero_()
    assert torch.equal(copied["s"].to_dense(), torch.eye(4))
    assert torch.equal(copied["e"], torch.ones(5))


def test_work_is_done_in_turn_and_its_error_told_once() -> None:
    background = Background("test")
    order: list[int] = []
    gate = threading.Event()

    def first() -> None:
        assert gate.wait(60)
        order.append(1)
        raise ValueError("mine")

    background.start(first)
    assert background.busy
    assert background.take_error() is None
    gate.set()
    background.wait()
    assert isinstance(background.take_error(), ValueError)
    assert background.take_error() is None
    background.start(lambda: order.append(2))
    background.wait()
    assert order == [1, 2]
    assert not background.busy


def _read_before_it_was_there(simulation: Any) -> list[Hazard]:
    return [event for event in simulation.events if isinstance(event, Hazard)]


def test_from_a_device_a_copy_is_of_how_it_was_when_it_was_queued() -> None:
    with hasten.simulate() as simulation:
        device = runtime.accelerator()
        assert device is not None
        tensor = torch.arange(6.0).to(device)
        buffers = HostBuffers()
        buffers.begin()
        copied = buffers.copy(tensor)
        buffers.end()
        tensor.add_(1)  # comes after the copy on the device's queue
        buffers.wait()
        assert copied.is_pinned()
        assert copied.tolist() == [0, 1, 2, 3, 4, 5]
        assert _read_before_it_was_there(simulation) == []


def test_a_copy_that_is_not_waited_for_is_not_there_yet() -> None:
    """What the test above would catch."""
    with hasten.simulate() as simulation:
        buffers = HostBuffers()
        buffers.begin()
        copied = buffers.copy(torch.arange(6.0).cuda())
        buffers.end()
        copied.tolist()
        assert [h.kind for h in _read_before_it_was_there(simulation)] == ["read-before-sync"]


@pytest.mark.parametrize("background", [True, False])
def test_a_run_s_checkpoint_is_written_of_copies_that_are_there(
    background: bool, tmp_path: Path
) -> None:
    with hasten.simulate() as simulation:
        run = hasten.Run(**QUIET | {"device": "cuda"}, folder=tmp_path / "run")
        train(run, 1, {2: lambda: run.save(wait=not background)})
        kept = state(run.modules[0])
        assert _read_before_it_was_there(simulation) == []
        found = checkpoint.load(checkpoint.find(tmp_path / "run"), map_location="cpu")
        assert_same(found.model, {name: value.cpu() for name, value in kept.items()})
