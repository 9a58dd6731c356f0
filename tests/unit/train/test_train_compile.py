"""Training with torch.compile: in a process of its own, which the compiler's workers end with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train_helpers import assert_same, loader, state, trainer

from hasten.train import weights

HERE = Path(__file__).parent

SCRIPT = """
import sys
import torch
from torch import nn
from train_helpers import QUIET, batches, loader, trainer
import hasten
from hasten.errors import HastenError

def model():  # of torch's own modules only, which Module.compile() passes over
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

graphs = torch._dynamo.utils.counters["stats"]
training = trainer(model(), compile=True, folder=sys.argv[1])
names = list(training.model.state_dict())
training.fit(loader(batch_size=20), epochs=1)
assert graphs["unique_graphs"] == 1, graphs
assert list(training.model.state_dict()) == names

run = hasten.Run(**QUIET | {"precision": "bfloat16", "compile": True})
net = run.prepare(model())
first = net(torch.ones(4, 6))
assert first.dtype == torch.float32 and graphs["unique_graphs"] == 2, (first.dtype, graphs)
assert not torch.equal(first, model()(torch.ones(4, 6))), "not in bfloat16"
assert not torch.is_autocast_enabled("cpu")

import torch._inductor.config as inductor
torch._dynamo.reset()
inductor.cpp.cxx = (None, "/nonexistent/g++")
inductor.force_disable_caches = True
try:
    trainer(nn.Sequential(nn.Linear(6, 3), nn.Softplus()), compile=True).fit(loader(), epochs=1)
except HastenError as error:
    print(error)
"""


@pytest.mark.slow
def test_compiled_training_is_compiled_and_keeps_plain_names(tmp_path: Path):
    environment = os.environ | {
        "PYTHONPATH": str(HERE),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.compile failed" in done.stdout and "C++ compiler" in done.stdout

    torch.manual_seed(1)
    plain = trainer(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    plain.fit(loader(batch_size=20), epochs=1)
    compiled = weights.read(tmp_path / "run")
    for name, value in state(plain.model).items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)

    resumed = trainer(plain.model, folder=tmp_path / "run", resume=True)
    resumed.fit(loader(batch_size=20), epochs=1)
    assert_same(state(resumed.model), compiled)
