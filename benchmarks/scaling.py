"""Weak scaling: a step on two processes of one thread each, beside plain DDP and its peers.

    python benchmarks/scaling.py [--rounds 15] [--steps 24] [--case cnn|mlp|all] [--json FILE]

Each process trains on 64 samples a step, so two do twice the work of one in the time of one if
nothing is lost. All contenders train the same model from the same weights on batches that lie
ready in memory, in one launch of two processes (gloo, loopback), and take turns, each round in
another order; each turn is timed as a whole and divided by its steps. What is printed is the
median over the rounds and the median of the ratios to plain DDP *of the same round*. "One process
alone" is timed in turn as well, while the other waits: what is lost to it is the efficiency.
hasten runs with its timing and progress on. Peers that are not installed are left out
(`pip install hasten[bench]`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hasten
import turns

EACH = 64
Batch = tuple[torch.Tensor, torch.Tensor]
Contender = Callable[[nn.Module, list[Batch]], float]


def cnn() -> tuple[nn.Module, Batch]:
    """The small CNN of `hasten train` on 28x28 images, 64 a process."""
    from hasten.vision import models

    model = models.create("small", classes=10, channels=1, image_size=28)
    return model, (torch.randn(2 * EACH, 1, 28, 28), torch.randint(0, 10, (2 * EACH,)))


def mlp() -> tuple[nn.Module, Batch]:
    """256 -> 1024 -> 1024 -> 10, 64 a process: 1.3 million weights to agree on in a short step."""
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    return model, (torch.randn(2 * EACH, 256), torch.randint(0, 10, (2 * EACH,)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def mine(batches: list[Batch]) -> list[Batch]:
    """This process's half of each batch of all."""
    part = slice(dist.get_rank() * EACH, (dist.get_rank() + 1) * EACH)
    return [(data[part], labels[part]) for data, labels in batches]


def lesson_loop(model: nn.Module, batches: list[Batch]) -> float:
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    model.train()
    dist.barrier()
    began = time.perf_counter()
    total = torch.zeros(())
    for data, labels in batches:
        loss = loss_of(model(data), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    total.item()
    return time.perf_counter() - began


def plain_ddp(model: nn.Module, batches: list[Batch]) -> float:
    return lesson_loop(DistributedDataParallel(model), mine(batches))


def tuned_ddp(model: nn.Module, batches: list[Batch]) -> float:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return lesson_loop(wrapped, mine(batches))


def trainer(model: nn.Module, batches: list[Batch]) -> float:
    training = hasten.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer_of(model),
        device="cpu",
        precision="float32",
        channels_last=False,
        stream=io.StringIO(),
        progress="bar",
    )
    return training.fit(batches, epochs=1).seconds


def own_loop(model: nn.Module, batches: list[Batch]) -> float:
    run = hasten.Run(device="cpu", precision="float32", stream=io.StringIO(), progress="bar")
    model, optimizer = run.prepare(model, optimizer_of(model))
    loss_of = nn.CrossEntropyLoss()
    for _ in run.epochs(1):
        model.train()
        for data, labels in run.batches(batches):
            run.backward(loss_of(model(data), labels))
            run.step(optimizer)
    return run.history[0].seconds


def lightning_trainer(model: nn.Module, batches: list[Batch]) -> float:
    import lightning

    class Ready(torch.utils.data.IterableDataset[Batch]):
        def __iter__(self) -> Any:
            return iter(mine(batches))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_of = model, nn.CrossEntropyLoss()
            self.began = self.seconds = 0.0

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            data, labels = batch
            return self.loss_of(self.model(data), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

        def on_train_epoch_start(self) -> None:
            self.began = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            self.seconds = time.perf_counter() - self.began

    module = Module()
    fitting = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    fitting.fit(module, torch.utils.data.DataLoader(Ready(), batch_size=None))
    return module.seconds


def alone(model: nn.Module, batches: list[Batch]) -> float:
    """The first process on its half of the batches, while the other one waits."""
    took = 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
        ready = mine(batches)
        began = time.perf_counter()
        for data, labels in ready:
            loss_of(model(data), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        took = time.perf_counter() - began
    dist.barrier()
    return took


CONTENDERS: dict[str, tuple[Contender, str | None]] = {
    "plain DDP": (plain_ddp, None),
    "DDP, bucket views": (tuned_ddp, None),
    "hasten Trainer": (trainer, None),
    "hasten Run": (own_loop, None),
    "Lightning Trainer": (lightning_trainer, "lightning"),
    "one process alone": (alone, None),
}


def measure(case: Callable[[], tuple[nn.Module, Batch]], rounds: int, steps: int) -> list[Any]:
    torch.manual_seed(0)
    model, batch = case()
    batches = [batch] * steps

    def turn(contender: Contender) -> float:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return contender(copy.deepcopy(model), batches)

    contenders = turns.installed(CONTENDERS)
    return turns.take({name: partial(turn, it) for name, it in contenders.items()}, rounds, steps)


def work(options: argparse.Namespace) -> None:
    """In each of the two processes."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {
        name: measure(case, options.rounds, options.steps)
        for name, case in (("cnn", cnn), ("mlp", mlp))
        if options.case in (name, "all")
    }
    if dist.get_rank() == 0:
        Path(options.work).write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--case", choices=["cnn", "mlp", "all"], default="all")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    facts = turns.facts(
        cpu=hasten.devices.runtime.name(torch.device("cpu")),
        cores=hasten.devices.runtime.cores(),
        rounds=options.rounds,
        steps=options.steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [sys.executable, *launcher, __file__, *sys.argv[1:], "--work", str(path)]
        subprocess.run(command, check=True)
        results = json.loads(path.read_text())
    for name, rows in results.items():
        turns.show(globals()[name], name, rows, "plain DDP")
    turns.keep(options.json, {"facts": facts, **results})


if __name__ == "__main__":
    main()
