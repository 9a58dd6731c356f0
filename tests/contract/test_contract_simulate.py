"""One suite for the simulated device, and for a real GPU where there is one; and the operators."""

from __future__ import annotations

import importlib.util
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import hasten

OPERATORS = 350  # of the database's; `make fidelity` runs all, and every sample of each
REAL = torch.cuda.is_available()


@pytest.fixture(
    params=[
        "simulated",
        pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="no CUDA device")),
    ]
)
def cuda(request):
    with hasten.simulate() if request.param == "simulated" else nullcontext():
        yield torch.device("cuda:0")


REFUSED = [
    lambda d: torch.ones(3, device=d) + torch.ones(3),
    lambda d: torch.ones(3).add_(torch.ones(3, device=d)),
    lambda d: nn.Linear(2, 2).to(d)(torch.ones(1, 2)),
    lambda d: nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2, device=d)),
    lambda d: torch.ones(3)[torch.tensor([0], device=d)],
    lambda d: torch.cat([torch.ones(1, device=d), torch.ones(1)]),
    lambda d: nn.functional.embedding(torch.tensor([0]), torch.ones(2, 2, device=d)),
    lambda d: nn.functional.cross_entropy(torch.ones(1, 2, device=d), torch.tensor([0])),
    lambda d: torch.ones(3, device=d).masked_fill(torch.ones(3) > 0, 0.0),
    lambda d: torch.ones(3, device=d).logaddexp(torch.tensor(1.0)),
    lambda d: torch.ones(3, device=d).clamp(min=torch.tensor(1.0)),
    lambda d: nn.LSTM(1, 1).to(d)(torch.ones(1, 1, 1)),
]
ALLOWED = [
    lambda d: torch.ones(3, device=d) + torch.tensor(1.0),
    lambda d: torch.tensor(1.0) * torch.ones(3, device=d),
    lambda d: torch.ones(3, device=d)[torch.tensor([0])],
    lambda d: torch.ones(3, device=d)[torch.ones(3) > 0],
    lambda d: torch.ones(3, device=d).copy_(torch.ones(3)),
    lambda d: torch.where(torch.ones(3, device=d) > 0, torch.ones(3, device=d), torch.tensor(0.0)),
    lambda d: torch.ones(3, device=d).masked_fill(torch.ones(3, device=d) > 0, torch.tensor(0.0)),
    lambda d: torch.select_scatter(torch.ones(3, 3, device=d), torch.ones(3), 0, 0),
    lambda d: torch.ones(3, device=d).lerp(torch.ones(3, device=d), torch.tensor(0.5)),
]


@pytest.mark.parametrize("call", REFUSED)
def test_refused(cuda, call):
    with pytest.raises(RuntimeError):
        call(cuda)


@pytest.mark.parametrize("call", ALLOWED)
def test_allowed(cuda, call):
    call(cuda)


def test_numbers_agree_with_the_cpu(cuda):
    def losses(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(6, 5)
        net, x = net.to(device), x.to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(cuda) == pytest.approx(losses("cpu"), rel=1e-4)


def fidelity():
    path = Path(__file__).parents[2] / "tools" / "fidelity.py"
    spec = importlib.util.spec_from_file_location("fidelity", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fidelity"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_operators_of_pytorch_agree_and_mix_as_cuda_does():
    tool = fidelity()
    rng, rules, threads = random.Random(20), tool.Rules(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen = rng.sample(tool.operators(), OPERATORS)
        verdicts = [tool.examine(op, 1, rng, rules) for op in chosen]
    finally:
        torch.set_num_threads(threads)
    works = [v for v in verdicts if v.samples]
    agree = [v for v in works if not v.failed]
    assert len(works) > 0.9 * OPERATORS
    assert len(agree) >= 0.98 * len(works), [(v.name, v.failed[0]) for v in works if v.failed]
    assert sum(v.mixed for v in verdicts) > OPERATORS
    assert not [(v.name, v.mixed_wrong) for v in verdicts if v.mixed_wrong]
