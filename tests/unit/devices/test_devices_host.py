"""Cores, memory and name of the CPU, read from machines that a test lays out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.devices import host


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "6400000 100000"}, 16),
        # The tightest of the group and those above it holds.
        (
            {
                "proc/self/cgroup": "0::/pod/main",
                "sys/fs/cgroup/pod/main/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000",
            },
            4,
        ),
        # Version 1, with the controllers mounted together.
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            16,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "nonsense"}, 16),
    ],
)
def test_cores_are_the_affinity_cut_down_by_the_quota(tmp_path, files, expected):
    found = host.cores(root=lay_out(tmp_path, files), affinity=16, environment={})
    assert found == expected


@pytest.mark.parametrize(
    ("ranks", "mask", "above", "quota", "expected"),
    [
        ("1", 8, 8, None, 8),
        ("4", 8, 8, None, 2),
        ("16", 8, 8, None, 1),
        ("4", 2, 8, None, 2),  # bound to cores of its own
        ("4", 4, 8, None, 2),  # two of them to each half
        ("4", 8, 64, None, 8),
        ("4", 64, 64, "800000", 2),  # the container's quota is for all of them
        ("4", 2, 64, "300000", 1),
        ("nonsense", 8, 8, None, 8),
    ],
)
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_cores_are_divided_among_the_processes_of_a_launcher(
    tmp_path, name, ranks, mask, above, quota, expected
):
    files = {"proc/self/cgroup": "0::/"}
    if quota:
        files["sys/fs/cgroup/cpu.max"] = f"{quota} 100000"
    found = host.cores(
        root=lay_out(tmp_path, files), affinity=mask, above=above, environment={name: ranks}
    )
    assert found == expected


SRUN = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


@pytest.mark.parametrize(
    ("environment", "mask", "above", "expected"),
    [
        (SRUN, 8, 8, 4),
        ({**SRUN, "SLURM_NODEID": "2"}, 8, 8, 8),  # the one task of that machine
        ({**SRUN, "SLURM_CPU_BIND_TYPE": "none"}, 8, 8, 4),
        ({**SRUN, "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 4, 8, 4),
        ({**SRUN, "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 4, 4, 4),  # a shell between has it too
        ({**SRUN, "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 8, 8, 8),
        # Of the batch script itself, which srun has not started.
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "2"}, 8, 8, 8),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, 8, 8, 8),
        # torchrun in a task of srun's says how many it has started.
        ({**SRUN, "LOCAL_WORLD_SIZE": "8"}, 8, 8, 1),
        ({**SRUN, "SLURM_NODEID": "7"}, 8, 8, 8),
        ({**SRUN, "SLURM_NODEID": "7", "SLURM_NTASKS_PER_NODE": "2"}, 8, 8, 4),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, 8, 8, 8),
    ],
)
def test_cores_are_divided_among_the_tasks_of_srun(tmp_path, environment, mask, above, expected):
    found = host.cores(root=tmp_path, affinity=mask, above=above, environment=environment)
    assert found == expected


def test_cores_of_a_real_process_that_was_bound():
    """Two processes of this one: one has its mask, the other a core of its own."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or no masks")
    code = (
        "import os, sys; {}; from hasten.devices import host; "
        "print(host.cores(root=__import__('pathlib').Path('/nowhere')))"
    )
    bind = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    everybody = len(os.sched_getaffinity(0))
    for before, expected in (("pass", everybody // 2), (bind, 1)):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("{}", before)],
            env={**os.environ, "LOCAL_WORLD_SIZE": "2"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) == expected


def test_cores_of_this_machine_are_within_what_it_has():
    assert 1 <= host.cores() <= host.cores(root=Path("/nowhere"))


def test_memory_is_what_is_available_without_swapping(tmp_path):
    lay_out(
        tmp_path,
        {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nX:\n"},
    )
    assert host.memory(root=tmp_path) == (600 * 1024, 1000 * 1024)


def test_memory_is_within_the_limit_of_the_container(tmp_path):
    lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": str(400 * 1024),
            "sys/fs/cgroup/memory.current": str(300 * 1024),
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {50 * 1024}\n",
        },
    )
    assert host.memory(root=tmp_path) == (150 * 1024, 400 * 1024)


@pytest.mark.parametrize("limited", ["docker/abc", "docker", "."])
def test_memory_is_within_the_limit_of_a_container_of_version_1(tmp_path, limited):
    """The tightest of its group and of those above it holds, with what all below it use."""
    group, kb = "sys/fs/cgroup/memory", 1024
    lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/",
            f"{group}/docker/abc/memory.limit_in_bytes": "9223372036854771712",
            f"{group}/docker/abc/memory.usage_in_bytes": "1024",
        },
    )
    assert host.memory(root=tmp_path) == (900 * kb, 1000 * kb)
    lay_out(
        tmp_path,
        {
            f"{group}/{limited}/memory.limit_in_bytes": f"{400 * kb}",
            f"{group}/{limited}/memory.usage_in_bytes": f"{300 * kb}",
            f"{group}/{limited}/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * kb}\n",
        },
    )
    assert host.memory(root=tmp_path) == (150 * kb, 400 * kb)


def test_an_unlimited_memory_group_changes_nothing(tmp_path):
    lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n",
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1024",
        },
    )
    assert host.memory(root=tmp_path) == (900 * 1024, 1000 * 1024)


def test_memory_is_within_the_limit_of_the_address_space(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
            "proc/self/statm": "100 50 20 1 0 40 0",
        },
    )
    assert host.memory(root=tmp_path, address_space=300 * page) == (200 * page, 300 * page)
    assert host.memory(root=tmp_path, address_space=90 * page) == (0, 90 * page)
    assert host.memory(root=tmp_path, address_space=1 << 60) == (900000 << 10, 1000000 << 10)


def test_memory_is_unknown_where_nothing_says(tmp_path):
    assert host.memory(root=tmp_path) is None


def test_the_cpu_is_named_as_its_maker_names_it(tmp_path):
    lay_out(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: AMD EPYC 9654\n"})
    assert host.cpu_name(root=tmp_path) == "AMD EPYC 9654"
    assert host.cpu_name(root=tmp_path / "nowhere")
