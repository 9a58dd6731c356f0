"""Live progress for people: a rich bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TextIO

from hasten.errors import HastenError, UsageError
from hasten.observe.records import EpochRecord

Mode = Literal["auto", "bar", "plain", "off"]

_REFRESH_S = 0.2
_HEARTBEAT_S = 30.0
_WINDOW = 32  # refreshes over which the rate is taken: some six seconds
_ENDED = (errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.EBADF)


def epoch_line(record: EpochRecord, epochs: int) -> str:
    """``Epoch [3/10], Loss: 0.2841, val accuracy: 91.20%, 12.3 s, 4,870 images/s``."""
    parts = [f"Epoch [{record.epoch}/{epochs}]", f"Loss: {record.loss:.4f}"]
    if record.val_accuracy is not None:
        parts.append(f"val accuracy: {record.val_accuracy:.2%}")
    digits = 1 if record.seconds >= 0.95 else 2
    parts += [f"{record.seconds:.{digits}f} s", rate_text(record.images_per_s)]
    return ", ".join(parts)


def rate_text(images_per_s: float) -> str:
    """``4,870 images/s``; one decimal below ten; ``? images/s`` where it is not known."""
    if not math.isfinite(images_per_s):
        return "? images/s"
    return f"{images_per_s:,.{0 if images_per_s >= 10 else 1}f} images/s"


def duration_text(seconds: float) -> str:
    """``0:42``, ``12:05``, ``3:20:00``; ``-:--`` where it is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    whole = max(round(seconds), 0)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Progress:
    """Shows how far the run is; no thread of its own.

    Everything is drawn from within :meth:`advance` and :meth:`say`, at most five times a second.
    A reader that goes away (``| head``) ends the output, not the run.

    Args:
        stream: where the text goes; default is standard output at the time of the call.
        mode: ``auto`` is ``bar`` on a terminal that can move its cursor where rich is installed,
            else ``plain``; ``off`` shows nothing, not even :meth:`say`.
        clock: seconds, monotonic.

    Raises:
        UsageError: the mode is unknown, or ``bar`` without rich.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        mode: Mode = "auto",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self.mode: Literal["bar", "plain", "off"] = _resolve(mode, self._stream)
        self._bar: Any = None  # hasten.observe._bar.Bar while shown
        self._state = EpochState()
        self._points: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._next_s = math.inf

    def __enter__(self) -> Self:
        if self.mode == "bar":
            from hasten.observe.bar import Bar

            self._bar = Bar(self._stream, forced=not _is_terminal(self._stream))
            self._draw(self._bar.open)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            self._draw(bar.close)

    def say(self, text: str) -> None:
        """Print lines, above the bar where there is one."""
        if self.mode == "off":
            return
        text = _printable(text, self._stream)
        if self._bar is not None:
            self._draw(self._bar.say, text)
        else:
            self._draw(self._print, text)

    def epoch(
        self,
        epoch: int,
        epochs: int,
        batches: int | None,
        *,
        done: int = 0,
        label: str = "Epoch",
    ) -> None:
        """Begin an epoch, or another pass such as validation.

        Args:
            epoch: counted from 1.
            epochs: of the whole run.
            batches: of this pass; ``None`` if it is not known.
            done: batches done already, where a run goes on in the middle.
            label: the word before the count, such as ``Validate``.
        """
        now = self._clock()
        self._state = EpochState(epoch, epochs, batches, done, label)
        self._points.clear()
        self._points.append((now, done, 0))
        self._next_s = now + (_REFRESH_S if self.mode == "bar" else _HEARTBEAT_S)
        if self._bar is not None:
            self._draw(self._bar.show, self._state)

    def advance(
        self,
        batches: int,
        samples: int,
        loss: float | None = None,
        wait_share: float | None = None,
    ) -> None:
        """Count batches and samples just done; redraws if it is time.

        Args:
            batches: done since the last call.
            samples: in them.
            loss: the newest known, if any.
            wait_share: share of the time spent waiting for data, 0 to 1, if known.
        """
        state = self._state
        state.done += batches
        state.samples += samples
        if loss is not None:
            state.loss = loss
        if wait_share is not None:
            state.wait_share = wait_share
        now = self._clock()
        if now < self._next_s:
            return
        self._measure(now)
        if self._bar is not None:
            self._next_s = now + _REFRESH_S
            self._draw(self._bar.show, state)
        elif self.mode == "plain":
            self._next_s = now + _HEARTBEAT_S
            self._draw(self._print, state.line())
        else:
            self._next_s = math.inf

    def epoch_done(self) -> None:
        """End the epoch: the bar goes, so that what is said next stands alone."""
        self._next_s = math.inf
        if self._bar is not None:
            self._draw(self._bar.hide)

    def _measure(self, now: float) -> None:
        state = self._state
        at, done, samples = self._points[0]
        self._points.append((now, state.done, state.samples))
        if now > at:
            state.images_per_s = (state.samples - samples) / (now - at)
            speed = (state.done - done) / (now - at)
            if state.batches is not None and speed > 0:
                state.left_s = max(state.batches - state.done, 0) / speed

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _draw(self, action: Callable[..., None], *args: Any) -> None:
        if self.mode == "off":
            return
        try:
            action(*args)
        except ValueError:
            if not getattr(self._stream, "closed", False):
                raise
            self._end_of_output()
        except OSError as error:
            if error.errno not in _ENDED:
                _fail(self._stream, error)
            self._end_of_output()

    def _end_of_output(self) -> None:
        self.mode = "off"
        self._bar, bar = None, self._bar
        if bar is not None:
            bar.abandon()
        _discard(self._stream)


class EpochState:
    """What is known of the pass under way; changed in place, for it changes on every call."""

    def __init__(
        self,
        epoch: int = 0,
        epochs: int = 0,
        batches: int | None = None,
        done: int = 0,
        label: str = "Epoch",
    ) -> None:
        self.epoch, self.epochs, self.batches = epoch, epochs, batches
        self.done, self.label = done, label
        self.samples = 0
        self.loss: float | None = None
        self.wait_share: float | None = None
        self.images_per_s = math.nan
        self.left_s = math.nan

    @property
    def count(self) -> str:
        """``12/600``, or ``12`` where the number of batches is not known."""
        return f"{self.done:,}" if self.batches is None else f"{self.done:,}/{self.batches:,}"

    def line(self) -> str:
        """One line of plain text: the heartbeat of a long epoch."""
        parts = [f"{self.label} [{self.epoch}/{self.epochs}]", f"batch {self.count}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        parts.append(rate_text(self.images_per_s))
        if self.wait_share is not None:
            parts.append(f"data wait {self.wait_share:.0%}")
        if math.isfinite(self.left_s):
            parts.append(f"{duration_text(self.left_s)} left")
        return ", ".join(parts)


def _resolve(mode: str, stream: TextIO) -> Literal["bar", "plain", "off"]:
    has_rich = importlib.util.find_spec("rich") is not None
    match mode:
        case "auto":
            capable = os.environ.get("TERM", "") not in ("dumb", "unknown")
            return "bar" if has_rich and capable and _is_terminal(stream) else "plain"
        case "bar":
            if not has_rich:
                raise UsageError(
                    "progress mode 'bar' needs rich, which is not installed: "
                    "pip install rich, or choose 'plain'"
                )
            return "bar"
        case "plain":
            return "plain"
        case "off":
            return "off"
    raise UsageError(f"progress mode {mode!r} is unknown; choose auto, bar, plain or off")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _printable(text: str, stream: TextIO) -> str:
    """The text as the stream can show it: file names may hold anything, control codes too."""
    safe = "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def _discard(stream: TextIO) -> None:
    """Let what is buffered go nowhere, or the interpreter complains of the pipe when it exits."""
    if stream not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _fail(stream: TextIO, error: OSError) -> NoReturn:
    name = getattr(stream, "name", "the output")
    raise HastenError(
        f"cannot write progress to {name}: {error.strerror}; "
        "free some space or send the output elsewhere, then go on with --resume"
    ) from error
