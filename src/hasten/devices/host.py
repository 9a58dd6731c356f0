"""The host: usable cores, memory and name of the CPU, read from the files that the system keeps.

``root`` is where the file system starts, so that a test can lay out a machine of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from hasten.devices.launchers import bound_apart, processes_here

ROOT = Path("/")


def cores(
    *,
    root: Path = ROOT,
    affinity: int | None = None,
    above: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Cores that this process may use: its affinity mask, cut down by its cgroup's quota.

    A container that is given 1.5 CPUs of a 64-core machine has two usable cores, although
    ``os.cpu_count()`` says 64. What there is for all is shared by the processes that a launcher has
    started here; a mask that it gave to this one alone is not.

    Args:
        root: where the file system starts.
        affinity: cores in the affinity mask; asked of the system if None.
        above: cores in that of the launcher; asked of the system if None.
        environment: in which a launcher says how many processes it started.
    """
    processes = processes_here(environment)
    own = _affinity(0) if affinity is None else affinity
    everybody = (above or max(own, _affinity(os.getppid()))) if processes > 1 else own
    if everybody <= own and bound_apart(environment):  # a shell between them has the same mask
        everybody = own * processes
    quota = cpu_quota(root=root)
    allowed = own if quota is None else math.ceil(quota / processes)
    return max(1, min(own, everybody // processes, allowed))


def cpu_quota(*, root: Path = ROOT) -> float | None:
    """CPUs that the control groups (version 1 or 2) of this process allow; None if unlimited.

    The tightest of a group and all those above it holds.
    """
    limits: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        quota = _read(folder / "cpu.max")  # version 2: "quota period" or "max period", in µs
        if quota is None:
            allowed, period = (
                _read(folder / "cpu.cfs_quota_us"),
                _read(folder / "cpu.cfs_period_us"),
            )
            quota = f"{allowed} {period}" if allowed and period else None
        if quota is None:
            continue
        words = quota.split()
        numbers = [float(word) for word in words if word.lstrip("-").isdigit()]
        if len(words) == len(numbers) == 2 and numbers[0] > 0 and numbers[1] > 0:
            limits.append(numbers[0] / numbers[1])
    return min(limits, default=None)


def memory(*, root: Path = ROOT, address_space: int | None = None) -> tuple[int, int] | None:
    """(free, total) bytes of host memory, within the cgroup's limit; None where nothing says.

    Free is what can be had without swapping (``MemAvailable``), not only what is unused.

    Args:
        root: where the file system starts.
        address_space: most bytes of this process's (``ulimit -v``, which schedulers set); asked
            of the system if None.
    """
    found = _meminfo(root) or (_psutil_memory() if root == ROOT else None)
    if found is None:
        return None
    free, total = found
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < total:
            total = limit
        if limit is not None and used is not None:
            # File cache counts as used here though the kernel gives it back when asked.
            free = min(free, max(0, limit - used + _cache_bytes(folder)))
    space = _address_space() if address_space is None else address_space
    if space is not None:
        pages = (_read(root / "proc/self/statm") or "0").split()[0]
        taken = int(pages) * os.sysconf("SC_PAGE_SIZE") if pages.isdigit() else 0
        total, free = min(total, space), min(free, max(0, space - taken))
    return min(free, total), total


def cpu_name(*, root: Path = ROOT) -> str:
    """The processor's name as its maker wrote it, such as ``AMD EPYC 9654 96-Core Processor``."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "Processor", "cpu model"} and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _address_space() -> int | None:
    """Most bytes of this process's address space; None where it is not limited."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _affinity(process: int) -> int:
    """Cores in a process's mask; 0 is this one. All there are where nobody tells."""
    if hasattr(os, "sched_getaffinity"):
        with contextlib.suppress(OSError):  # the launcher has ended, or is in another container
            return len(os.sched_getaffinity(process)) or 1
    return os.cpu_count() or 1


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders, innermost first, whose files limit this process for ``controller``."""
    base = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        if not controllers:  # the unified hierarchy of version 2
            mounts = [base, base / "unified"]
        else:
            mounts = [base / controllers, base / controller]
        inside = path.strip("/")
        for mount in mounts:
            # Inside a container the path is often the host's, and only the mount itself is seen.
            here = mount / inside
            while here != mount:
                folders.append(here)
                here = here.parent
            folders.append(mount)
    return list(dict.fromkeys(folders))


def _meminfo(root: Path) -> tuple[int, int] | None:
    fields: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[key] = int(words[0]) * 1024
    if "MemTotal" not in fields:
        return None
    return fields.get("MemAvailable", fields.get("MemFree", 0)), fields["MemTotal"]


def _psutil_memory() -> tuple[int, int] | None:
    try:
        import psutil
    except ImportError:
        return None
    now = psutil.virtual_memory()
    return int(now.available), int(now.total)


def _cache_bytes(folder: Path) -> int:
    found: dict[str, int] = {}
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            found[key] = int(value)
    # Version 1 has what is used by the groups below too, and its cache under a name of its own.
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _read(path: Path) -> str | None:
    """The file's text without outer white space; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent, or not ours to read: both mean that this source says nothing
        return None
