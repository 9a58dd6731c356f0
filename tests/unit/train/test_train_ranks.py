"""Several processes come to what one comes to, with the same global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_cases
import torch

HERE = Path(__file__).parent


def launch(*command: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script in several processes, as people do."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return subprocess.run(
        [sys.executable, *launcher, *command],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HASTEN_CACHE_DIR": "off"},
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has come to."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(str(HERE / "rank_cases.py"), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", rank_cases.CASES)
def test_two_processes_come_to_what_one_comes_to(
    several: list[dict[str, Any]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    alone = rank_cases.CASES[name]()
    found = [rank["cases"][name] for rank in several]
    for key, expected in alone.items():
        if key == "order":
            asked = [rank["order"] for rank in found]
            assert interleaved(asked, expected)
            continue
        for rank in found:
            torch.testing.assert_close(rank[key], expected, rtol=0, atol=1e-6)


def interleaved(asked: list[list[int]], order: list[int]) -> bool:
    """Whether the samples that two processes asked for make the order of one, batch by batch."""
    epochs = [order[start : start + 43] for start in range(0, len(order), 43)]
    expected: list[list[int]] = [[], []]
    for epoch in epochs:
        for start in range(0, 43, 8):
            batch = epoch[start : start + 8]
            half = (len(batch) + 1) // 2
            expected[0] += batch[:half]
            expected[1] += batch[half:]
    return asked == expected


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("stream", "would give each of the 2 processes all samples"),
        ("dataloader stream", "would give each of the 2 processes all samples"),
        ("sampler", "leave the sampler out"),
        ("generator", "cannot be shared out among 2 processes"),
        ("single", "for one process, and 2 were started"),
        ("skip", 'use on_error="raise"'),
    ],
)
def test_what_several_cannot_do_is_said(
    several: list[dict[str, Any]], name: str, word: str
) -> None:
    assert all(word in rank["refusals"][name] for rank in several)
