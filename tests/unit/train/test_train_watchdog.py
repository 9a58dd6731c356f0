"""A run that hangs is told, with its step, the ranks that have not come and all stacks."""

from __future__ import annotations

import bdb
import json
import os
import signal
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

import warm
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


def hang(watched: Watchdog, clock: Clock, meanwhile: Any = lambda: None) -> str:
    """What is told when nothing happens for 60 s but what is done at each look."""
    for _ in range(10):
        meanwhile()
        text = watched.look()
        if text is not None:
            return text
        clock.now += 7.5
    raise AssertionError("nothing was told")


def resign(folder: Path, rank: int, sign: dict[str, Any]) -> None:
    """Let a process of the test's give a sign of life."""
    sign["life"] += "+"
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"{rank:05d}.json").write_text(json.dumps(sign))


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
        "life": "3", "progress": 0, "excused": False,
    }  # fmt: skip
    (tmp_path / FOLDER / "00002.json").write_text(json.dumps(waiting))
    (tmp_path / FOLDER / "00004.json").write_text('{"beats": "many"')
    assert first.look() is None
    clock.now = 30.0
    text = hang(first, clock, lambda: (other._give_sign(), resign(tmp_path, 2, waiting)))
    assert "Rank 0 of 5 (process" in text
    assert "Rank 1 of 5 (process" in text
    assert "has not come: it is in epoch 2, after step 41. It is at" in text
    assert "Rank 2" not in text
    for rank in (3, 4):
        assert f"Rank {rank} has left no sign of life in {tmp_path / FOLDER}" in text


SIGN = {
    "beats": 7, "where": "after step 7", "waits": True, "does": "It waits in all_reduce.",
    "who": "Rank 9", "life": "1", "progress": 0, "excused": False,
}  # fmt: skip


def two(clock: Clock, folder: Path, rank: int = 0, **options: Any) -> Watchdog:
    made = dog(clock, rank=rank, size=2, folder=folder, **options)
    made.beats = 7
    return made


def test_one_that_was_stopped_is_named_though_it_said_that_it_waits(tmp_path: Path) -> None:
    clock = Clock()
    first = two(clock, tmp_path)
    resign(tmp_path, 1, dict(SIGN))
    text = hang(first, clock)
    assert "Rank 9 gives no sign of life any more: it is stopped or gone" in text
    assert "It was after step 7. It waits in all_reduce." in text
    clock, sign = Clock(), dict(SIGN)
    text = hang(two(clock, tmp_path), clock, lambda: resign(tmp_path, 1, sign))
    assert "All other ranks wait, too." in text


@pytest.mark.parametrize("stopped", [True, False])
def test_the_others_name_the_first(tmp_path: Path, stopped: bool) -> None:
    clock, sign = Clock(), SIGN | {"who": "Rank 0", "waits": False, "does": "It is at x.py:3."}
    second = two(clock, tmp_path, rank=1)
    resign(tmp_path, 0, sign)
    text = hang(second, clock, (lambda: None) if stopped else lambda: resign(tmp_path, 0, sign))
    assert ("Rank 0 gives no sign of life" if stopped else "Rank 0 has not come: it is") in text
    assert "It is at x.py:3." in text


def test_a_checkpoint_that_is_written_is_no_hang(tmp_path: Path) -> None:
    clock, written = Clock(), [0]
    alone = dog(clock, progress=lambda: written[0])
    for _ in range(100):
        written[0] += 1
        clock.now += 7.5
        assert alone.look() is None
    assert "hangs" in hang(alone, clock), "until it stands still"


def test_one_that_goes_is_no_progress(tmp_path: Path) -> None:
    clock, sign = Clock(), dict(SIGN)
    second = two(clock, tmp_path, rank=1)
    resign(tmp_path, 0, sign)
    second.look()
    clock.now = 45.0
    (tmp_path / FOLDER / "00000.json").unlink()
    assert second.look() is None
    clock.now = 60.0
    assert "Rank 0 has left no sign of life" in (second.look() or "")


def test_what_goes_on_in_another_process_is_no_hang(tmp_path: Path) -> None:
    clock, first, second = Clock(), dict(SIGN), dict(SIGN)
    others = [two(clock, tmp_path, rank=1), two(clock, tmp_path)]
    for _ in range(100):
        for number, sign in enumerate((first, second)):
            sign["progress"] += 1
            resign(tmp_path, number, sign)
        clock.now += 7.5
        assert [each.look() for each in others] == [None, None]
    # The third process knows by the first of what goes on in the second.
    middle = two(clock, tmp_path)
    middle.look()
    middle._give_sign()
    assert json.loads((tmp_path / FOLDER / "00000.json").read_text())["progress"] == (
        second["beats"] + second["progress"]
    )


def test_it_ends_no_process_before_the_others_have_told() -> None:
    clock = Clock()
    watched = dog(clock, exits=True)
    assert not watched.to_end
    hang(watched, clock)
    assert not watched.to_end
    clock.now += 15.0
    assert watched.to_end
    watched.beats += 1
    watched.look()
    assert not watched.to_end


def test_the_compiler_is_told_of_and_ends_nothing(tmp_path: Path) -> None:
    clock = Clock()
    watched = two(clock, tmp_path, exits=True)
    sign = SIGN | {"excused": True}

    def compile_fx(act: Any) -> Any:
        return act()

    place = str(Path(torch.__file__).parent / "_inductor" / "compile_fx.py")
    moved = compile_fx.__code__.replace(co_filename=place)
    compile_fx.__code__ = moved
    assert not watchdog._excuse()
    assert compile_fx(watchdog._excuse)
    assert "hangs" in hang(watched, clock)
    clock.now += 100.0
    assert watched.to_end
    resign(tmp_path, 1, sign)  # it compiles there
    watched._read_signs(clock.now)
    assert not watched.to_end


def test_a_debugger_is_no_hang() -> None:
    """Somebody stands at a breakpoint, in this very thread."""
    clock = Clock()
    watched = dog(clock, exits=True)

    def at_breakpoint(act: Any) -> None:
        for _ in range(100):
            clock.now += 7.5
            assert act() is None

    at_breakpoint.__code__ = at_breakpoint.__code__.replace(co_filename=bdb.__file__)
    at_breakpoint(watched.look)
    assert "hangs" in hang(watched, clock), "once it goes on"


def test_time_in_which_it_was_stopped_does_not_count() -> None:
    """SIGSTOP and SIGCONT, as a terminal's Ctrl-Z or a laptop's lid: nothing hangs by it."""
    script = (
        "import sys, threading, time\n"
        "from hasten.train.watchdog import Watchdog\n"
        "dog = Watchdog(after_s=8.0, where=lambda: '', exits=True)\n"
        "with dog:\n"
        "    print('in', flush=True)\n"
        "    while not dog._asleep_s:\n"
        "        time.sleep(0.1)\n"
        "    print(dog._told_s, flush=True)\n"
    )
    process = warm.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(9.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "None\n"
    assert process.wait(60) == 0


def test_validation_counts_too(tmp_path: Path) -> None:
    training = trainer()
    training.fit(loader(), loader(), epochs=1)
    assert training.run is not None
    assert training.run._watchdog.beats == 2 * len(loader())


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
    done = warm.run([sys.executable, "-c", script], capture_output=True, text=True)
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
        process = warm.Popen(
            [sys.executable, *launcher, script, str(tmp_path)],
            stdout=stream,
            stderr=stream,
            env=warm.forking_ranks(
                {**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"}
            ),
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
    first = next(p for p in text.split("Rank 0 of 2 (process ") if "has not come" in p)
    assert "It waits for the other ranks in " in first.splitlines()[1]
    absent = next(line for line in first.splitlines() if "has not come" in line)
    assert absent.lstrip().startswith("Rank 1 of 2 (process ")
    assert "in epoch 2, after step " in absent
    assert "rank_hang.py" in absent and "in asleep" in absent


def told_by(rank: int, text: str) -> list[str]:
    return [part for part in text.split(f"Rank {rank} of 2 (process ") if " hangs: " in part]


def named(text: str) -> bool:
    """Whether the first rank has told of the second."""
    return any("has not come" in part and "in asleep" in part for part in told_by(0, text))


def all_told(text: str) -> bool:
    """Whether the second has told of itself, too."""
    own = any("rank_hang.py" in part and "asleep" in part for part in told_by(1, text))
    return own and named(text)
