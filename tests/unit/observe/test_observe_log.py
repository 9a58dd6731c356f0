from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.errors import HastenError
from hasten.observe.log import NAME, RunLog, read
from hasten.observe.records import AnyRecord, EpochRecord, EventRecord, StepRecord


def step(number: int) -> StepRecord:
    return StepRecord(
        epoch=1, step=number, batch=number, loss=0.5, learning_rate=0.1, images_per_s=9.0,
        seconds=1.5,
    )  # fmt: skip


def epoch(number: int) -> EpochRecord:
    return EpochRecord(
        epoch=1, step=number, loss=1.0, seconds=1.0, images_per_s=1.0, learning_rate=0.1
    )


def test_what_is_appended_is_there_at_once(tmp_path: Path):
    with RunLog(tmp_path) as log:
        log.append(step(1))
        assert read(tmp_path) == [step(1)]
        log.write(epoch(1))
        assert read(tmp_path) == [step(1), epoch(1)]
    with RunLog(tmp_path) as log:
        log.append(step(2))
    assert read(tmp_path) == [step(1), epoch(1), step(2)]


def test_a_folder_without_a_log_has_no_records(tmp_path: Path):
    assert read(tmp_path) == []


def test_a_half_written_last_line_is_passed_over_and_cleared_away(tmp_path: Path):
    with RunLog(tmp_path) as log:
        log.append(step(1))
        log.append(step(2))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-9])
    assert read(tmp_path) == [step(1)]
    with RunLog(tmp_path) as log:
        log.append(step(3))
    assert read(tmp_path) == [step(1), step(3)]


def test_a_log_cut_within_a_character_is_read(tmp_path: Path):
    event = EventRecord(name="x", message="日本")
    with RunLog(tmp_path) as log:
        log.append(step(1))
        log.append(event)
    path = tmp_path / NAME
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex("本".encode()) + 1])
    assert read(tmp_path) == [step(1)]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path):
    (tmp_path / NAME).write_text('{"kind": "step"}\n')
    with pytest.raises(HastenError, match=r"metrics\.jsonl, line 1.*'epoch'"):
        read(tmp_path)


def test_truncate_after_drops_the_steps_that_will_be_done_again(tmp_path: Path):
    event = EventRecord(name="checkpoint", step=9)
    records: list[AnyRecord] = [step(1), step(2), epoch(2), step(3), event, epoch(4)]
    with RunLog(tmp_path) as log:
        for record in records:
            log.append(record)
        log.truncate_after(2)
        assert read(tmp_path) == [step(1), step(2), epoch(2), event]
        log.append(step(3))
    assert read(tmp_path) == [step(1), step(2), epoch(2), event, step(3)]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_truncate_after_keeps_lines_of_kinds_it_does_not_know(tmp_path: Path):
    line = '{"kind": "of the future", "step": 99}\n'
    (tmp_path / NAME).write_text(line)
    with RunLog(tmp_path) as log:
        log.truncate_after(1)
    assert (tmp_path / NAME).read_text() == line


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(HastenError, match=r"gone/metrics\.jsonl"):
        RunLog(tmp_path / "gone")


def test_a_folder_removed_under_the_run_is_said_once(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = RunLog(folder)
    log.append(step(1))
    shutil.rmtree(folder)
    with pytest.raises(HastenError, match="removed or moved while in use"):
        log.append(step(2))
    with pytest.raises(HastenError, match="the log was closed"):
        log.append(step(3))
    log.close()


FULL = """
import resource, signal, sys
from pathlib import Path
from hasten.errors import HastenError
from hasten.observe.log import RunLog
from hasten.observe.records import EventRecord
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
log = RunLog(Path(sys.argv[1]))
try:
    for i in range(100):
        log.append(EventRecord(name="event", message=f"number {i}"))
except HastenError as error:
    print(error)
log.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are of POSIX systems")
def test_a_file_that_can_grow_no_more_is_an_error_and_what_was_written_is_read(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"cannot write {tmp_path / NAME}: File too large" in done.stdout
    assert len(read(tmp_path)) >= 1


KILLED = """
import sys
from pathlib import Path
from hasten.observe.log import RunLog
from hasten.observe.records import EventRecord
log = RunLog(Path(sys.argv[1]))
for i in range(10**9):
    log.append(EventRecord(name="event", step=i))
    if i == 50:
        print("going", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is of POSIX systems")
def test_kill_9_loses_at_most_the_line_being_written(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    records = read(tmp_path)
    assert len(records) >= 51
    assert [r.step for r in records] == list(range(len(records)))
