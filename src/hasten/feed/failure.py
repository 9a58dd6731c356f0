"""What went wrong in a worker process: the original exception on its way to the loop."""

from __future__ import annotations

import io
import os
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import torch

from hasten.errors import DataError
from hasten.feed.describe import ON_HOST, on_device, text_of
from hasten.feed.parcel import OnDeviceError

_MOST_BYTES = 1 << 20  # of an exception that is sent: one may hold a batch
_OWN = str(Path(__file__).parent) + os.sep
_NOTE = "Traceback of the worker (most recent call last):\n"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class RemoteError(Exception):
    """The traceback of a worker process, as text, where its exception could not be sent."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a worker process; crosses to the loop's.

    Attributes:
        message: of the `DataError` that is raised there.
        pickled: its cause; empty where that cannot be sent.
        trace: the worker's traceback without the feed's own frames: a note for the cause, or, where
            that cannot be sent, the whole text of it.
        of_sending: of a batch that only cannot travel between processes, why, in a few words.
    """

    message: str
    pickled: bytes = b""
    trace: str = ""
    of_sending: str = ""

    @classmethod
    def of(cls, message: str, error: BaseException) -> Failure:
        """With this exception as the cause."""
        sent = _sendable(error)
        return cls(message, sent, _trace(error, noted=bool(sent)))

    @classmethod
    def of_batch(cls, error: Exception) -> Failure:
        """Of what a `Maker` raised: a `DataError` already, whose cause is to be this one's."""
        if not isinstance(error, DataError):
            return cls.of(said(error), error)
        cause = error.__cause__
        return cls(said(error)) if cause is None else cls.of(said(error), cause)

    @classmethod
    def of_init(cls, function: Callable[[int], None], worker: int, error: Exception) -> Failure:
        """Of a worker_init_fn that raised."""
        name, kind = getattr(function, "__name__", type(function).__name__), type(error).__name__
        return cls.of(
            f"worker_init_fn {name} raised {kind} in worker {worker}: {text_of(error)}", error
        )

    @classmethod
    def unsendable(cls, error: Exception) -> Failure:
        """Of a batch that cannot travel between processes."""
        if isinstance(error, OnDeviceError):
            return cls(on_device(str(error)), of_sending=f"batches are made on {error}")
        failure = cls.of(
            f"a batch cannot be sent from a worker process ({type(error).__name__}: "
            f"{text_of(error)}); return what can be pickled (tensors, arrays, numbers, text, and "
            "containers of those), or use num_workers=0",
            error,
        )
        return replace(failure, of_sending=f"batches cannot be sent ({type(error).__name__})")

    @classmethod
    def left_by(cls, error: BaseException) -> Failure:
        """Where code of the data set wanted to end the process."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return cls.of(
            f"the data set raised {type(error).__name__} in a worker process (at {frame.filename}:"
            f"{frame.lineno}), which would end it: raise another error there (ValueError, say)",
            error,
        )

    def throw(self) -> NoReturn:
        """Raise it in the loop's process.

        Raises:
            DataError: always, from the original exception, or else from a `RemoteError`.
        """
        raise DataError(self.message) from self._cause()

    def _cause(self) -> BaseException | None:
        if self.pickled:
            try:
                error: BaseException = pickle.loads(self.pickled)
                error.add_note(self.trace)
            except Exception:  # noqa: BLE001 - what only its worker can open is told as text
                return RemoteError(self.trace)
            return error
        return RemoteError(self.trace) if self.trace else None


def said(error: Exception) -> str:
    """An error of a worker process in one line."""
    if isinstance(error, OnDeviceError):
        return on_device(str(error))
    text = text_of(error)
    if not isinstance(error, DataError):
        text = f"{type(error).__name__}: {text}"
    if "Cannot re-initialize" in text:
        text += f". {ON_HOST}"
    return text


# Sending ---------------------------------------------------------------------------------------


def _sendable(error: BaseException) -> bytes:
    """The exception pickled, if what comes out again says the same; else nothing.

    Python makes an exception again by calling its class with `args`, which fails or says something
    else where `__init__` takes others. Then it is made as pickle makes other objects, without it
    (not where its class has a `__reduce__` of its own).
    """
    own = isinstance(type(error).__reduce__, FunctionType)
    for form in (error,) if own else (error, _Uninitialised(error)):
        # Of code that is not ours; told by its text then. Nothing of it may end the worker.
        try:
            file = _Bounded()
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(form)
            pickled = file.getvalue()
            if _alike(pickle.loads(pickled), error):
                return pickled
        except (Exception, SystemExit):  # noqa: BLE001, S112
            continue
    return b""


def _alike(copy: Any, error: BaseException) -> bool:
    if type(copy) is not type(error):
        return False
    copy.add_note("")
    return _ADDRESS.sub("", str(copy)) == _ADDRESS.sub("", str(error))


class _Uninitialised:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        error = self._error
        return _uninitialised, (type(error), error.args, vars(error))


def _uninitialised(kind: type[BaseException], args: Any, state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class _TooLargeError(Exception):
    pass


class _Bounded(io.BytesIO):
    def write(self, content: Any) -> int:
        if self.tell() + memoryview(content).nbytes > _MOST_BYTES:
            raise _TooLargeError
        return super().write(content)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors are copied as a whole before a byte is written, from a device too."""
        if isinstance(value, torch.Tensor):
            whole = value.untyped_storage()
            if value.device.type != "cpu" or whole.nbytes() > _MOST_BYTES:
                raise _TooLargeError
        return NotImplemented


# Text ------------------------------------------------------------------------------------------


def _trace(error: BaseException, *, noted: bool) -> str:
    """Its traceback; of what is said with a note only what is not said with the exception."""
    found = traceback.TracebackException(type(error), error, error.__traceback__)
    parts = [found]
    while parts:
        part = parts.pop()
        part.stack[:] = [f for f in part.stack if not f.filename.startswith(_OWN)] or part.stack[
            -1:
        ]
        below = (part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ()))
        parts += [other for other in below if other is not None]
    behind = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    if noted and behind is None and not getattr(found, "exceptions", None):
        return _NOTE + "".join(found.stack.format()).rstrip()
    return "".join(found.format())
