"""Worker processes, each with a channel of its own: a death is seen at once, and is nobody else's.

PyTorch's workers share queues: one that is killed while it holds a lock, or half a message in the
pipe, stops all of them, and it takes 5 s to see. Here nothing is shared but the tensors' memory.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing

from hasten.errors import DataError
from hasten.feed.channel import Channel, hung_up, ready
from hasten.feed.obituary import NOT_BEGUN, obituary
from hasten.feed.parcel import Parcel, lend, opened
from hasten.feed.segments import Arena, Borrowed

_LOOK_S = 1.0  # how often a worker looks whether the main process is still there
_GRACE_S = 1.0  # for a worker to end the batch that it is making, when it is told to stop
_LEAVING_S = 10.0  # for a process that has closed its end to end, on a busy machine
_END = "end"  # in place of a job
_SPARE = 2  # segments that a worker keeps beyond one for each of its jobs


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


class DiedError(Exception):
    """A worker process is gone. ``str()`` says what became of it, and the likely cause."""

    def __init__(self, pid: int, exitcode: int | None, *, imported: bool = False) -> None:
        """`imported`: it had to import the script, and has never answered."""
        super().__init__(NOT_BEGUN.format(pid) if imported else obituary(pid, exitcode))


class Pool:
    """So many processes that do one kind of work. A worker answers its jobs in their order."""

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
        """
        self._workers: list[_Worker] = []
        self._pid = os.getpid()
        _pools.add(self)
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
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [worker.process.pid for worker in self._workers]

    def send(self, number: int, job: Any) -> None:
        """Give a worker a job. One that is dead takes it too: `receive` tells."""
        worker = self._workers[number]
        with suppress(OSError):  # closed at the other end
            worker.channel.post(Parcel((worker.borrowed.given_back(), job), None))

    def receive(self, number: int, timeout_s: float | None = None) -> Any:
        """The reply to the oldest job of a worker that is without one.

        Raises:
            DiedError: the worker is gone, and this reply with it.
            TimeoutError: it did not come in time.
            DataError: it could not be opened here.
        """
        worker = self._workers[number]
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            message, descriptors = worker.channel.receive(lambda: self._wait(worker, limit))
        except TimeoutError:
            raise
        except (EOFError, ConnectionError):
            raise self._death(worker) from None
        except (OSError, ValueError) as error:
            if worker.channel.closed:
                raise DataError(
                    "the worker processes were ended, by another thread or as the program ends, "
                    "while a batch was waited for"
                ) from None
            raise _unopened(worker, error) from error
        worker.begun = True
        try:
            return opened(message, descriptors, worker.borrowed)
        except Exception as error:
            raise _unopened(worker, error) from error

    def _wait(self, worker: _Worker, limit: float | None) -> None:
        """Until a worker has written something, is gone (an EOFError), or it is too late."""
        while True:
            left_s = _LOOK_S
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
                raise EOFError
            if limit is not None and time.monotonic() >= limit:
                raise TimeoutError

    def replace(self, number: int) -> None:
        """Start a new process in place of one that died; it has none of the jobs."""
        with _interrupts_held_back():
            self._end(self._workers[number])
            self._workers[number] = self._started(number)

    def close(self) -> None:
        """End all of them: those in the middle of a job get a second for it.

        In a fork of the process that started them, only the fork's ends of their pipes.
        """
        if not self._workers:  # perhaps as the interpreter ends, when little works any more
            return
        if self._pid != os.getpid():
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.channel.close()
            return
        with _interrupts_held_back():  # half closed, it could not be closed again
            workers, self._workers = self._workers, []
            for worker in workers:
                # A process that somebody else forked may hold a copy of this end: closing it
                # would tell the worker nothing.
                with suppress(OSError):
                    worker.channel.post(Parcel(((), _END), None))
                worker.channel.close()
            limit = time.monotonic() + _GRACE_S
            for worker in workers:
                worker.process.join(max(0.0, limit - time.monotonic()))
            for worker in workers:
                self._end(worker)

    def __del__(self) -> None:
        if self._pid == os.getpid():  # not in a fork, whose brothers they are
            self.close()

    def _started(self, number: int) -> _Worker:
        mine, theirs = Channel.pair()
        _mine.add(mine)
        forked = self._context.get_start_method() == "fork"
        process = self._context.Process(
            target=_main,
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
            with _interrupts_held_back():
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
                process.join(_GRACE_S)
        if process.exitcode is not None:
            _unlink_memory(process.pid)
            process.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Of what the script's own names still hold, while everything works that it takes to close."""
    for pool in list(_pools):
        pool.close()


class _Worker:
    def __init__(self, process: Any, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.borrowed = Borrowed()
        self.begun = False


_mine: weakref.WeakSet[Channel] = weakref.WeakSet()
"""The main process's ends of all channels, of all pools."""


def _main(
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
            if job == _END:
                return
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
    except (EOFError, ConnectionError):
        return  # the main process has closed its end


def _end_with(channel: Channel, parent: int) -> None:
    """In a thread, for a worker that is in the middle of a sample (which may never end) when the
    main process is killed, or has closed its end.

    A fork of somebody's may hold that end too; where a server forks workers, it is the parent.
    """
    while os.getppid() == parent and not hung_up(channel, _LOOK_S):
        pass
    time.sleep(_GRACE_S)  # it may be leaving by itself
    os._exit(1)


class _Sender:
    """Sends what there is room for, the rest by a thread: nobody reads while the loop trains."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, parcel: Parcel) -> None:
        with self._lock:
            if self._channel.post(parcel):
                return
        self._left.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._left.wait():
                self._left.clear()
                while True:
                    with self._lock:
                        if self._channel.flush():
                            break
                    ready((), [self._channel])
        except (OSError, ValueError):
            return  # the main process has closed its end; the other thread sees it too


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C waits, so that a process forked now does not get it before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    except OSError:
        return True  # its worker is gone: told when it is asked for


def _unopened(worker: _Worker, error: Exception) -> DataError:
    return DataError(
        f"a batch from worker process {worker.process.pid} could not be opened: "
        f"{type(error).__name__}: {error}. Where too many files are open, raise `ulimit -n`"
    )
