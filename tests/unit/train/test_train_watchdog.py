"""A run that hangs is told, with its step, the ranks that have not come and all stacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train_helpers import Hook, loader, trainer

from hasten.errors import UsageError
from hasten.train import watchdog
from hasten.train.watchdog import FOLDER, Watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def dog(clock: Clock, **options: Any) -> Watchdog:
    made = Watchdog(after_s=60.0, where=lambda: "in epoch 2, after step 41", clock=clock, **options)
    made._watched = threading.get_ident()
    return made


def test_it_is_told_once_and_that_it_goes_on() -> None:
    clock = Clock()
    watched = dog(clock)
    assert watched.look() is None
    for clock.now in (30.0, 59.0):
        assert watched.look() is None
    clock.now = 60.0
    text = watched.look()
    assert text is not None
    assert f"The run (process {os.getpid()}) hangs: no batch has been finished for 60 s" in text
    assert "in epoch 2, after step 41" in text
    assert f"{__file__}" in text, "where it stands, and the stacks"
    assert "test_it_is_told_once_and_that_it_goes_on" in text
    clock.now = 600.0
    assert watched.look() is None
    watched.beats += 1
    text = watched.look()
    assert text is not None
    assert "goes on" in text
    clock.now = 700.0
    assert "hangs" in (watched.look() or "")


def test_each_batch_puts_it_off() -> None:
    clock = Clock()
    watched = dog(clock)
    for clock.now in range(0, 1000, 50):
        watched.beats += 1
        assert watched.look() is None


def frame(file: str, name: str, line: int = 3) -> Any:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_lineno=line)


def test_the_collective_is_named_from_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_folder = str(Path(torch.__file__).parent)
    own = frame("/home/me/train.py", "body", 33)
    library = [
        frame(f"{torch_folder}/distributed/distributed_c10d.py", "all_reduce"),
        frame(f"{torch_folder}/distributed/c10d_logger.py", "wrapper"),
    ]
    assert watchdog._waits([*library, own]) == (
        "It waits for the other ranks in all_reduce at /home/me/train.py:33 in body."
    )
    assert watchdog._waits([frame("/home/me/other.py", "stuck"), own]) == (
        "It is at /home/me/other.py:3 in stuck."
    )
    backward = [frame(f"{torch_folder}/autograd/graph.py", "_engine_run_backward"), own]
    assert "It is at /home/me/train.py:33" in watchdog._waits(backward)
    monkeypatch.setattr(watchdog, "_several", lambda: True)
    assert "waits for the other ranks in the sum of gradients" in watchdog._waits(backward)


def test_the_first_rank_names_those_that_have_not_come(tmp_path: Path) -> None:
    clock = Clock()
    first = dog(clock, rank=0, size=5, folder=tmp_path)
    first.beats = 7
    other = dog(clock, rank=1, size=5, folder=tmp_path)
    other.beats = 6
    other._give_sign()
    waiting = {
        "beats": 7, "where": "after step 7", "waits": True, "does": "It waits.", "who": "Rank 2",
        "time": 0,
    }  # fmt: skip
    (tmp_path / FOLDER / "00002.json").write_text(json.dumps(waiting))
    (tmp_path / FOLDER / "00004.json").write_text('{"beats": "many"')
    assert first.look() is None
    clock.now = 60.0
    text = first.look() or ""
    assert "Rank 0 of 5 (process" in text
    assert "Rank 1 of 5 (process" in text
    assert "has not come: it is in epoch 2, after step 41. It is at" in text
    assert "Rank 2" not in text
    for rank in (3, 4):
        assert f"Rank {rank} has left no sign of life in {tmp_path / FOLDER}" in text


def test_a_run_that_hangs_is_told_while_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, texts = threading.Event(), []

    class Stream:
        def write(self, text: str) -> None:
            # On a busy machine earlier steps may take as long, too: they are told, and go on.
            if "hangs" in text and "in epoch 2" in text:
                texts.append(text)
                told.set()

        def flush(self) -> None:
            return

    def hang() -> None:
        assert told.wait(60)

    monkeypatch.setattr(sys, "stderr", Stream())
    training = trainer(loss=Hook(7, hang), folder=tmp_path / "run", hang_after_s=0.2)
    training.fit(loader(), epochs=2)
    assert "in epoch 2, after step" in texts[0]
    assert "in hang" in texts[0], "the stacks"


def test_it_ends_the_process_only_if_asked() -> None:
    script = (
        "import threading\n"
        "from hasten.train.watchdog import Watchdog\n"
        "with Watchdog(after_s=0.1, where=lambda: 'at step 3', exits=True):\n"
        "    threading.Event().wait(120)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 75
    assert "at step 3" in done.stderr


def test_no_thread_where_it_is_off() -> None:
    before = threading.active_count()
    with Watchdog(after_s=0.0, where=lambda: ""):
        assert threading.active_count() == before
    with Watchdog(after_s=60.0, where=lambda: ""):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "options", [{"hang_after_s": -1.0}, {"hang_after_s": float("nan")},
                {"hang_after_s": 0.0, "hang_exits": True}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="hang_"):
        trainer(**options)


def test_of_two_ranks_the_one_that_hangs_is_named_while_it_does(tmp_path: Path) -> None:
    """A launcher's two processes: the second one sleeps until the first has said so."""
    log = tmp_path / "said.txt"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = str(Path(__file__).with_name("rank_hang.py"))
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *launcher, script, str(tmp_path)],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"},
        )
        try:
            deadline = time.monotonic() + 120
            while not named(log.read_text(errors="replace")):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            (tmp_path / "awake").touch()
            assert process.wait(120) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
    text = log.read_text()
    # A busy machine may be told of sooner; what counts is what is said of this hang.
    first = next(part for part in text.split("Rank 0 of 2 (process ") if named(part))
    assert "It waits for the other ranks in " in first.splitlines()[1]
    absent = next(line for line in first.splitlines() if "has not come" in line)
    assert absent.lstrip().startswith("Rank 1 of 2 (process ")
    assert "after step 9" in absent
    assert "rank_hang.py" in absent and "in asleep" in absent
    second = text.split("Rank 1 of 2 (process ")
    assert any("hangs" in part and "rank_hang.py" in part and "asleep" in part for part in second)


def named(text: str) -> bool:
    """Whether the first rank has told of the second, and the second of itself."""
    first = [part for part in text.split("Rank 0 of 2 (process ") if " hangs: " in part]
    return any("has not come" in part and "in asleep" in part for part in first)
