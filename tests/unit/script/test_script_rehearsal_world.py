"""Scripts for several processes are rehearsed as rank 0 of 1, with a launcher or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.script.findings import merge
from hasten.script.rehearsal import Outcome, Request, rehearse
from hasten.script.rules import check_file

CLEAN = Path(__file__).parents[2] / "fixtures" / "cases" / "clean"
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29501",
}
ONE = "the script is made for several processes: it ran as rank 0 of 1"


def proven_in(path: Path, *arguments: str) -> tuple[Outcome, list[tuple[str, int]]]:
    outcome = rehearse(Request(script=str(path), arguments=arguments))
    joined = merge(check_file(path), outcome.findings)
    return outcome, [(f.code, f.line) for f in joined if f.severity != "suggestion"]


def test_a_script_for_torchrun_runs_with_its_variables_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    outcome, proven = proven_in(CLEAN / "ddp_torchrun.py")
    assert (outcome.ending, outcome.steps, proven) == ("finished", 6, [])
    assert ONE in outcome.said


@pytest.mark.parametrize(
    "arguments",
    [
        ("--multiprocessing-distributed", "--world-size", "1", "--rank", "0"),
        ("--dist-url", "env://", "--world-size", "2"),
        ("--gpu", "0"),
    ],
    ids=["spawned", "launched", "one GPU"],
)
def test_the_distributed_paths_of_the_imagenet_example_run(arguments: tuple[str, ...]) -> None:
    outcome, proven = proven_in(CLEAN / "imagenet_distributed.py", *arguments)
    assert (outcome.ending, outcome.error, proven) == ("finished", "", [])
    assert outcome.steps
    assert (ONE in outcome.said) is ("--gpu" not in arguments)


COLLECTIVES = """
import os
import torch
import torch.distributed as dist
from torch import nn

assert "RANK" not in os.environ and os.environ.get("WORLD_SIZE") is None
local = int(os.environ["LOCAL_RANK"])
dist.init_process_group(backend="nccl", init_method="env://")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "nccl")
x = torch.arange(3.0, device="cuda")
assert dist.all_reduce(x) is None
work = dist.all_reduce(x, async_op=True)
assert work.wait() and work.is_completed()
others = [torch.zeros_like(x)]
dist.all_gather(others, x)
assert torch.equal(others[0], x)
wide = torch.zeros(1, 3, device="cuda")
dist.all_gather_into_tensor(wide, x)
assert torch.equal(wide[0], x)
mine = torch.zeros_like(x)
dist.scatter(mine, [x])
dist.reduce_scatter(mine, [x])
dist.gather(x, others)
assert torch.equal(mine, others[0])
said = [None]
dist.all_gather_object(said, {"rank": 0})
dist.gather_object(local, said)
assert said == [0]
dist.broadcast_object_list(said)
dist.barrier()
net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1).to("cuda"), device_ids=[local])
assert list(net.state_dict()) == ["module.weight", "module.bias"]
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    with net.no_sync():
        net(torch.ones(4, 3)).mean().backward()
    with net.join():
        opt.step()
    opt.zero_grad()
dist.destroy_process_group()
"""


def test_collectives_and_the_parallel_wrapper_do_what_one_process_sees(tmp_path: Path) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    outcome, proven = proven_in(script)
    assert (outcome.ending, outcome.error) == ("finished", "")
    assert outcome.steps == 2
    assert [found for found in proven if found[0] != "HST101"] == []


def test_a_model_wrapped_before_it_is_moved_is_a_device_fault(tmp_path: Path) -> None:
    script = tmp_path / "wrapped.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from torch import nn\n"
        'dist.init_process_group("nccl")\n'
        "net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), device_ids=[0])\n"
    )
    outcome, proven = proven_in(script)
    assert outcome.ending == "device"
    assert ("HST115", 4) in proven


def test_a_collective_without_a_group_fails_as_it_does_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text("import torch, torch.distributed as d\nd.all_reduce(torch.ones(1))\n")
    outcome, _ = proven_in(script)
    assert outcome.ending == "failed"
    assert "init_process_group" in outcome.error
