"""What SLURM's srun tells each of its tasks, as PyTorch wants to hear it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from hasten.devices.launchers import tasks_per_node
from hasten.errors import UsageError

_FIRST_PORT, _PORTS = 20_000, 20_000  # below those that systems give out by themselves


class Step(NamedTuple):
    """A task's place in its job step."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def step(environment: Mapping[str, str] = os.environ) -> Step | None:
    """The place of a task that srun started beside others; None for anything else.

    A batch script itself, or a shell in an allocation, is no such task, though SLURM tells it the
    number of tasks that srun will start.

    Raises:
        UsageError: the variables contradict each other.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    try:
        size = int(environment["SLURM_STEP_NUM_TASKS"])
        rank, local_rank = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
        node = int(environment["SLURM_NODEID"])
        counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        return Step(rank, size, local_rank, counts[node])
    except (KeyError, ValueError, IndexError) as error:
        raise UsageError(
            f"SLURM's variables of this task cannot be read ({error!r}); start with srun, or with"
            " torchrun under it"
        ) from error


def first_node(text: str) -> str:
    """The first name in a list such as ``gpu[07-09,12],login``: ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", text)
    if match is None:
        raise UsageError(f"SLURM's list of nodes, {text!r}, cannot be read; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def tell_where_to_meet(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what ``init_process_group`` reads, where a task of srun has it not.

    The first task's node, and a port that follows from the job, so that all tasks come to the
    same. ``MASTER_ADDR`` and ``MASTER_PORT`` go before.

    Raises:
        UsageError: the list of nodes cannot be read.
    """
    if step(environment) is None or "RANK" in environment:
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    number = job * 31 + int(environment.get("SLURM_STEP_ID", "0"))
    environment.setdefault("MASTER_ADDR", first_node(nodes))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + number % _PORTS))
