"""Two machines, as two launchers that meet on loopback; one dies and another takes its place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import rank_cases
import torch

import hasten
import warm

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HASTEN_CACHE_DIR": "off",
    # Else the launcher that stays does not tell a new one where its processes meet (PyTorch 2.13).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def agents() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers; none outlives the test, nor does what they started."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        started.append(
            warm.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=warm.forking_ranks(ENVIRONMENT),
                start_new_session=True,
            )
        )
        return started[-1]

    try:
        yield start
    finally:
        for agent in started:
            kill(agent)


def kill(agent: subprocess.Popen[str]) -> None:
    """End a launcher and its processes at once, as when a machine loses power."""
    for pid in [*children(agent.pid), agent.pid]:
        if pid != agent.pid or agent.poll() is None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    agent.wait()
    if agent.stdout is not None:
        agent.stdout.close()


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def wait_for(found: Callable[[], bool], agent: subprocess.Popen[str], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert agent.poll() is None, agent.stdout.read() if agent.stdout else ""
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def test_a_machine_that_dies_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    model = rank_cases.mlp()
    alone = hasten.Trainer(
        model, loss=torch.nn.CrossEntropyLoss(), optimizer=rank_cases.sgd, **rank_cases.OPTIONS
    )
    alone.fit(rank_cases.loader("inline", rank_cases.Noted()), epochs=20)
    command = (
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"),
        *("--local-addr=127.0.0.1", "--monitor-interval=0.2"),
        *(str(HERE / "rank_agents.py"), str(tmp_path)),
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    with agents() as start:
        one = start(*command)
        wait_for(lambda: bool(children(one.pid)) or one.poll() is not None or True, one)
        time.sleep(1)  # the first is the one that the others meet at
        other = start(*command)
        wait_for(lambda: len(list(checkpoints.glob("step-*"))) >= 2, one)
        kill(other)
        start(*command)
        said, _ = one.communicate(timeout=150)
        assert one.returncode == 0, said[-3000:]
    final = torch.load(tmp_path / "final.pt")
    torch.testing.assert_close(final, dict(model.state_dict()), rtol=0, atol=1e-6)
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"resumed"' in log
