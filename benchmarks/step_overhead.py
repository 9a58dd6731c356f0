"""Per-step overhead of hasten's Trainer and Run, and of its peers, against the plain loop.

    python benchmarks/step_overhead.py [--rounds 15] [--case mlp|cnn|all] [--device cpu]
        [--json FILE]

Every contender trains the same model from the same weights on the same batches, which lie ready
in memory, with the same optimizer; the contenders take turns, and each turn is timed as a whole
and divided by its steps. What is printed is the median over the rounds, and the median of the
ratios to the plain loop *of the same round*, so that a noisy machine slows both alike. hasten
runs with its timing, progress and log on; Lightning is shown without and with its log and bar.
Peers that are not installed are left out (`pip install hasten[bench]`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hasten
import turns


class Batches:
    """Batches that lie ready in memory, gone through several times an epoch: the same for all.
    (A bare list means several loaders to Lightning.)"""

    def __init__(self, ready: list[tuple[torch.Tensor, torch.Tensor]], times: int = 1) -> None:
        self.ready, self.times = ready, times

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.chain.from_iterable(itertools.repeat(self.ready, self.times))

    def __len__(self) -> int:
        return len(self.ready) * self.times


Contender = Callable[[nn.Module, Batches], float]
DEVICE = torch.device("cpu")


def mlp() -> tuple[nn.Module, Batches]:
    """64 -> 64 -> 10, batch 64: the step is so short that overhead shows."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    ready = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(400)]
    return model, Batches(ready, times=5)


def cnn() -> tuple[nn.Module, Batches]:
    """The small CNN of `hasten train` on 28x28 images, batch 64."""
    from hasten.vision import models

    model = models.create("small", classes=10, channels=1, image_size=28)
    ready = [(torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))) for _ in range(12)]
    return model, Batches(ready)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(model: nn.Module, batches: Batches) -> float:
    """The loop of every lesson, its loss summed without a wait at each step."""
    device = DEVICE
    model.to(device)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    model.train()
    began = time.perf_counter()
    total = torch.zeros((), device=device)
    for data, labels in batches:
        data, labels = data.to(device), labels.to(device)
        loss = loss_of(model(data), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    total.item()
    return time.perf_counter() - began


def trainer(model: nn.Module, batches: Batches) -> float:
    with tempfile.TemporaryDirectory() as folder:
        training = hasten.Trainer(
            model,
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer_of(model),
            device=DEVICE,
            precision="float32",
            channels_last=False,
            folder=Path(folder) / "run",
            stream=io.StringIO(),
            progress="bar",
        )
        return training.fit(batches, epochs=1).seconds


def own_loop(model: nn.Module, batches: Batches) -> float:
    run = hasten.Run(device=DEVICE, precision="float32", stream=io.StringIO(), progress="bar")
    model, optimizer = run.prepare(model, optimizer_of(model))
    loss_of = nn.CrossEntropyLoss()
    for _ in run.epochs(1):
        model.train()
        for data, labels in run.batches(batches):
            run.backward(loss_of(model(data), labels))
            run.step(optimizer)
    return run.history[0].seconds


def lesson_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    backward: Callable[[torch.Tensor], None],
) -> float:
    """The plain loop's body with a peer's own backward call; seconds."""
    loss_of = nn.CrossEntropyLoss()
    model.train()
    began = time.perf_counter()
    total = torch.zeros((), device=DEVICE)
    for data, labels in batches:
        data, labels = data.to(DEVICE), labels.to(DEVICE)
        loss = loss_of(model(data), labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    total.item()
    return time.perf_counter() - began


def accelerate(model: nn.Module, batches: Batches) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return lesson_loop(model, optimizer, batches, accelerator.backward)


def fabric(model: nn.Module, batches: Batches) -> float:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator=DEVICE.type, devices=1)
    model, optimizer = lightning.setup(model, optimizer_of(model))
    return lesson_loop(model, optimizer, batches, lightning.backward)


def lightning_trainer(model: nn.Module, batches: Batches, *, watched: bool = False) -> float:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_of = model, nn.CrossEntropyLoss()
            self.began = self.seconds = 0.0

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            data, labels = batch
            loss = self.loss_of(self.model(data), labels)
            if watched:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

        def on_train_epoch_start(self) -> None:
            self.began = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            self.seconds = time.perf_counter() - self.began

    module = Module()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        fitting = lightning.Trainer(
            accelerator=DEVICE.type,
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder) if watched else False,
            enable_checkpointing=False,
            enable_progress_bar=watched,
            enable_model_summary=False,
        )
        with contextlib.redirect_stderr(io.StringIO()):
            fitting.fit(module, batches)
    return module.seconds


def watched_lightning(model: nn.Module, batches: Batches) -> float:
    return lightning_trainer(model, batches, watched=True)


CONTENDERS: dict[str, tuple[Contender, str | None]] = {
    "plain loop": (plain, None),
    "hasten Trainer": (trainer, None),
    "hasten Run": (own_loop, None),
    "Accelerate": (accelerate, "accelerate"),
    "Lightning Fabric": (fabric, "lightning"),
    "Lightning Trainer": (lightning_trainer, "lightning"),
    "Lightning, log + bar": (watched_lightning, "lightning"),
}


def measure(case: Callable[[], tuple[nn.Module, Batches]], rounds: int) -> list[turns.Row]:
    torch.manual_seed(0)
    model, batches = case()

    def turn(contender: Contender) -> float:
        return contender(copy.deepcopy(model), batches)

    contenders = {name: partial(turn, it) for name, it in turns.installed(CONTENDERS).items()}
    return turns.take(contenders, rounds, len(batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", choices=["mlp", "cnn", "all"], default="all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    global DEVICE
    DEVICE = hasten.device(options.device)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    facts = turns.facts(
        threads=torch.get_num_threads(),
        device=f"{DEVICE} ({hasten.devices.runtime.name(DEVICE)})",
        rounds=options.rounds,
    )
    results: dict[str, object] = {"facts": facts}
    for name, case in (("mlp", mlp), ("cnn", cnn)):
        if options.case in (name, "all"):
            rows = results[name] = measure(case, options.rounds)
            turns.show(case, name, rows, "plain")
    turns.keep(options.json, results)


if __name__ == "__main__":
    main()
