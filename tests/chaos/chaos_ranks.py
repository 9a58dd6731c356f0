"""Runs of two ranks for chaos.py, started by PyTorch's elastic launcher.

It is torchrun's, with its restarts and its handing on of signals; only that it forks its ranks from
a process that has imported everything, where torchrun starts Python anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
from chaos_trial import Child, Setup, train, write_to

RANKS = 2
RESTARTS = 3
STOPPED = 75


class Launched(Child):
    """A launcher, and the ranks that it started."""

    def ranks(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []

    def send(self, number: int) -> None:
        """To the launcher; SIGKILL to all, as when the machine goes."""
        if number != signal.SIGKILL or self.ended():
            return super().send(number)
        super().send(signal.SIGSTOP)  # it starts none while they are counted
        all_of_them = self.ranks()
        for each in all_of_them:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        super().send(signal.SIGKILL)
        psutil.wait_procs(all_of_them, timeout=30)
        return None


def launch(words: tuple[str, ...], log: Path, before: Callable[[], None]) -> Launched:
    """Run `hasten train` in two ranks."""
    pid = os.fork()
    if pid:
        return Launched(pid, log)
    status = 70
    try:
        write_to(log)
        status = _agent(words, log.parent, before)
    except BaseException:  # noqa: BLE001  (of a process that ends here, whatever it is)
        traceback.print_exc()
    finally:
        os._exit(status)


def _agent(words: tuple[str, ...], folder: Path, before: Callable[[], None]) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    number = time.monotonic_ns()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=str(number),
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / f"meeting-{number}"),
        rdzv_configs={"store_type": "file"},
        max_restarts=RESTARTS,
        monitor_interval=0.05,
        shutdown_timeout=10,  # of a rank that was told to end: one that is stopped does not hear
        start_method="fork",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "launcher")),
    )
    try:
        elastic_launch(config, _rank)(words, before)
    except ChildFailedError:
        return 1
    except SignalException:
        return STOPPED
    return 0


def _rank(words: tuple[str, ...], before: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the launcher's own handlers, by the fork
    status = 70
    try:
        before()
        status = train(words)
    except BaseException:  # noqa: BLE001  (of a process that ends here, whatever it is)
        traceback.print_exc()
    if status:  # else the launcher waits for it to return
        os._exit(status)


DDP = Setup(name="ddp of two", words=("--strategy", "ddp"), launch=launch)
FSDP = Setup(name="fsdp of two", words=("--strategy", "fsdp"), launch=launch)
