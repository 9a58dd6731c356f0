"""The processes that a launcher has started: how many are here, and which is this one."""

from __future__ import annotations

import os
from collections.abc import Mapping

_COUNTS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)

_NUMBERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of all that were started together, or alone."""
    return next((environment[name] for name in _NUMBERS if name in environment), "0") == "0"


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Processes that a launcher has started on this machine to share its cores; mostly 1."""
    for name in _COUNTS:
        text = environment.get(name, "")
        if text.isdecimal():
            return max(1, int(text))
    return _tasks_of_srun(environment)


def bound_apart(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM's srun has given each task a mask of its own (``--cpu-bind``)."""
    kind = environment.get("SLURM_CPU_BIND_TYPE", "").rstrip(":")
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and kind not in ("", "none")


def tasks_per_node(text: str) -> list[int]:
    """SLURM's ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        found += [int(number)] * int(times.rstrip(")") or 1)
    return found


def _tasks_of_srun(environment: Mapping[str, str]) -> int:
    """Of the job step that this is a task of; what cannot be read is told by who joins them.

    Only within a step: a batch script has SLURM_NTASKS_PER_NODE too, and runs alone.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return 1
    try:
        counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
        return max(1, counts[int(environment["SLURM_NODEID"])])
    except (KeyError, ValueError, IndexError):
        text = environment.get("SLURM_NTASKS_PER_NODE", "")
        return max(1, int(text)) if text.isdecimal() else 1
