"""What a worker process runs: jobs come in over its channel, and replies go out."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hasten.feed.channel import Channel, ClosedError, UnusableError, hung_up, ready
from hasten.feed.parcel import Parcel, lend, opened
from hasten.feed.segments import Arena

LOOK_S = 1.0
"""How often it is looked whether a process at the other end is still there."""

GRACE_S = 1.0
"""For a worker to end the batch that it is making, when it is told to stop."""

END = "end"
"""In place of a job."""


@dataclass(frozen=True, slots=True)
class Resized:
    """In place of a job, for workers that stay where their number changes.

    Attributes:
        workers: that there are now.
        spare: segments that each keeps for use again.
    """

    workers: int
    spare: int


class Work(Protocol):
    """What a worker does; sent to it once."""

    def start(self, worker: int) -> None:
        """Called first, in the worker. It keeps what goes wrong for `run` to tell."""

    def run(self, job: Any) -> Any:
        """One job's reply."""

    def failed(self, job: Any, error: Exception) -> Any:
        """The reply in place of one that cannot be sent."""

    def left(self, job: Any, error: BaseException) -> Any:
        """The reply where the data set's code raised SystemExit, KeyboardInterrupt or the like."""


@runtime_checkable
class Resizable(Protocol):
    """Work that tells how many workers there are."""

    def resized(self, workers: int) -> None:
        """There are so many now."""


def serve(
    channel: Channel, work: Work, number: int, niceness: int, spare: int, inherited: list[Channel]
) -> None:
    """What a worker process runs.

    Ctrl-C goes to every process of the terminal, but what becomes of the run is for the main one
    to say. A handler of SIGTERM that came with the fork is the main one's too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    for other in inherited:
        other.close()
    own, parent = os.getpid(), os.getppid()
    # Where there can be no more threads, it sees between two batches that the other end is closed.
    with suppress(RuntimeError):
        threading.Thread(target=_end_with, args=(channel, parent), daemon=True).start()
    torch.set_num_threads(1)
    arena = Arena(spare)
    lend(arena)
    send = _Sender(channel)

    def wait() -> None:
        ready([channel])

    try:
        work.start(number)
        while True:
            message, _ = channel.receive(wait)
            back, job = opened(message, (), None)
            del message
            for segment, lost in back:
                arena.released(segment, lost=lost)
            if job == END:
                return
            if isinstance(job, Resized):
                arena.spare = job.spare
                if isinstance(work, Resizable):
                    work.resized(job.workers)
                continue
            try:
                reply = work.run(job)
            except BaseException as error:  # noqa: BLE001 - told by the loop
                # Raised by the data set's own code: no reason for a worker to die unexplained.
                reply = work.left(job, error)
            if os.getpid() != own:
                os._exit(0)  # a fork, made by the data set's code, that came back from there
            try:
                parcel = Parcel(reply, arena)
            except Exception as error:  # noqa: BLE001 - told by the loop
                parcel = Parcel(work.failed(job, error), arena)
            del reply
            send(parcel)
    except ClosedError:
        return  # the main process has closed its end


def _end_with(channel: Channel, parent: int) -> None:
    """In a thread, for a worker that is in the middle of a sample (which may never end) when the
    main process is killed, or has closed its end.

    A fork of somebody's may hold that end too; where a server forks workers, it is the parent.
    """
    while os.getppid() == parent and not hung_up(channel, LOOK_S):
        pass
    time.sleep(GRACE_S)  # it may be leaving by itself
    os._exit(1)


class _Sender:
    """Sends what there is room for, the rest by a thread: nobody reads while the loop trains."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, parcel: Parcel) -> None:
        if self._channel.post(parcel):
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there can be no more threads: the next batch has to wait
                self._send()
                return
            self._thread = thread
        self._left.set()

    def _send(self) -> None:
        while not self._channel.flush():
            ready((), [self._channel])

    def _run(self) -> None:
        try:
            while self._left.wait():
                self._left.clear()
                self._send()
        except (ClosedError, UnusableError, ValueError):
            return  # the main process has closed its end; the other thread sees it too
