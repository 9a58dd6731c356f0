"""Starting several processes on this machine, through PyTorch's elastic launcher (torchrun)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hasten.devices import runtime
from hasten.errors import Interrupted, UsageError
from hasten.train.kept import FOLDER

STORE = "HASTEN_STORE"
"""Where processes that hasten launched meet: a file, so that nothing listens on the network."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # are handed on
_SHUTDOWN_S = "120"  # to finish a step and save it before a kill
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def check(processes: int, device: torch.device) -> None:
    """Refuse more processes than there are devices.

    Raises:
        UsageError: there are too few, or torch.distributed is missing.
    """
    if processes < 1:
        raise UsageError(f"--devices is {processes}: at least 1")
    count = runtime.count(device.type)
    if not runtime.is_host(device) and processes > count:
        have = f"{count} {device.type} device{'s are' if count != 1 else ' is'} here"
        raise UsageError(f"--devices {processes}, and {have}; give at most {count}")
    if not torch.distributed.is_available():
        raise UsageError("this build of PyTorch has no torch.distributed, which --devices needs")


def sharing(processes: int, device: torch.device) -> str:
    """What to know of more processes than the host has cores; nothing where each has its own."""
    cores = runtime.cores()
    if not runtime.is_host(device) or processes <= cores:
        return ""
    return f"{processes} processes share {cores} core{'s' if cores > 1 else ''}, and take turns"


def launch(arguments: Sequence[str], processes: int, run_folder: Path) -> int:
    """Run ``hasten`` with these arguments in several processes, and wait for them.

    They meet in a file and speak over the loopback interface alone.

    Args:
        arguments: of the command line.
        processes: how many.
        run_folder: where they save, which decides whether a stopped run can go on.

    Returns:
        The exit status: that of the first process that failed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    handed_on = []
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:  # not in older PyTorch
        handed_on = [f"--signals-to-handle={','.join(_SIGNALS)}"]
    with (
        _quiet(),
        tempfile.TemporaryDirectory(prefix="hasten-") as folder,
        _surroundings(processes, folder),
    ):
        command = [
            f"--nproc-per-node={processes}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={Path(folder) / 'rendezvous'}",
            "--rdzv-conf=store_type=file",
            f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1",
            *handed_on,
            "--module",
            "hasten",
            *arguments,
        ]
        try:
            run.run(run.parse_args(command))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:  # it cannot have said so itself
                sys.stderr.write(f"error: rank {rank} was ended by {_name(-failure.exitcode)}\n")
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as stop:
            saved = any((run_folder / FOLDER).glob("step-*"))
            return Interrupted("", int(stop.sigval), resumable=saved).exit_status
    return 0


def _name(number: int) -> str:
    name = signal.Signals(number).name
    return f"{name}: by the system for want of memory, perhaps" if name == "SIGKILL" else name


@contextmanager
def _quiet() -> Iterator[None]:
    """What became of a process it tells itself; the launcher's words on it would come on top."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _surroundings(processes: int, folder: str) -> Iterator[None]:
    before = dict(os.environ)
    _prepare(os.environ, processes, folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _prepare(environment: MutableMapping[str, str], processes: int, folder: str) -> None:
    environment[STORE] = str(Path(folder) / "store")
    # The launcher's own server, and the sockets of gloo and NCCL, else listen on every address.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = _LOOPBACK.get(sys.platform)
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, runtime.cores() // processes)))
