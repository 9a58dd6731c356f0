"""Messages between this process and a worker, over a pair of sockets; open files may go with them.

Nothing here waits unasked: what there is no room for is kept and written later, what has not come
yet is waited for by a function of the caller's, which may give up.
"""

from __future__ import annotations

import array
import errno
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from hasten.feed.handlers import by_a_handler

_T = TypeVar("_T")

MOST_FILES = 16
"""Open files that may go with a message."""

_HEAD = struct.Struct("!QI")  # bytes of the message, files that go with it
_ROOM = socket.CMSG_SPACE(MOST_FILES * array.array("i").itemsize) if os.name == "posix" else 0
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_TOO_MANY = {errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE} if os.name == "posix" else set()


class ClosedError(Exception):
    """The other end is closed."""


class UnusableError(OSError):
    """This end is closed, or there can be no more open files here."""


class Letter(Protocol):
    """A message, written when its turn comes."""

    def written(self) -> tuple[bytes, list[int]]:
        """It, and the descriptors that go with it. Called again if those could not."""

    def without_files(self) -> None:
        """The system lets no more files travel: from here on it is to do without."""

    def gone(self) -> None:
        """It is on its way."""


class Plain:
    """A message of bytes alone."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def written(self) -> tuple[bytes, list[int]]:
        """See `Letter`."""
        return self._message, []

    def without_files(self) -> None:
        """See `Letter`."""

    def gone(self) -> None:
        """See `Letter`."""


class Channel:
    """One end of a pair; each end is for one process, and one thread to read from it."""

    def __init__(self, end: socket.socket) -> None:
        """Its `end` is not to be used by others."""
        end.setblocking(False)
        self._end = end
        self._writing = threading.RLock()  # by whoever has a letter, and whoever closes it
        self._letters: deque[Letter] = deque()
        self._rest = memoryview(b"")  # of a message that is half written
        self._head = bytearray()
        self._files: list[int] = []
        self._body: bytearray | None = None
        self._filled = 0

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two ends."""
        here, there = socket.socketpair()
        return cls(here), cls(there)

    def __reduce__(self) -> tuple[Any, ...]:
        """To a process that is being started."""
        return Channel, (self._end,)

    def fileno(self) -> int:
        """-1 when closed."""
        return self._end.fileno()

    @property
    def closed(self) -> bool:
        """Here."""
        return self._end.fileno() < 0

    def close(self) -> None:
        """Close this end, and what came with half a message."""
        # Not `_writing`, which in a fork nobody may let go of.
        self._end.close()
        self._letters.clear()
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []

    def post(self, letter: Letter) -> bool:
        """Send a message as far as there is room now; see `flush`."""
        with self._writing:
            self._letters.append(letter)
            return self.flush()

    def flush(self) -> bool:
        """Go on with what is not written yet; whether nothing is left.

        Raises:
            ClosedError: the other end is closed.
            UnusableError: this one is.
        """
        with self._writing:
            while self._rest or self._letters:
                if not self._rest:
                    if not self._begin(self._letters[0]):
                        return False
                    self._letters.popleft().gone()
                    continue
                count = _done(self._end.send, self._rest)
                if count is None:
                    return False
                self._rest = self._rest[count:]
            return True

    def _begin(self, letter: Letter) -> bool:
        message, files = letter.written()
        head = _HEAD.pack(len(message), len(files))
        if not files:
            count = _done(self._end.send, head + message[: 1 << 16])
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
            try:
                count = _done(self._end.sendmsg, [head, message], [rights])
            except UnusableError as error:
                if error.errno not in _TOO_MANY:
                    raise
                letter.without_files()
                return self._begin(letter)
        if count is None:
            return False
        if count < len(head):
            self._rest = memoryview(head + message)[count:]
        else:
            self._rest = memoryview(message)[count - len(head) :]
        return True

    def receive(self, wait: Callable[[], None]) -> tuple[memoryview, list[int]]:
        """The next message, and the descriptors that came with it, which are the caller's now.

        Args:
            wait: called where nothing is there to be read; it returns when something may be, or
                raises to give up. What has come until then is kept for the next call.

        Raises:
            ClosedError: the other end is closed.
            UnusableError: this one is, or there can be no more open files here.
        """
        while len(self._head) < _HEAD.size:
            part = self._read_head(_HEAD.size - len(self._head))
            if part is None:
                wait()
                continue
            self._head += part
        size, files = _HEAD.unpack(self._head)
        if self._body is None:
            self._body, self._filled = bytearray(size), 0
        view = memoryview(self._body)
        while self._filled < size:
            count = _done(self._end.recv_into, view[self._filled :])
            if count is None:
                wait()
                continue
            if not count:
                raise ClosedError
            self._filled += count
        found, self._files = self._files, []
        self._head, self._body = bytearray(), None
        if len(found) < files:  # the system leaves out those that it has no number for
            for descriptor in found:
                os.close(descriptor)
            raise UnusableError(errno.EMFILE, os.strerror(errno.EMFILE))
        return view, found

    def _read_head(self, size: int) -> bytes | None:
        if not hasattr(self._end, "recvmsg"):
            part: bytes | None = _done(self._end.recv, size)
        else:
            found = _done(self._end.recvmsg, size, _ROOM, _FLAGS)
            if found is None:
                return None
            part, rights, _, _ = found
            for _, kind, data in rights:
                if kind == socket.SCM_RIGHTS:
                    whole = len(data) - len(data) % array.array("i").itemsize
                    self._files += array.array("i", data[:whole])
        if part is not None and not part:
            raise ClosedError
        return part


def _done(call: Callable[..., _T], *arguments: Any) -> _T | None:
    """What a socket's method returns; None where it would have to wait.

    Raises:
        ClosedError: the other end is closed.
        UnusableError: it fails otherwise.
    """
    try:
        return call(*arguments)
    except OSError as error:
        if by_a_handler(error):
            raise
        if isinstance(error, BlockingIOError):
            return None
        if isinstance(error, ConnectionError):
            raise ClosedError from error
        raise UnusableError(error.errno, error.strerror) from error


def ready(
    reading: Iterable[Any], writing: Iterable[Any] = (), timeout_s: float | None = None
) -> list[Any]:
    """Those of these that can be read from or written to, as soon as one can; none in time: []."""
    kind = getattr(selectors, "PollSelector", selectors.SelectSelector)
    with kind() as selector:
        wanted = dict.fromkeys(reading, selectors.EVENT_READ)
        for each in writing:
            wanted[each] = wanted.get(each, 0) | selectors.EVENT_WRITE
        for each, events in wanted.items():
            selector.register(each, events)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


def hung_up(channel: Channel, timeout_s: float) -> bool:
    """Whether the other end is closed, as soon as it is; what has come is left to be read."""
    if not hasattr(select, "poll"):
        time.sleep(timeout_s)
        return False
    poll = select.poll()
    poll.register(channel, 0)
    return bool(poll.poll(1000 * timeout_s))
