"""How a rehearsal runs a script: as Python would, within limits, leaving nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hasten.errors import UsageError
from hasten.script.rehearsal import Outcome, Request, rehearse


def run(folder: Path, text: str, *arguments: str, **how: object) -> tuple[Outcome, str]:
    """Rehearse a script in a folder of its own, as the working folder."""
    (folder / "script.py").write_text(text)
    return run_named(folder, "script.py", *arguments, **how)


def run_named(folder: Path, name: str, *arguments: str, **how: object) -> tuple[Outcome, str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (folder.parent / "said").open("w+") as output:
            outcome = rehearse(
                Request(script=name, arguments=arguments, **how),  # type: ignore[arg-type]
                output=output,
            )
            output.seek(0)
            return outcome, output.read()
    finally:
        os.chdir(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.mark.fresh
def test_it_runs_as_python_runs_a_script(folder: Path) -> None:
    (folder / "beside.py").write_text("value = 5\n")
    text = (
        "import os, sys, beside\n"
        "print([__name__, sys.argv, sys.path[0], beside.value, os.getcwd(), __file__,"
        " __package__, sys.modules['__main__'].__dict__ is globals()])\n"
    )
    _, seen = run(folder, text, "--lr", "1")
    plain = subprocess.run(
        [sys.executable, "script.py", "--lr", "1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen == plain.stdout


@pytest.mark.fresh
def test_it_runs_a_module_of_a_package_with_relative_imports(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("value = 7\n")
    (package / "train.py").write_text(
        "import sys\nfrom .helper import value\nprint(__name__, __package__, value, sys.argv[1:])\n"
    )
    outcome, seen = run_named(folder, "package.train", "a", as_module=True)
    assert outcome.ending == "finished"
    assert seen == "__main__ package 7 ['a']\n"


def test_a_module_that_is_not_there_is_wrong_usage(folder: Path) -> None:
    outcome, _ = run_named(folder, "package.nothing", as_module=True)
    assert outcome.ending == "died"
    assert outcome.error.startswith("-m package.nothing: ")


def test_a_file_that_is_not_there_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"there is no file nothing\.py"):
        Request(script="nothing.py")


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"devices": 0}, {"timeout_s": 0.0}])
def test_figures_out_of_range_are_wrong_usage(wrong: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("")
    with pytest.raises(UsageError):
        Request(script=str(path), **wrong)  # type: ignore[arg-type]


TRAINING = """
import torch
from torch import nn

model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_loops_end_after_the_asked_steps_and_two_epochs(folder: Path) -> None:
    text = TRAINING + (
        "epochs = steps = 0\n"
        "for epoch in range(1000):\n"
        "    epochs += 1\n"
        "    while True:\n"
        "        loss = model(torch.randn(2, 4, device='cuda')).mean()\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "        steps += 1\n"
        "print(epochs, steps)\n"
    )
    outcome, seen = run(folder, text, steps=5)
    assert seen == "2 10\n"
    assert outcome.steps == 10
    assert any("ended early" in sentence for sentence in outcome.said)


def test_loops_without_steps_run_to_their_end(folder: Path) -> None:
    text = TRAINING + (
        "total = 0\n"
        "for i in range(500):\n"
        "    total += i\n"
        "while total > 7:\n"
        "    total -= 1\n"
        "else:\n"
        "    print('whole', total)\n"
        "print([model(torch.zeros(1, 4).cuda()).shape[0] for i in range(20)])\n"
    )
    _, seen = run(folder, text)
    assert seen == f"whole 7\n{[1] * 20}\n"


def test_a_loop_over_batches_in_a_generator_ends_too(folder: Path) -> None:
    text = TRAINING + (
        "def forever():\n"
        "    while True:\n"
        "        yield torch.randn(2, 4)\n"
        "steps = 0\n"
        "for batch in forever():\n"
        "    loss = model(batch.cuda()).mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    steps += 1\n"
        "print(steps)\n"
    )
    outcome, seen = run(folder, text)
    assert (seen, outcome.ending) == ("3\n", "finished")


def test_a_script_without_training_is_said_to_be_one(folder: Path) -> None:
    outcome, seen = run(folder, "print('done')\n")
    assert (outcome.ending, outcome.steps, seen) == ("finished", 0, "done\n")
    assert any("made no optimizer step" in sentence for sentence in outcome.said)


def test_leaving_early_with_0_is_no_failure(folder: Path) -> None:
    outcome, _ = run(folder, "import sys\nsys.exit(0)\n")
    assert (outcome.ending, outcome.error) == ("finished", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(2)", "exit status 2"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--x'])", "exit status 2"),
        ("raise SystemExit('no data')", "with a message"),
    ],
)
def test_an_ending_of_the_scripts_own_is_told(folder: Path, text: str, said: str) -> None:
    outcome, _ = run(folder, text)
    assert outcome.ending == "failed"
    assert any(said in sentence for sentence in outcome.said)


@pytest.mark.fresh
def test_a_failure_of_the_scripts_own_has_the_traceback_that_python_prints(folder: Path) -> None:
    text = "def load():\n    for x in [1]:\n        raise ValueError('no data here')\n\nload()\n"
    outcome, _ = run(folder, text)
    plain = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert outcome.ending == "failed"
    assert outcome.error == plain.stderr


def test_a_syntax_error_is_told_without_frames_of_hasten(folder: Path) -> None:
    outcome, _ = run(folder, "def broken(:\n")
    assert outcome.ending == "failed"
    assert "SyntaxError" in outcome.error
    assert "hasten" not in outcome.error.replace(str(folder), "")


def test_a_crash_of_the_process_is_told(folder: Path) -> None:
    outcome, _ = run(folder, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert outcome.ending == "died"
    assert "SIGSEGV" in outcome.error


@pytest.mark.parametrize("text", ["while True:\n    pass\n", "import time\ntime.sleep(900)\n"])
def test_the_limit_ends_what_does_not_end(folder: Path, text: str) -> None:
    outcome, _ = run(folder, text, timeout_s=1.0)
    assert outcome.ending == "time"
    assert any("the limit of 1 s passed at script.py" in sentence for sentence in outcome.said)


def test_what_was_found_before_the_limit_is_kept(folder: Path) -> None:
    text = TRAINING + "model(torch.zeros(1, 4))\nimport time\ntime.sleep(900)\n"
    outcome, _ = run(folder, text, timeout_s=5.0)
    assert outcome.ending == "time"
    assert [finding.line for finding in outcome.findings] == [7]


def test_processes_that_the_script_leaves_are_ended(folder: Path) -> None:
    text = (
        "import multiprocessing, os, time\n"
        "def wait():\n"
        "    time.sleep(900)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('fork').Process(target=wait)\n"
        "    process.start()\n"
        "    print(process.pid)\n"
    )
    outcome, seen = run(folder, text)
    assert any("started processes" in sentence for sentence in outcome.said)
    deadline = time.monotonic() + 10
    while is_running(int(seen)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(seen))


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_writes_go_elsewhere_and_are_read_back(folder: Path) -> None:
    (folder / "kept.txt").write_text("old")
    text = (
        "import os, pathlib, shutil, torch\n"
        "os.makedirs('out/deep', exist_ok=True)\n"
        "pathlib.Path('out/deep/a.txt').write_text('hi')\n"
        "torch.save({'a': torch.ones(2)}, 'out/w.pt')\n"
        "with open('kept.txt', 'a') as f: f.write(' new')\n"
        "os.replace('out/deep/a.txt', 'b.txt')\n"
        "print(open('kept.txt').read(), sorted(os.listdir('.')),\n"
        "      os.path.exists('out/deep/a.txt'),\n"
        "      torch.load('out/w.pt')['a'].sum().item(), open('b.txt').read())\n"
        "os.remove('kept.txt'); shutil.rmtree('out')\n"
        "print(os.path.exists('kept.txt'), os.path.exists('out'))\n"
    )
    outcome, seen = run(folder, text)
    assert outcome.ending == "finished", outcome.error
    assert seen == ("old new ['b.txt', 'kept.txt', 'out', 'script.py'] False 2.0 hi\nFalse False\n")
    assert sorted(path.name for path in folder.iterdir()) == ["kept.txt", "script.py"]
    assert (folder / "kept.txt").read_text() == "old"
    assert any("temporary folder" in sentence for sentence in outcome.said)


WRITES_IN_C = """
import os, sqlite3, torch
from safetensors.torch import load_file, save_file

layer = torch.jit.script(torch.nn.Linear(1, 1))
torch.jit.save(layer, "a.pt")
layer.save("b.pt")
torch.jit.load("a.pt")
base = sqlite3.connect("c.db")
base.execute("create table t (a)")
base.commit()
sqlite3.connect(":memory:").close()
torch.from_file("d.bin", shared=True, size=4, dtype=torch.uint8)
save_file({"x": torch.ones(1)}, "e.safetensors")
print(load_file("e.safetensors"), sorted(os.listdir(".")))
"""


@pytest.mark.fresh
def test_libraries_that_write_in_c_write_elsewhere_too(folder: Path) -> None:
    outcome, seen = run(folder, WRITES_IN_C)
    assert outcome.ending == "finished", outcome.error
    assert "['a.pt', 'b.pt', 'c.db', 'd.bin', 'e.safetensors', 'script.py']" in seen
    assert [path.name for path in folder.iterdir()] == ["script.py"]


def test_a_script_may_work_in_a_folder_that_it_made(folder: Path) -> None:
    (folder / "data.txt").write_text("data")
    text = (
        "import os\n"
        "os.makedirs('runs/one')\n"
        "os.chdir('runs/one')\n"
        "open('log', 'w').write('x')\n"
        "print(os.path.relpath(os.getcwd(), '../..'), os.listdir('.'), open('log').read())\n"
        "print(open('../../data.txt').read(), os.path.exists('../../nothing'))\n"
        "os.chdir('../..')\n"
        "print(sorted(os.listdir('.')), os.path.basename(os.getcwd()))\n"
    )
    outcome, seen = run(folder, text)
    assert outcome.ending == "finished", outcome.error
    assert seen.splitlines() == [
        "runs/one ['log'] x",
        "data False",
        "['data.txt', 'runs', 'script.py'] work",
    ]
    assert not (folder / "runs").exists()


def test_the_files_that_ran_are_named_though_the_script_goes_elsewhere(folder: Path) -> None:
    (folder / "data").mkdir()
    outcome, _ = run(folder, "import os\nos.chdir('data')\n")
    assert outcome.files == ("script.py",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input('name? ')", "asks for input"),
        ("import urllib.error\nraise urllib.error.URLError('no route')", "needs the network"),
        ("raise ConnectionResetError('gone')", "needs the network"),
        ("import torch\ntorch.cuda.CUDAGraph()", "a limit of the simulated accelerator"),
    ],
)
def test_what_a_script_misses_here_is_said(folder: Path, text: str, said: str) -> None:
    outcome, _ = run(folder, text)
    assert outcome.ending == "failed"
    assert said in " ".join(outcome.said)


def test_keep_lets_the_script_write(folder: Path) -> None:
    outcome, _ = run(folder, "open('result.txt', 'w').write('1')\n", keep=True)
    assert (folder / "result.txt").read_text() == "1"
    assert not any("temporary" in sentence for sentence in outcome.said)


def test_workers_start_functions_and_sharding_see_a_worker(folder: Path) -> None:
    text = TRAINING + (
        "from torch.utils.data import DataLoader, IterableDataset, get_worker_info\n"
        "class Stream(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        print('worker', get_worker_info().id)\n"
        "        return iter(torch.ones(40, 4))\n"
        "def begin(number): print('begin', number)\n"
        "for x in DataLoader(Stream(), batch_size=4, num_workers=2, worker_init_fn=begin):\n"
        "    loss = model(x.cuda()).mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "print('done', get_worker_info())\n"
    )
    outcome, seen = run(folder, text)
    assert outcome.error == ""
    assert seen == "begin 0\nworker 0\ndone None\n"


def test_a_device_fault_in_a_module_beside_the_script_is_reported_there(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(3, 3)\n\n"
        "    def forward(self, x):\n        noise = torch.zeros(3)\n"
        "        return self.fc(x + noise)\n"
    )
    text = (
        "import torch\nfrom net import Net\nnet = Net().cuda()\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    opt.zero_grad()\n"
        "    net(torch.ones(2, 3, device='cuda')).sum().backward()\n    opt.step()\n"
    )
    outcome, _ = run(folder, text)
    assert [(f.file, f.line, f.count) for f in outcome.findings] == [("net.py", 10, 3)]
    assert set(outcome.files) == {"net.py", "script.py"}


def test_what_a_mover_in_a_package_leaves_behind_is_reported_at_its_line(folder: Path) -> None:
    package = folder / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(
        "import torch\n\n\ndef move(batch, device):\n    return {\n"
        "        'x': batch['x'].to(device),\n        'y': batch['y'],\n    }\n\n\n"
        "def step(net, batch):\n    batch = move(batch, 'cuda')\n"
        "    return torch.nn.functional.mse_loss(net(batch['x']), batch['y'])\n"
    )
    text = TRAINING + (
        "from lib.engine import step\n"
        "for _ in range(3):\n    optimizer.zero_grad()\n"
        "    step(model, {'x': torch.ones(2, 4), 'y': torch.ones(2, 1)}).backward()\n"
        "    optimizer.step()\n"
    )
    outcome, _ = run(folder, text)
    (finding,) = [f for f in outcome.findings if f.severity == "error"]
    assert (finding.code, finding.file, finding.line) == ("HST109", "lib/engine.py", 7)
    named = {(place.file, place.line) for place in finding.related}
    assert {("lib/engine.py", 13), ("lib/engine.py", 6), ("script.py", 10)} <= named


def test_devices_without_work_under_data_parallel(folder: Path) -> None:
    text = (
        "import torch\nfrom torch import nn\n"
        "net = nn.DataParallel(nn.Linear(3, 1).cuda())\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    opt.zero_grad()\n"
        "    net(torch.ones(2, 3, device='cuda')).sum().backward()\n    opt.step()\n"
    )
    outcome, _ = run(folder, text, devices=4)
    assert [(f.code, f.line) for f in outcome.findings] == [("HST142", 7)]
    outcome, _ = run(folder, text, devices=2)
    assert outcome.findings == ()


def test_what_is_made_on_the_cpu_and_moved_in_each_step_is_suggested(folder: Path) -> None:
    text = TRAINING + (
        "for _ in range(9):\n"
        "    noise = torch.randn(2, 4)\n"
        "    loss = model(noise.cuda()).mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    outcome, _ = run(folder, text)
    assert [(f.code, f.line, f.severity) for f in outcome.findings] == [("HST137", 9, "suggestion")]


EVERY = TRAINING + (
    "class Wrapper:\n"
    "    def __init__(self, base, every):\n"
    "        self.base, self.every, self.n = base, every, 0\n"
    "        self.slow = torch.zeros(1, 4)\n"
    "    def step(self):\n"
    "        self.base.step()\n"
    "        self.n += 1\n"
    "        if self.n % self.every == 0:\n"
    "            self.slow = self.slow + model.weight.detach()\n"
    "wrapper = Wrapper(optimizer, {every})\n"
    "for step in range(1000):\n"
    "    loss = model(torch.randn(2, 4, device='cuda')).mean()\n"
    "    optimizer.zero_grad(); loss.backward(); wrapper.step()\n"
)


def test_a_loop_runs_on_until_what_comes_every_few_steps_was_seen(folder: Path) -> None:
    outcome, _ = run(folder, EVERY.replace("{every}", "7"))
    assert outcome.steps == 8
    assert [(f.code, f.line) for f in outcome.findings if f.severity == "error"] == [("HST104", 10)]
    outcome, _ = run(folder, EVERY.replace("{every}", "900"))
    assert outcome.steps == 3


def test_a_list_that_stands_still_is_no_growing_memory(folder: Path) -> None:
    text = TRAINING + (
        "def step(kept):\n"
        "    loss = model(torch.randn(2, 4, device='cuda')).mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    return loss\n"
        "first = [step(None)]\n"
        "for _ in range(5):\n    step(first)\n"
        "grown = []\n"
        "for _ in range(5):\n    grown.append(step(first))\n"
    )
    outcome, _ = run(folder, text)
    assert [(f.code, f.line) for f in outcome.findings] == [("HST122", 16)]


ON_A_DEVICE = (
    "import torch\n"
    "device = torch.device(DEVICE)\n"
    "model = torch.nn.Linear(2, 1).to(device)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "def train():\n"
    "    for step in range(8):\n"
    "        optimizer.zero_grad()\n"
    "        loss = model(torch.ones(1, 2, device=device)).sum()\n"
    "        loss.backward()\n"
    "        optimizer.step()\n"
    "        print(loss.item())\n"
    "if __name__ == '__main__':\n"
    "    train()\n"
)


@pytest.mark.parametrize(("device", "said"), [("cpu", True), ("cuda", False)])
def test_a_script_that_stays_on_the_cpu_is_said_to_do_so(
    folder: Path, device: str, said: bool
) -> None:
    outcome, _ = run(folder, ON_A_DEVICE.replace("DEVICE", repr(device)))
    assert any("put nothing on the device" in sentence for sentence in outcome.said) is said


def test_the_call_that_starts_the_program_is_no_place_of_a_fault(folder: Path) -> None:
    outcome, _ = run(folder, ON_A_DEVICE.replace("DEVICE", "'cuda'"))
    (wait,) = outcome.findings
    assert (wait.code, wait.line, wait.related) == ("HST120", 11, ())
    again = ON_A_DEVICE.replace("    train()\n", "    for run in range(2):\n        train()\n")
    outcome, _ = run(folder, again.replace("DEVICE", "'cuda'"))
    assert [place.line for place in outcome.findings[0].related] == [14]
