"""Memory, processes, and the ends of a simulation."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hasten
from hasten.errors import UsageError


class MovesSamples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(2).cuda()


class IndexesTheDevice(Dataset):
    def __init__(self):
        self.data = torch.ones(4, 2, device="cuda")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.data[index] * 2


def worker_error(data: Dataset) -> str:
    """What the loader raises for a worker, with nothing left that holds the loader."""
    try:
        list(DataLoader(data, batch_size=2, num_workers=1))
    except RuntimeError as error:
        return str(error)
    finally:
        gc.collect()
    return ""


def test_memory_is_counted_and_given_back():
    with hasten.simulate() as simulation:
        before = torch.cuda.memory_allocated()
        x = torch.empty(1024, 1024, device="cuda")
        view = x.view(-1)
        assert torch.cuda.memory_allocated() - before == 4 << 20
        del x
        assert torch.cuda.memory_allocated() - before == 4 << 20  # the view keeps it
        del view
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == simulation.memory().peak_bytes == 4 << 20
        torch.cuda.reset_peak_memory_stats()
        w = torch.randn(64, 64, device="cuda", requires_grad=True)
        loss = (w * w).sum()
        loss.backward()
        del w, loss
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() >= 3 * 64 * 64 * 4


def test_a_kept_graph_keeps_its_memory():
    with hasten.simulate():
        w = torch.ones(1000, device="cuda", requires_grad=True)
        history, used = [], []
        for _ in range(3):
            history.append((w * 2).exp().sum())
            used.append(torch.cuda.memory_allocated())
        assert used[0] < used[1] < used[2]


def test_running_out_of_memory_is_cudas_error():
    with hasten.simulate(memory_bytes=1 << 20):
        with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
            torch.zeros(1 << 20, device="cuda")
        assert torch.zeros(1, device="cuda").is_cuda


def test_a_worker_that_forks_cannot_use_the_device():
    with hasten.simulate():
        torch.ones(1, device="cuda")
        assert "Cannot re-initialize CUDA in forked subprocess" in worker_error(MovesSamples())
        assert "CUDA" in worker_error(IndexesTheDevice())
        assert len(list(DataLoader(MovesSamples(), batch_size=2))) == 2


def test_everything_is_put_back():
    def snapshot():
        owners = (torch, torch.Tensor, torch.cuda, torch.accelerator, torch.UntypedStorage)
        return [dict(vars(owner)) for owner in owners]

    with hasten.simulate():
        torch.ones(1, device="cuda")  # what is imported lazily is imported
    available, accelerator = torch.cuda.is_available(), torch.accelerator.current_accelerator()
    before = snapshot()
    with pytest.raises(ZeroDivisionError), hasten.simulate(2):
        torch.ones(1, device="cuda")
        raise ZeroDivisionError
    assert snapshot() == before
    assert torch.cuda.is_available() == available
    assert torch.accelerator.current_accelerator() == accelerator
    assert torch._C._is_multithreading_enabled()
    assert torch._C._len_torch_function_stack() == 0


def test_a_default_device_that_a_script_leaves_is_taken_back():
    with hasten.simulate():
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.ones(1).is_cuda and torch.nn.Linear(1, 1).weight.is_cuda
    assert torch.ones(1).device.type == "cpu" and torch.get_default_device().type == "cpu"


def test_one_at_a_time_and_once_each():
    with hasten.simulate() as simulation:
        with pytest.raises(UsageError, match="running already"), hasten.simulate():
            pass
        assert torch.ones(1, device="cuda").is_cuda
    with pytest.raises(UsageError, match="make another"), simulation:
        pass


def test_a_tensor_that_outlives_its_simulation_says_so():
    with hasten.simulate():
        x = torch.ones(1, device="cuda")
        y = torch.ones(1)
    with pytest.raises(RuntimeError, match="has ended"):
        x + 1
    assert (y + 1).item() == 2
    with hasten.simulate():
        assert (torch.ones(1, device="cuda") + 1).item() == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": 0}, "1 to 64 devices"),
        ({"spec": "abacus"}, "no simulated device 'abacus'"),
        ({"memory_bytes": 0}, "memory_bytes must be above 0"),
    ],
)
def test_wrong_settings_say_what_is_right(given, words):
    with pytest.raises(UsageError, match=words):
        hasten.simulate(**given)


def test_importing_it_changes_nothing():
    code = (
        "import torch; before = dict(vars(torch)), dict(vars(torch.Tensor));"
        "import hasten.simulate;"
        "assert (dict(vars(torch)), dict(vars(torch.Tensor))) == before;"
        "assert torch.accelerator.current_accelerator() is None or torch.cuda.is_available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


PLUGIN_TEST = """
import sys
TORCH_AT_START = "torch" in sys.modules
import pytest

def test_start():
    assert not TORCH_AT_START

@pytest.mark.simulated_accelerator(devices=2)
def test_two(simulated_accelerator):
    import torch
    assert torch.cuda.device_count() == 2 and simulated_accelerator.devices == 2

def test_one(simulated_accelerator):
    import torch
    assert torch.ones(1).cuda().is_cuda
"""


def test_the_fixture_is_there_for_everyone(tmp_path):
    (tmp_path / "test_user.py").write_text(PLUGIN_TEST)
    from importlib.metadata import entry_points

    known = any(e.value == "hasten.pytest_plugin" for e in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "hasten.pytest_plugin"]
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-c", str(settings)]
    done = subprocess.run(
        [*command, *plugin, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
