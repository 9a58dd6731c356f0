"""Every error that hasten raises on purpose, and what each says.

::

    HastenError
    ├── UsageError            the call or the command line asks for what cannot be (exit status 2)
    │   ├── DeviceUnavailable     no such device here; names what there is (also a RuntimeError)
    │   └── UnknownOption         a keyword argument that there is not (also a TypeError)
    ├── DeviceMismatch        tensors of one operation lie on several devices (also a RuntimeError)
    ├── DataError             a data set, file or sample cannot be used (also a ValueError)
    ├── CheckpointError       a checkpoint is missing, broken, unsafe or does not fit
    ├── NonFiniteLoss         the loss became NaN or infinite
    ├── OutOfDeviceMemory     the device's memory does not hold the batch (also a RuntimeError)
    └── Interrupted           a signal asked the run to stop; it saved what it had

A message says what happened and where, then what to do; the command line prints it as it is and
exits with the error's ``exit_status``, without a traceback.
"""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar


class HastenError(Exception):
    """The root. ``str(error)`` is ready to be shown to a person."""

    exit_status: ClassVar[int] = 1


class UsageError(HastenError, ValueError):
    """The call or the command line asks for something that cannot be."""

    exit_status: ClassVar[int] = 2


class DeviceUnavailable(UsageError, RuntimeError):
    """The device asked for is unknown or absent; the message names those that are here."""


class UnknownOption(UsageError, TypeError):
    """A keyword argument that there is not; the message names the one likely meant."""


class DeviceMismatch(HastenError, RuntimeError):
    """Tensors that must meet on one device do not.

    Attributes:
        tensors: path of each tensor (``model.encoder.mask``) to the name of its device (``cpu``).
    """

    def __init__(self, message: str, tensors: dict[str, str]) -> None:
        super().__init__(message)
        self.tensors = tensors


class DataError(HastenError, ValueError):
    """A data set, a file or a sample cannot be used; the message names it."""


class CheckpointError(HastenError):
    """A checkpoint is missing, half written, altered, unsafe to load, or does not fit the model."""


class NonFiniteLoss(HastenError, ArithmeticError):
    """The loss became NaN or infinite.

    Attributes:
        epoch: counted from 1.
        step: optimizer step within the whole run, counted from 1.
        details: what is known of the batch, the learning rate and the last good checkpoint.
    """

    def __init__(self, message: str, *, epoch: int, step: int, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.step = step
        self.details = details


class OutOfDeviceMemory(HastenError, RuntimeError):
    """The device's memory does not hold the model, the batch and the step."""


class Interrupted(HastenError):
    """A signal asked the run to stop; it finished its step and saved.

    Attributes:
        signal_number: the signal (``signal.SIGINT`` for Ctrl-C).
        resumable: whether a checkpoint was saved to go on from.
        exit_status: 75 for a SIGTERM or SIGUSR1, by which a cluster takes a machine back, where
            the run can go on from a checkpoint: BSD's ``EX_TEMPFAIL``, try again later. Else 128
            plus the signal, as shells report it (130 for Ctrl-C).
    """

    def __init__(
        self, message: str, signal_number: int = signal.SIGINT, *, resumable: bool = False
    ) -> None:
        super().__init__(message)
        self.signal_number, self.resumable = signal_number, resumable
        again = resumable and signal_number in _NOTICES
        self.exit_status = REQUEUE_STATUS if again else 128 + signal_number  # type: ignore[misc]


REQUEUE_STATUS = getattr(os, "EX_TEMPFAIL", 75)
"""Asks for the same command again: the run was stopped from outside, and saved."""

_NOTICES = {signal.SIGTERM, getattr(signal, "SIGUSR1", None)}
