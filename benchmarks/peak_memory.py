"""How much memory feeding takes: the most of a contender's process and its children, on Linux.

Each contender runs in a fresh process. What its processes hold is summed up by proportional set
size (a page that several share counts once, between them), every few milliseconds, from the moment
when its data is there and nothing has been fed. Pages of files are left out: a library's are shared
with every other program that has loaded it, and count for more when one of those ends. In the
child, `in_child` waits for the parent.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_EVERY_S = 0.01
_READY, _DONE = "ready", "done"
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def growth_bytes(script: str, *arguments: str) -> int | None:
    """Bytes that a contender takes at most, beyond what its process had before it fed anything.

    Args:
        script: of the benchmark; with these arguments it calls `in_child`.
        arguments: which contender.

    Returns:
        None where the system does not tell.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        return None
    command = [sys.executable, script, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        _wait_for(_READY, child.stdout)
        before = most = _held(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        done = Path(f"/proc/{child.pid}/stat")
        while done.read_text().rpartition(")")[2].split()[0] != "Z":
            most = max(most, _held(child.pid))
            time.sleep(_EVERY_S)
        _wait_for(_DONE, child.stdout)
    return most - before


def add_to(rows: list[dict[str, Any]], script: str, *arguments: str) -> None:
    """Put `memory_bytes` into each row: of the contender with its name. Two are run at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda row: growth_bytes(script, *arguments, row["name"]), rows)
        for row, taken in zip(rows, found, strict=True):
            row["memory_bytes"] = taken


def in_child(epoch: Callable[[], Iterable[Any]], epochs: int = 2) -> None:
    """Feed some epochs, when the parent says so."""
    print(_READY, flush=True)
    sys.stdin.readline()
    for _ in range(epochs):
        for _batch in epoch():
            pass
    print(_DONE, flush=True)


def _wait_for(word: str, lines: Iterable[str]) -> None:
    """Up to that line; what a contender says before it is passed over."""
    if word not in (line.strip() for line in lines):
        raise RuntimeError(f"a contender ended before it was {word}")


def _held(process: int) -> int:
    """Bytes of a process and its children, their children's too.

    One that is forked while this looks would have what it shares counted in its parent as well:
    such a look is thrown away.
    """
    while True:
        tree = _tree(process)
        total = sum(map(_share, tree))
        if _tree(process) == tree:
            return total


def _tree(process: int) -> list[int]:
    found, left = [], [process]
    while left:
        found.append(left.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                left += map(int, task.read_text().split())
            except OSError:  # it has ended meanwhile
                continue
    return found


def _share(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # likewise
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(_COUNTED))
