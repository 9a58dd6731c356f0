"""What `hasten check SCRIPT` costs against the same script on the CPU, cut to the same steps.

    python benchmarks/check_cost.py [--rounds 7] [--case cnn|mlp|transformer|resnet|all]

Each case is a plain training script. `python script.py 3` ends after three steps; `hasten check
script.py` is given the whole script and ends it by itself. The two take turns, each in a process
of its own, imports included. What is printed are the medians of the seconds, the median ratio of
the check to the script *of the same round*, and the bound that the check must keep: less than
three times the script, plus 2 s. `hasten.simulate()` alone is timed by `--case steps`: the step
of a small CNN and of a tiny perceptron in one process, on the simulated device and on the CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HEAD = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
torch.manual_seed(0)
"""
TAIL = """
model = model.to(device)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
done = 0
for epoch in range(3):
    model.train()
    for data, labels in DataLoader(dataset, batch_size={batch}, shuffle=True):
        data, labels = data.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(data), labels)
        loss.backward()
        optimizer.step()
        done += 1
        if done >= steps:
            sys.exit(0)
"""
MODELS = {
    "cnn": (
        """\
dataset = TensorDataset(torch.rand(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
)
""",
        "Adam",
        64,
    ),
    "mlp": (
        """\
dataset = TensorDataset(torch.rand(2048, 64), torch.randint(0, 10, (2048,)))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
""",
        "SGD",
        64,
    ),
    "transformer": (
        """\
dataset = TensorDataset(torch.randint(0, 1000, (512, 64)), torch.randint(0, 10, (512,)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


model = Classifier()
""",
        "AdamW",
        16,
    ),
    "resnet": (
        """\
dataset = TensorDataset(torch.rand(256, 3, 32, 32), torch.randint(0, 10, (256,)))


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        out = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.norm2(self.second(out)) + self.short(x))


widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
blocks = [Block(*width) for width in widths]
stem = nn.Conv2d(3, 64, 3, 1, 1)
pool = nn.AdaptiveAvgPool2d(1)
model = nn.Sequential(stem, *blocks, pool, nn.Flatten(), nn.Linear(512, 10))
""",
        "SGD",
        16,
    ),
}
STEPS = 3


def seconds_of(command: list[str], folder: str, statuses: tuple[int, ...]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - began
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return taken


def check_case(name: str, rounds: int) -> None:
    """One script, with and without the check, in turns."""
    model, optimizer, batch = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        tail = TAIL.format(optimizer=optimizer, batch=batch)
        Path(folder, "script.py").write_text(HEAD + model + tail)
        plain = [sys.executable, "script.py", str(STEPS)]
        start = "from hasten.cli.app import main; main()"
        check = [sys.executable, "-c", start, "check", "--steps", str(STEPS), "script.py"]
        pairs = []
        for _ in range(rounds + 1):
            pairs.append((seconds_of(plain, folder, (0,)), seconds_of(check, folder, (0, 1))))
    pairs = pairs[1:]  # the first pair fills the file system's cache
    script = statistics.median(one for one, _ in pairs)
    checked = statistics.median(two for _, two in pairs)
    ratio = statistics.median(two / one for one, two in pairs)
    room = statistics.median((3 * one + 2) - two for one, two in pairs)
    print(
        f"  {name:12} script {script:5.2f} s   check {checked:5.2f} s   {ratio:5.2f} x   "
        f"{room:5.2f} s below 3 x + 2 s",
        flush=True,
    )


def step_case(rounds: int) -> None:
    """A step in one process: on the CPU and on the simulated device, in turns."""
    import torch
    from torch import nn

    import hasten

    def cnn() -> tuple[nn.Module, torch.Tensor]:
        body = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(4608, 10)), torch.rand(32, 1, 28, 28)

    def mlp() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.rand(16, 16)

    def stepper(
        make: Callable[[], tuple[nn.Module, torch.Tensor]], device: str
    ) -> Callable[[], None]:
        torch.manual_seed(0)
        model, data = make()
        model, data = model.to(device), data.to(device)
        labels = torch.randint(0, 4, (len(data),)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), labels).backward()
            optimizer.step()

        return step

    def timed(step: Callable[[], None], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - began) / times

    for name, make, times in (("small cnn", cnn, 10), ("tiny mlp", mlp, 100)):
        with hasten.simulate():
            device = stepper(make, "cuda")
            timed(device, 3)
        pairs = []
        for _ in range(rounds):
            host = stepper(make, "cpu")
            timed(host, 3)
            one = timed(host, times)
            with hasten.simulate():
                device = stepper(make, "cuda")
                timed(device, 3)
                pairs.append((one, timed(device, times)))
        plain = statistics.median(one for one, _ in pairs) * 1e6
        simulated = statistics.median(two for _, two in pairs) * 1e6
        ratio = statistics.median(two / one for one, two in pairs)
        print(f"  {name:12} cpu {plain:8,.0f} us   simulated {simulated:8,.0f} us   {ratio:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--case", choices=[*MODELS, "steps", "all"], default="all")
    given = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(
        f"python {platform.python_version()}, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, "
        f"load {os.getloadavg()[0]:.1f}, rounds {given.rounds}"
    )
    if given.case != "steps":
        print(f"hasten check, {STEPS} steps:")
        for name in MODELS if given.case == "all" else [given.case]:
            check_case(name, given.rounds)
    if given.case in ("steps", "all"):
        print("a step on the simulated device:")
        step_case(given.rounds)


if __name__ == "__main__":
    main()
