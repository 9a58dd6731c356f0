"""The progress bar itself, drawn with rich; imported only where a bar is shown."""

from __future__ import annotations

import errno
import io
import math
import sys
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from hasten.observe.progress import EpochState, duration_text, rate_text

_LEAST_BAR = 8
_MOST_BAR = 40


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process here; a training goes on without its reader.
        raise BrokenPipeError(errno.EPIPE, "the reader of the output went away")


class Bar:
    """One line at the bottom of a terminal, redrawn when told to and never by itself."""

    def __init__(self, stream: TextIO, *, forced: bool = False) -> None:
        self._console = _Console(
            file=stream, force_terminal=True if forced else None, force_jupyter=False
        )
        self._line = _Line()
        self._open = False
        # What others print goes above the line, except into a pipe or a file: machines read those.
        self._live = Live(
            self._line,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )

    def open(self) -> None:
        """Take over the terminal's last line."""
        self._live.start()
        self._open = True

    def show(self, state: EpochState) -> None:
        """Draw the state."""
        self._line.state = state
        self._live.refresh()

    def hide(self) -> None:
        """Take the line away until the next :meth:`show`."""
        self._line.state = None
        self._live.refresh()

    def say(self, text: str) -> None:
        """Print text above the line."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Give the last line back and show the cursor."""
        self._line.state = None
        self._live.stop()

    def abandon(self) -> None:
        """Put the standard streams back without writing: nobody reads any more."""
        self._console.file = io.StringIO()
        if self._open:
            self._live.stop()


class _Line:
    """The state as one line that never wraps: the less room, the fewer figures."""

    def __init__(self) -> None:
        self.state: EpochState | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if (state := self.state) is None:
            return
        room = options.max_width - 1  # a full last column makes some terminals wrap
        head = f"{state.label} {state.epoch}/{state.epochs} "
        tail = ""
        for part in _figures(state):
            if len(head) + len(tail) + len(part) + 2 + _LEAST_BAR > room:
                break
            tail += "  " + part
        width = min(room - len(head) - len(tail), _MOST_BAR)
        yield Text(head[:room], style="bold", end="")
        if width >= _LEAST_BAR:
            # Without a known number of batches there is no share to show: an empty bar.
            total = float(state.batches or 1)
            completed = float(state.done if state.batches else 0)
            yield ProgressBar(total=total, completed=min(completed, total), width=width)
        yield Text(tail, end="")


def _figures(state: EpochState) -> list[str]:
    """The figures, the most wanted first."""
    figures = [state.count]
    if math.isfinite(state.images_per_s):
        figures.append(rate_text(state.images_per_s))
    if math.isfinite(state.left_s):
        figures.append(f"{duration_text(state.left_s)} left")
    if state.wait_share is not None:
        figures.append(f"data wait {state.wait_share:.0%}")
    if state.loss is not None:
        figures.append(f"loss {state.loss:.4f}")
    return figures
