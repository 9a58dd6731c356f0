from __future__ import annotations

import errno
import io
import math
import subprocess
import sys

import pytest

from hasten.errors import HastenError, UsageError
from hasten.observe import progress as module
from hasten.observe.progress import Progress, duration_text, epoch_line, rate_text
from hasten.observe.records import EpochRecord


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "25")
    monkeypatch.delenv("NO_COLOR", raising=False)


def record(**changes: float | None) -> EpochRecord:
    values: dict[str, float | None] = {
        "epoch": 3,
        "step": 1,
        "loss": 0.28411,
        "val_accuracy": 0.912,
        "seconds": 12.34,
        "images_per_s": 4870.2,
        "learning_rate": 0.1,
    }
    return EpochRecord(**(values | changes))  # type: ignore[arg-type]


def test_the_epoch_line_is_exactly_the_lessons():
    assert (
        epoch_line(record(), 10)
        == "Epoch [3/10], Loss: 0.2841, val accuracy: 91.20%, 12.3 s, 4,870 images/s"
    )


def test_the_epoch_line_without_validation_and_with_odd_numbers():
    assert epoch_line(record(val_accuracy=None), 3) == (
        "Epoch [3/3], Loss: 0.2841, 12.3 s, 4,870 images/s"
    )
    line = epoch_line(record(loss=math.nan, seconds=0.0421, images_per_s=3.25), 3)
    assert line == "Epoch [3/3], Loss: nan, val accuracy: 91.20%, 0.04 s, 3.2 images/s"


def test_texts_of_rates_and_durations():
    assert rate_text(math.inf) == "? images/s"
    assert [duration_text(s) for s in (0.4, 65, 3600 * 3 + 62, math.nan)] == [
        "0:00", "1:05", "3:01:02", "-:--",
    ]  # fmt: skip


def test_plain_output_is_only_what_is_said():
    stream = io.StringIO()
    with Progress(stream, clock=Clock()) as progress:
        assert progress.mode == "plain"
        progress.say("Using device: cpu")
        progress.epoch(1, 2, 10)
        for _ in range(10):
            progress.advance(1, 4)
        progress.epoch_done()
        progress.say("done")
    assert stream.getvalue() == "Using device: cpu\ndone\n"


def test_a_long_epoch_has_a_heartbeat_in_plain_output():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, clock=clock) as progress:
        progress.epoch(2, 3, 6000)
        for i in range(70):
            clock.now += 1.0
            progress.advance(100, 6400, 0.51234, 0.031 if i > 40 else None)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "Epoch [2/3], batch 3,000/6,000, loss 0.5123, 6,400 images/s, 0:30 left",
        "Epoch [2/3], batch 6,000/6,000, loss 0.5123, 6,400 images/s, data wait 3%, 0:00 left",
    ]


def test_an_unknown_number_of_batches_and_a_resumed_epoch():
    stream, clock = io.StringIO(), Clock()
    with Progress(stream, clock=clock) as progress:
        progress.epoch(1, 1, None, label="Validate")
        clock.now += 40.0
        progress.advance(7, 70)
        progress.epoch(1, 1, 100, done=50)
        clock.now += 40.0
        progress.advance(10, 100)
    assert stream.getvalue().splitlines() == [
        "Validate [1/1], batch 7, 1.8 images/s",
        "Epoch [1/1], batch 60/100, 2.5 images/s, 2:40 left",
    ]


def test_off_shows_nothing():
    stream = Terminal()
    with Progress(stream, mode="off") as progress:
        progress.say("hello")
        progress.epoch(1, 1, 1)
        progress.advance(1, 1)
        progress.epoch_done()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_every_figure(wide_terminal: None):
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock) as progress:
        assert progress.mode == "bar"
        progress.epoch(1, 3, 600)
        clock.now += 1.0
        progress.advance(100, 6400, 0.5, 0.07)
        shown = stream.getvalue()
        progress.epoch_done()
        progress.say("above")
    for part in ("Epoch 1/3", "100/600", "6,400 images/s", "0:05 left", "data wait 7%", "0.5000"):
        assert part in shown
    assert "above\n" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h\r"), "the cursor must be shown again"


def test_the_bar_is_redrawn_at_most_five_times_a_second(wide_terminal: None):
    stream, clock = Terminal(), Clock()
    with Progress(stream, clock=clock) as progress:
        progress.epoch(1, 1, 10_000)
        before = stream.getvalue().count("Epoch 1/1")
        for _ in range(10_000):
            clock.now += 0.001
            progress.advance(1, 1)
        assert 40 <= stream.getvalue().count("Epoch 1/1") - before <= 50


@pytest.mark.parametrize("columns", [1, 12, 20, 40, 80])
def test_the_bar_fits_any_width(wide_terminal: None, monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock=clock)
    with progress:
        progress.epoch(10, 300, 60_000)
        clock.now += 1.0
        stream.truncate(0)
        progress.advance(100, 6400, 0.5, 0.07)
        line = stream.getvalue().replace("\x1b[2K", "").replace("\x1b[1m", "").strip("\r\x00")
    assert len(line.replace("\x1b[0m", "")) <= columns
    assert "\n" not in line


def test_no_color_is_honoured(wide_terminal: None, monkeypatch: pytest.MonkeyPatch):
    def shown() -> str:
        stream, clock = Terminal(), Clock()
        with Progress(stream, clock=clock) as progress:
            progress.epoch(1, 1, 100)
            clock.now += 1.0
            progress.advance(50, 50)
        return stream.getvalue()

    assert "\x1b[3" in shown() or "\x1b[9" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown()
    assert "\x1b[9" not in shown()


def test_a_dumb_terminal_and_a_missing_rich_get_plain_lines(
    wide_terminal: None, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as context:
        context.setenv("TERM", "dumb")
        assert Progress(Terminal()).mode == "plain"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert Progress(Terminal()).mode == "plain"
    with pytest.raises(UsageError, match="pip install rich"):
        Progress(Terminal(), mode="bar")


def test_an_unknown_mode_names_those_there_are():
    with pytest.raises(UsageError, match="auto, bar, plain or off"):
        Progress(io.StringIO(), mode="loud")  # type: ignore[arg-type]


def test_what_the_stream_cannot_show_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    with Progress(stream) as progress:
        progress.say("skipped é日.jpg\x1b[31m\x07 end\n\tnext")
    assert raw.getvalue() == b"skipped \\xe9\\u65e5.jpg\\x1b[31m\\x07 end\n\tnext\n"


def test_what_others_print_goes_above_the_bar_but_a_pipe_is_left_alone(
    wide_terminal: None, monkeypatch: pytest.MonkeyPatch
):
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(terminal) as progress:
        progress.epoch(1, 1, 10)
        print('{"result": 1}')
        print("a warning", file=sys.stderr)
    assert pipe.getvalue() == '{"result": 1}\n'
    assert "\r\x1b[2Ka warning\n" in terminal.getvalue()


def test_markup_in_names_is_text(wide_terminal: None):
    stream = Terminal()
    with Progress(stream) as progress:
        progress.say("skipped [bold]cat[/] :smile: [/nothing].jpg")
    assert "skipped [bold]cat[/] :smile: [/nothing].jpg" in stream.getvalue()


class Broken(Terminal):
    number = errno.EPIPE

    def write(self, text: str) -> int:
        raise OSError(self.number, "broken")


@pytest.mark.parametrize("mode", ["plain", "bar"])
def test_a_reader_that_went_away_ends_the_output_not_the_run(wide_terminal: None, mode: str):
    before = sys.stdout
    with Progress(Broken(), mode=mode) as progress:  # type: ignore[arg-type]
        progress.say("one")
        assert progress.mode == "off"
        progress.epoch(1, 1, 1)
        progress.advance(1, 1)
        progress.say("two")
    assert sys.stdout is before


def test_a_closed_stream_ends_the_output():
    stream = io.StringIO()
    with Progress(stream) as progress:
        stream.close()
        progress.say("one")
        assert progress.mode == "off"


def test_a_full_disk_behind_the_output_is_said():
    stream = Broken()
    stream.number = errno.ENOSPC
    with Progress(stream, mode="plain") as progress, pytest.raises(HastenError, match="free some"):
        progress.say("one")


def test_an_error_inside_gives_the_terminal_back(wide_terminal: None):
    stream = Terminal()
    before = sys.stdout
    with pytest.raises(KeyboardInterrupt), Progress(stream) as progress:
        progress.epoch(1, 1, 1)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h\r")
    assert sys.stdout is before


PIPED = """
from hasten.observe.progress import Progress
with Progress() as progress:
    for i in range(100_000):
        progress.say(f"line {i}")
print("and at the end")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX systems")
def test_head_gets_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-c", PIPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
