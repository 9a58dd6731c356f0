"""What is said of a worker process that has ended."""

from __future__ import annotations

import signal


def obituary(pid: int, exitcode: int | None) -> str:
    """What became of a worker process, and the likely cause."""
    if exitcode is None:
        return f"worker process {pid} closed its channel"
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"worker process {pid} was killed by {name}. {_LIKELY.get(name, _CRASH)}"
    return f"worker process {pid} ended with exit status {exitcode}. {_ENDED}"


NOT_BEGUN = (
    "worker process {} ended before its first batch. Processes that are not forked import the "
    'script anew: put what it does under `if __name__ == "__main__":`, and define data sets and '
    "functions in a file (what is typed into a notebook cannot be imported). What it raised itself "
    "is on stderr"
)
_ENDED = (
    "Likely the data set's code, or a library of it, ended it (os._exit, C's exit): try "
    "num_workers=0 to see where"
)
_CRASH = "Likely native code of the data set crashed: try num_workers=0 to see where"
_LIKELY = {
    "SIGKILL": (
        "Likely the machine, or a container's limit, ran out of memory (see `dmesg`), unless "
        "somebody did it by hand: use fewer workers, a smaller batch or prefetch_factor=1"
    ),
    "SIGBUS": (
        "Likely a file that the data set has mapped was cut short, or /dev/shm, in which its code "
        "shares tensors, is full: give that more (docker run --shm-size=8g)"
    ),
    "SIGTERM": "Somebody, or the machine's scheduler, told it to end",
}
