"""The end of a process that was one of several: gloo's threads put away what they hold first.

When a collective is done, the thread that did it drops its tensors, and asks for the interpreter's
lock to do so. Where the interpreter ends at that moment it is never given: the thread is ended in
the middle of a destructor, and the whole process by ``terminate called without an active
exception`` and SIGABRT, after all its work was done (PyTorch 2.13).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_PAUSE_S = 0.005
_ENOUGH = 2  # a thread that began to wait for the lock between two pauses is seen after the next
_LONGEST_S = 2.0


def settle(
    tasks: Path = _TASKS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until no thread of gloo's has anything to do.

    In each pause the interpreter's lock is free, and a thread that waits for it gets it; what is
    idle afterwards has dropped its tensors. Where the system shows no threads, one pause it is.

    Args:
        tasks: the folder with this process's threads, as Linux has it.
        sleep: gives up the lock for so many seconds.
        clock: seconds.
    """
    end, idle = clock() + _LONGEST_S, 0
    while idle < _ENOUGH and clock() < end:
        sleep(_PAUSE_S)
        idle = 0 if any(map(_is_busy, tasks.glob("*/stat"))) else idle + 1


def _is_busy(stat: Path) -> bool:
    try:
        text = stat.read_text(encoding="ascii", errors="replace")
    except OSError:  # the thread has ended
        return False
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name == _NAME and rest.split()[0] != "S"
