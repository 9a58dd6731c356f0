"""Worker processes, each with a channel of its own: a death is seen at once, and is nobody else's.

PyTorch's workers share queues: one that is killed while it holds a lock, or half a message in the
pipe, stops all of them, and it takes 5 s to see. Here nothing is shared but the tensors' memory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from hasten.errors import DataError
from hasten.feed.channel import Channel, ClosedError, UnusableError, ready
from hasten.feed.ending import close_at_end
from hasten.feed.forking import REMEDIES, interrupts_held_back, room_for, unwarned
from hasten.feed.handlers import by_a_handler
from hasten.feed.obituary import NOT_BEGUN, obituary
from hasten.feed.openfiles import Forked
from hasten.feed.parcel import Parcel, opened
from hasten.feed.segments import Borrowed
from hasten.feed.serving import END, GRACE_S, LOOK_S, Resizable, Resized, Work, serve

_LEAVING_S = 10.0  # for a process that has closed its end to end, on a busy machine
_ENDED = (
    "the worker processes were ended, by another thread or as the program ends, while a batch was "
    "waited for"
)
_SPARE = 2  # segments that a worker keeps beyond one for each of its jobs


class DiedError(Exception):
    """A worker process is gone. ``str()`` says what became of it, and the likely cause.

    Attributes:
        imported: it had to import the script, and has never answered: no sample is to blame.
    """

    def __init__(self, pid: int, exitcode: int | None, *, imported: bool = False) -> None:
        self.imported = imported
        super().__init__(NOT_BEGUN.format(pid) if imported else obituary(pid, exitcode))


class LateError(Exception):
    """Nothing came in time."""


class Pool:
    """So many processes that do one kind of work. A worker answers its jobs in their order.

    Attributes:
        reply_bytes: of the largest reply so far; 0 before one came.
    """

    def __init__(
        self, count: int, work: Work, *, context: Any, jobs_each: int, niceness: int = 0
    ) -> None:
        """Starts them.

        Args:
            count: processes.
            work: pickled where the start method is not fork.
            context: of multiprocessing, the name of a start method, or None for the usual one.
            jobs_each: most jobs that a worker is sent before its reply is received.
            niceness: what they add to theirs.

        Raises:
            UsageError: there can be no more processes.
        """
        self.reply_bytes = 0
        self._workers: list[_Worker] = []
        self._count = count
        self._closed = False
        self._changing = threading.RLock()
        self._pid = os.getpid()
        close_at_end(self)
        if isinstance(context, str):
            context = torch.multiprocessing.get_context(context)
        self._context: Any = context or torch.multiprocessing
        self._work = work
        self._jobs_each = jobs_each
        self._niceness = niceness
        try:
            for number in range(count):
                self._workers.append(self._started(number))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._count

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [worker.process.pid for worker in self._workers]

    def send(self, number: int, job: Any) -> None:
        """Give a worker a job. One that is dead takes it too: `receive` tells."""
        with self._until_closed(), suppress(ClosedError, UnusableError):
            worker = self._workers[number]
            worker.channel.post(Parcel((worker.borrowed.given_back(), job), None))

    def receive(self, number: int, timeout_s: float | None = None) -> Any:
        """The reply to the oldest job of a worker that is without one.

        Raises:
            DiedError: the worker is gone, and this reply with it.
            LateError: it did not come in time.
            DataError: it could not be opened here, or the pool was closed by another thread.
        """
        with self._until_closed():
            return self._received(self._workers[number], timeout_s)

    def _received(self, worker: _Worker, timeout_s: float | None) -> Any:
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            message, descriptors = worker.channel.receive(lambda: self._wait(worker, limit))
        except ClosedError:
            raise self._death(worker) from None
        except UnusableError as error:
            raise _unopened(worker, error) from error
        worker.begun = True
        try:
            reply = opened(message, descriptors, worker.borrowed)
        except Exception as error:
            if by_a_handler(error):
                raise
            raise _unopened(worker, error) from error
        self.reply_bytes = max(self.reply_bytes, worker.borrowed.opened_bytes)
        return reply

    def _wait(self, worker: _Worker, limit: float | None) -> None:
        """Until a worker has written something, is gone (a ClosedError), or it is too late."""
        while True:
            left_s = LOOK_S
            if limit is not None:
                left_s = min(left_s, limit - time.monotonic())
            # Jobs that there was no room for are written as there is, also those of others.
            late = [w.channel for w in self._workers if not _flushed(w.channel)]
            found = ready([worker.channel, worker.process.sentinel], late, max(0.0, left_s))
            if worker.channel in found:
                return
            # Of a worker that has forked, its fork may hold both open.
            if worker.process.sentinel in found or worker.process.exitcode is not None:
                if ready([worker.channel], timeout_s=0):
                    return
                raise ClosedError
            if limit is not None and time.monotonic() >= limit:
                raise LateError

    def replace(self, number: int) -> None:
        """Start a new process in place of one that died; it has none of the jobs.

        Raises:
            UsageError: there can be no more processes.
        """
        with self._until_closed(), self._changing, interrupts_held_back():
            self._end(self._workers[number])
            self._workers[number] = self._started(number)

    def resize(self, count: int, jobs_each: int) -> None:
        """Have so many, none of which has a job: those that are there stay, as far as they may."""
        if (count, jobs_each) == (self._count, self._jobs_each):
            return
        with self._until_closed(), self._changing:
            if self._closed:
                raise DataError(_ENDED)
            more = self._workers[count:]
            del self._workers[count:]
            with interrupts_held_back():
                self._let_go(more)
            self._count, self._jobs_each = count, jobs_each
            if isinstance(self._work, Resizable):
                self._work.resized(count)  # for the new ones
            for number in range(len(self._workers)):
                self.send(number, Resized(count, jobs_each + _SPARE))
            while len(self._workers) < count:
                self._workers.append(self._started(len(self._workers)))

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """For the thread that iterates, while another one may close the pool at any moment.

        Raises:
            DataError: it did, whatever went wrong here by that.
        """
        try:
            yield
        except Exception as error:
            if not self._closed or by_a_handler(error):
                raise
            raise DataError(_ENDED) from None

    def close(self) -> None:
        """End all of them: those in the middle of a job get a second for it.

        In a fork of the process that started them, only the fork's ends of their pipes.
        """
        self._closed = True
        if not self._workers:
            return  # perhaps as the interpreter ends, when little works any more
        if self._pid != os.getpid():
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.channel.close()
            return
        # Half closed, it could not be closed again.
        with self._changing, interrupts_held_back():
            workers, self._workers = self._workers, []
            self._let_go(workers)

    def _let_go(self, workers: list[_Worker]) -> None:
        for worker in workers:
            # A process that somebody else forked may hold a copy of this end: closing it
            # would tell the worker nothing.
            with suppress(ClosedError, UnusableError):
                worker.channel.post(Parcel(((), END), None))
            worker.channel.close()
        limit = time.monotonic() + GRACE_S
        for worker in workers:
            worker.process.join(max(0.0, limit - time.monotonic()))
        for worker in workers:
            self._end(worker)

    def __del__(self) -> None:
        if self._pid == os.getpid():  # not in a fork, whose brothers they are
            self.close()

    def _started(self, number: int) -> _Worker:
        with room_for("processes", self._count):
            mine, theirs = Channel.pair()
        _mine.add(mine)
        forked = self._context.get_start_method() == "fork"
        if forked and isinstance(self._work, Forked):
            self._work.about_to_fork()
        process = self._context.Process(
            target=serve,
            args=(
                theirs,
                self._work,
                number,
                self._niceness,
                self._jobs_each + _SPARE,
                # A forked child holds all that is open here. An end that it kept would hide from
                # the other workers that this process has closed it, or has ended.
                [end for end in _mine if not end.closed] if forked else [],
            ),
            name=f"hasten-feed-{number}",
            daemon=True,
        )
        worker = _Worker(process, mine)
        try:
            with room_for("processes", self._count), interrupts_held_back(), unwarned():
                process.start()
        except BaseException:  # an interrupt that was held back comes when it has started
            mine.close()
            if process.pid is not None:
                self._end(worker)
            raise
        finally:
            theirs.close()
        return worker

    def _death(self, worker: _Worker) -> DiedError:
        worker.process.join(_LEAVING_S)  # its exit status may take a moment
        exitcode = worker.process.exitcode
        forked = self._context.get_start_method() == "fork"
        imported = exitcode == 1 and not forked and not worker.begun  # 1: an error got out
        return DiedError(worker.process.pid, exitcode, imported=imported)

    @staticmethod
    def _end(worker: _Worker) -> None:
        worker.channel.close()
        process = worker.process
        for end in (process.terminate, process.kill):
            if process.exitcode is None:
                end()
                process.join(GRACE_S)
        if process.exitcode is not None:
            _unlink_memory(process.pid)
            process.close()


class _Worker:
    def __init__(self, process: Any, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.borrowed = Borrowed()
        self.begun = False


_mine: weakref.WeakSet[Channel] = weakref.WeakSet()
"""The main process's ends of all channels, of all pools."""


def _unlink_memory(pid: int) -> None:
    """Remove what a killed process left in /dev/shm, between making a segment and unlinking it.

    Nothing of the feed: the data set's own code may share tensors.
    """
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if sys.platform.startswith("linux") and strategy == "file_descriptor":
        # With the other strategy the names are in use for as long as the tensors are.
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _flushed(channel: Channel) -> bool:
    try:
        return channel.flush()
    except (ClosedError, UnusableError):
        return True  # its worker is gone: told when it is asked for


def _unopened(worker: _Worker, error: Exception) -> DataError:
    kind = "OSError" if isinstance(error, UnusableError) else type(error).__name__
    text = f"a batch from worker process {worker.process.pid} could not be opened: {kind}: {error}"
    remedy = REMEDIES.get(getattr(error, "errno", None) or 0)
    return DataError(f"{text}. {remedy[0].upper()}{remedy[1:]}" if remedy else text)
