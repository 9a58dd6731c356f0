"""What one process and several must come to the same with; run under a launcher it writes that."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten
from hasten.train import manifest, pieces, weights

CASES: dict[str, Callable[[], Any]] = {}


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    CASES[make.__name__] = make
    return make


def data(count: int = 43) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(count, 6, generator=generator)
    return TensorDataset(points, (points.sum(1) > 0).long() + (points[:, 0] > 1).long())


class Noted(Dataset[Any]):
    """Samples one by one; notes which were asked for."""

    def __init__(self) -> None:
        self.table = data()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.table[index]


class Fetched(Noted):
    """Samples that threads may make."""

    def fetch(self, index: int, key: int) -> Any:
        return (self.table[index][0] + key % 7 / 100, self.table[index][1])


def mlp(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 3))


class Halves(nn.Module):
    """A part that is never used, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "precision": "float32",
    "channels_last": False,
    "progress": "off",
}


def fit(
    train: Iterable[Any],
    model: nn.Module | None = None,
    epochs: int = 4,
    val: Iterable[Any] | None = None,
    loss: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train: 4 epochs of 6 steps by default; what came of it."""
    model, loss = model or mlp(), loss or nn.CrossEntropyLoss()
    options = {"optimizer": sgd} | OPTIONS | options
    trainer = hasten.Trainer(model, loss=loss, **options)
    val = val or hasten.Loader(data(37), batch_size=9)
    result = trainer.fit(train, val, epochs=epochs)
    assert result.evaluation is not None and trainer.run is not None
    return {
        "state": trainer.run.strategy.whole(weights.state_of(model)),
        "losses": [(epoch.loss, epoch.val_loss) for epoch in result.history],
        "samples": result.evaluation.samples,
        "confusion": result.evaluation.confusion,
        "step": result.history[-1].step,
    }


def loader(plan: str = "gather", of: Any = None, batch_size: int = 8) -> hasten.Loader:
    workers: Any = {"processes": 1, "threads": 2}.get(plan, "auto")
    return hasten.Loader(
        of or data(), batch_size=batch_size, shuffle=True, plan=plan, num_workers=workers
    )


@case
def gather() -> Any:
    return fit(loader())


@case
def inline() -> Any:
    noted = Noted()
    with loader("inline", noted) as train:
        found = fit(train)
    return found | {"order": noted.asked}


@case
def threads() -> Any:
    with loader("threads", Fetched()) as train:
        return fit(train)


@case
def processes() -> Any:
    with loader("processes", Noted()) as train:
        return fit(train, epochs=1)


@case
def one_sample_in_the_last_batch() -> Any:
    """43 = 3 * 14 + 1: a process without a sample takes the step all the same."""
    return fit(loader(batch_size=14))


@case
def a_sampler() -> Any:
    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(43).tolist(), 40)
    return fit(hasten.Loader(data(), batch_size=8, sampler=sampler))


@case
def a_dataloader() -> Any:
    return fit(DataLoader(data(), batch_size=8, shuffle=True))


@case
def a_dataloader_with_workers() -> Any:
    return fit(DataLoader(data(), batch_size=8, shuffle=True, num_workers=1), epochs=2)


class DrawsFirst(torch.utils.data.Sampler[list[int]]):
    """Draws all batches when it starts, before the DataLoader draws."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(43).tolist()
        return iter([order[:7], order[7:9], order[9:10], order[10:30], order[30:]])


@case
def batches_of_any_size() -> Any:
    return fit(DataLoader(data(), batch_sampler=DrawsFirst()))


@case
def a_list() -> Any:
    points, labels = data()[:]
    return fit(list(zip(points.split(8), labels.split(8), strict=True)))


@case
def accumulated() -> Any:
    return fit(loader(), accumulate=4, clip_norm=0.5)


@case
def patience() -> Any:
    """The accuracy stands still from some epoch on, alike for all."""
    found = fit(loader(), epochs=40, patience=2)
    assert found["step"] < 40 * 6
    return found


@case
def unused() -> Any:
    return fit(loader(), model=Halves())


@case
def adamw_and_schedule() -> Any:
    model = mlp()
    trainer = hasten.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        lr=0.01,
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
        **OPTIONS,
    )
    result = trainer.fit(loader(), hasten.Loader(data(37), batch_size=9), epochs=6)
    return {
        "state": weights.state_of(model),
        "losses": [(epoch.loss, epoch.learning_rate) for epoch in result.history],
    }


@case
def a_loop_of_ones_own() -> Any:
    model = mlp()
    run = hasten.Run(**OPTIONS)
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    train, val, right = loader(), hasten.Loader(data(3), batch_size=1), 0.0
    for _ in run.epochs(3):
        for x, y in run.batches(train):
            run.backward(nn.functional.cross_entropy(model(x), y))
            run.step(optimizer)
        with torch.no_grad():
            for x, _ in run.batches(val):
                right += len(x)
    return {"state": weights.state_of(model), "read": run.world.sum([right])}


@case
def a_sum() -> Any:
    return fit(loader(batch_size=14), loss=nn.CrossEntropyLoss(reduction="sum"))


@case
def weights_of_classes() -> Any:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 7.0]), label_smoothing=0.1)
    return fit(loader(), loss=weighted)


@case
def weights_of_classes_accumulated() -> Any:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 7.0]))
    return fit(loader(), loss=weighted, accumulate=4)


class Tokens(nn.Module):
    """Scores of three classes at each of five places: [N, 6] to [N, 3, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 3, 5)


def tokens() -> TensorDataset:
    """Sentences of one to five words; in some batches only one process has any."""
    points, labels = data()[:]
    lengths = torch.arange(43) % 7 - 1
    padded = torch.where(torch.arange(5) < lengths[:, None], labels[:, None], -100)
    return TensorDataset(points, padded)


@case
def labels_that_are_ignored() -> Any:
    return fit(loader(of=tokens(), batch_size=2), Tokens(), val=loader(of=tokens()))


def masked_mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = labels >= 0
    each = nn.functional.cross_entropy(outputs, labels.clamp(min=0), reduction="none")
    return (each * kept).sum() / kept.sum().clamp(min=1)


@case
def a_mean_over_a_mask() -> Any:
    return fit(
        loader(of=tokens(), batch_size=2),
        Tokens(),
        val=loader(of=tokens()),
        loss=masked_mean,
        loss_over=lambda outputs, labels: (labels >= 0).sum(),
        accumulate=3,
    )


class Methods(nn.Module):
    """Trained by another method than its call, and by a part's call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


@case
def by_a_method() -> Any:
    model, run = Methods(), hasten.Run(**OPTIONS)
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    for _ in run.epochs(3):
        for x, y in run.batches(loader()):
            run.backward(model.loss(x, y))
            run.step(optimizer)
    return {"state": weights.state_of(model)}


@case
def a_norm_over_all() -> Any:
    several = torch.distributed.is_initialized()
    return fit(loader(), model=mlp(norm=True), sync_batchnorm=several)


def deep() -> nn.Module:
    """With parts that FSDP brings together one by one."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 64)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 64), nn.Sequential(*blocks), nn.Linear(64, 3))


def in_parts() -> dict[str, Any]:
    """Models whose weights lie in parts; the options are those of the launched processes."""
    several = torch.distributed.is_initialized()
    chosen: Any = {"strategy": "fsdp"} if several else {}
    return {
        "small": fit(loader(batch_size=14), **chosen),
        "deep": fit(loader(), model=deep(), epochs=1, accumulate=2, clip_norm=0.5, **chosen),
        "norm": fit(loader(), model=mlp(norm=True), sync_batchnorm=several, **chosen),
        "fused": fit(loader(), optimizer=torch.optim.SGD, **chosen),
        "made before": fit(loader(), (made := mlp()), optimizer=adagrad(made), **chosen),
        "stepped": fit(loader(), (model := mlp()), optimizer=stepped(model), **chosen),
    }


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Has state from the beginning."""
    return torch.optim.Adagrad(model.parameters())


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Has state, and kept the model's weights."""
    optimizer = adamw(model.parameters())
    model(data()[:][0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def thinly_spread() -> dict[str, Any]:
    """A last batch of 3 samples, which leaves one of four processes without any."""
    several = torch.distributed.is_initialized()
    found = {}
    for strategy in ("ddp", "fsdp"):
        chosen: Any = {"strategy": strategy, "sync_batchnorm": True} if several else {}
        val = hasten.Loader(data(5), batch_size=2)
        found[strategy] = fit(loader(batch_size=40), mlp(norm=True), 3, val, **chosen)
    return found


class Spoils:
    """A loss that is NaN in the last process from its n-th call on."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs, labels)
        bad = self.calls >= self.at and rank() == torch.distributed.get_world_size() - 1
        return loss * torch.nan if bad else loss


class Hungry(nn.Module):
    """Runs out of memory with more samples than this process has room for."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.layer, self.room = nn.Linear(6, 3), room

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return self.layer(x)


def agreements(target: Path) -> dict[str, Any]:
    """What one process alone knows, and all have to act on."""
    import torchmetrics

    found: dict[str, Any] = {}
    for where, folder in (("nan", target / "nan"), ("nan unsaved", None)):
        bad = hasten.Trainer(
            mlp(), loss=Spoils(9), loss_over="samples", optimizer=sgd, folder=folder, **OPTIONS
        )
        try:
            bad.fit(loader(), epochs=4)
        except hasten.HastenError as error:
            assert bad.run is not None
            found[where] = (type(error).__name__, str(error), bad.run.epoch)
    room = 1000 if rank() == 0 else 10
    hungry = hasten.Trainer(Hungry(room), loss=nn.CrossEntropyLoss(), optimizer=sgd, **OPTIONS)
    plan = hungry.fitting_batch(lambda size: hasten.Loader(data(), batch_size=size), 32)
    found["memory"] = tuple(plan)
    measured = hasten.Trainer(
        mlp(),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        metrics={"f1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro")},
        **OPTIONS,
    )
    found["metric"] = measured.evaluate(hasten.Loader(data(), batch_size=20)).metrics["f1"]
    found["said"] = {name: told_of(loss) for name, loss in LOSSES.items()}
    # The first process tries precisions while the others wait, norms over all included.
    choosing: dict[str, Any] = {"sync_batchnorm": True, "precision": "auto"}
    found["chosen"] = fit(loader(), mlp(norm=True), 1, **choosing)["step"]
    found["collectives"] = [collectives(batch_size) for batch_size in (8, 2)]
    found["unused"] = told_of(nn.CrossEntropyLoss(), Halves())
    stream = io.StringIO()
    telling = {"stream": stream, "progress": "plain"}
    fit(loader(), epochs=1, **telling)
    found["batch"] = stream.getvalue()
    found["sums"] = hasten.Run(**OPTIONS).world.sum([rank(), 1.0])
    return found


LOSSES: dict[str, Any] = {
    "sum": lambda outputs, labels: nn.functional.cross_entropy(outputs, labels, reduction="sum"),
    "one over another": lambda outputs, labels: (
        nn.functional.mse_loss(outputs, labels.float()[:, None]) ** 0.5
    ),
    "mean": lambda outputs, labels: nn.functional.cross_entropy(outputs, labels),
}


def collectives(batch_size: int) -> int:
    """How often processes speak with each other in an epoch, but for DDP's own gradients."""
    calls, before = [0], {}
    for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "broadcast"):
        before[name] = getattr(torch.distributed, name)

        def counted(*given: Any, act: Any = before[name], **options: Any) -> Any:
            calls[0] += 1
            return act(*given, **options)

        setattr(torch.distributed, name, counted)
    ticks = itertools.count()
    try:  # a clock that hardly moves: what is agreed on by time is left out
        fit(loader(batch_size=batch_size), epochs=2, clock=lambda: next(ticks) * 1e-9)
    finally:
        for name, act in before.items():
            setattr(torch.distributed, name, act)
    return calls[0]


def told_of(loss: Any, model: nn.Module | None = None) -> str:
    """What is said of a loss that is called as a mean over samples, or of a model."""
    stream = io.StringIO()
    quiet = OPTIONS | {"progress": "plain", "stream": stream}
    hasten.Trainer(model or mlp(), loss=loss, optimizer=sgd, **quiet).fit(loader(), epochs=1)
    return stream.getvalue()


class Stops:
    """A loss that is a signal to one of the processes at its n-th call."""

    def __init__(self, at: int, rank: int) -> None:
        self.at, self.rank, self.calls = at, rank, 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at and rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.cross_entropy(outputs, labels)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def journey(
    folder: Path | None,
    *,
    stop: int = 0,
    dropout: float = 0.0,
    plain: bool = False,
    **options: Any,
) -> Any:
    """Train for 4 epochs of 6 steps; a signal to the last process stops it at a step.

    `plain` takes a DataLoader of whole tensors.
    """
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)
    model = nn.Sequential(*layers, nn.LayerNorm(3))  # three of its tensors have one shape
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    trainer = hasten.Trainer(
        model,
        loss=Stops(stop, last),
        loss_over="samples",
        optimizer=adamw,
        folder=folder,
        **OPTIONS | options,
    )
    noted = Noted()
    given = DataLoader(data(), 8, shuffle=True) if plain else loader("inline", noted)
    try:
        result = trainer.fit(given, epochs=4)
    except hasten.Interrupted as error:
        assert trainer.run is not None
        return {"stopped": trainer.run.global_step, "status": error.exit_status}
    assert trainer.run is not None
    state = trainer.run.strategy.whole(weights.state_of(model))
    losses = [epoch.loss for epoch in result.history]
    return {"state": state, "losses": losses, "order": noted.asked, "feed": result.feed}


class StopsReading(torch.utils.data.Dataset[Any]):
    """Samples to validate on; reading one of them for the n-th time is a signal to a process."""

    def __init__(self, at: int, rank: int) -> None:
        self.at, self.rank, self.read = at, rank, 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read == self.at and rank() == self.rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return data(40)[index]


def validated(folder: Path | None, *, stop: int = 0, **options: Any) -> Any:
    """Train for 3 epochs; a signal that comes in a validation of 20 batches stops it there."""
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    reads = StopsReading(stop, last)
    model = mlp()
    trainer = hasten.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        folder=folder,
        clock=itertools.count().__next__,  # so slow that all batches are agreed after
        **OPTIONS | options,
    )
    try:
        result = trainer.fit(
            loader(), hasten.Loader(reads, batch_size=2, plan="inline", num_workers=0), epochs=3
        )
    except hasten.Interrupted as error:
        assert trainer.run is not None
        found = {"stopped": trainer.run.global_step, "status": error.exit_status}
        return found | {"epochs": len(trainer.run.history), "read": reads.read}
    assert trainer.run is not None
    state = trainer.run.strategy.whole(weights.state_of(model))
    return {"state": state, "losses": [(e.loss, e.val_loss) for e in result.history]}


def stopped_in_validation(target: Path) -> dict[str, Any]:
    """Both strategies: ddp leaves a process without samples out of a batch, fsdp does not."""
    found = {}
    for name in ("ddp", "fsdp"):
        place: dict[str, Any] = {"folder": target / f"validating {name}", "strategy": name}
        share = 20  # samples that each of two processes reads in a validation
        found[name] = {
            "undisturbed": validated(None, strategy=name),
            "stopped": validated(stop=share + 5, **place),
            "gone on": validated(resume=True, **place),
        }
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def checked(folder: Path) -> Any:
    """Go on, and note which files of parts this process has read against their checksums, and how
    many bytes of tensors in parts it has brought into its memory."""
    read, names = pieces.PartFile._digest, set[str]()
    fill, brought = pieces._fill, [0]

    def filled(target: torch.Tensor, stored: pieces.Stored) -> None:
        local = target.to_local() if isinstance(target, DTensor) else target
        brought[0] += local.nbytes
        fill(target, stored)

    def noted(file: pieces.PartFile) -> str:
        names.add(file.name)
        return read(file)

    pieces.PartFile._digest = noted  # type: ignore[method-assign]
    pieces._fill = filled
    try:
        found = journey(folder, resume=True, strategy="fsdp")
        return found | {"checked": names, "brought": brought[0]}
    finally:
        pieces._fill = fill
        pieces.PartFile._digest = read  # type: ignore[method-assign]


def journeys(target: Path) -> dict[str, Any]:
    """Stopped by several processes or by one, gone on with by others."""

    def copied(name: str, new: str) -> Path:
        if rank() == 0:
            shutil.copytree(target / name, target / new)
        torch.distributed.barrier()
        return target / new

    def damaged(name: str, new: str) -> Path:
        """One bit of what the last process has saved of the newest checkpoint is another."""
        place = copied(name, new)
        newest = sorted((place / "checkpoints").glob("step-*"))[-1]
        if rank() == 0:
            part = newest / manifest.part_name(1)
            part.write_bytes(part.read_bytes()[:-1] + b"!")
        torch.distributed.barrier()
        return place

    wet: dict[str, Any] = {"dropout": 0.5}
    return {
        "ddp": journey(None),
        "dropout": journey(None, **wet),
        "dropout stopped": journey(target / "dropout", stop=8, **wet),
        "dropout gone on": journey(target / "dropout", resume=True, **wet),
        "ddp stopped": journey(target / "ddp", stop=8),
        "ddp to fsdp": journey(copied("ddp", "a"), resume=True, strategy="fsdp"),
        "fsdp stopped": journey(target / "fsdp", stop=8, strategy="fsdp"),
        "fsdp to ddp": journey(copied("fsdp", "b"), resume=True),
        "fsdp gone on": checked(copied("fsdp", "c")),
        "fsdp damaged": journey(damaged("fsdp", "f"), resume=True, strategy="fsdp"),
        "alone to ddp": journey(copied("alone", "d"), resume=True),
        "alone to fsdp": journey(copied("alone", "e"), resume=True, strategy="fsdp"),
        "plain": journey(None, plain=True),
        "plain stopped": journey(target / "plain", stop=8, plain=True),
        "plain gone on": journey(copied("plain", "g"), plain=True, resume=True),
        "plain, alone to ddp": journey(copied("plain alone", "h"), plain=True, resume=True),
    }


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except hasten.HastenError as error:
        return str(error)
    return "none"


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class Scaled(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def by_hand(*, both: bool = False) -> None:
    """A loop that several processes cannot take."""
    run = hasten.Run(**OPTIONS)
    model, optimizer = run.prepare((made := mlp()), sgd(made.parameters()))
    for _ in run.epochs(1):
        batches = run.batches(loader())
        pairs = zip(batches, run.batches(loader()), strict=False) if both else zip(batches)
        for (x, y), *_ in pairs:
            loss = nn.functional.cross_entropy(model(x), y)
            if both:
                run.backward(loss)
                run.step(optimizer)
            else:
                loss.backward()
                optimizer.step()


def refusals() -> dict[str, str]:
    """What several processes cannot do."""
    sampled = torch.utils.data.DistributedSampler(data(), num_replicas=2, rank=0)
    return {
        "stream": refusal(lambda: fit(hasten.Loader(Stream(), batch_size=8))),
        "dataloader stream": refusal(lambda: fit(DataLoader(Stream(), batch_size=8))),
        "sampler": refusal(lambda: fit(DataLoader(data(), batch_size=8, sampler=sampled))),
        "generator": refusal(lambda: fit(batch for batch in [])),
        "single": refusal(lambda: fit(loader(), strategy="single")),
        "taken over": refusal(
            lambda: fit(hasten.Loader.from_dataloader(DataLoader(data(), batch_size=8)))
        ),
        "loader sampler": refusal(
            lambda: fit(hasten.Loader(data(), batch_size=8, sampler=sampled))
        ),
        "by hand": refusal(by_hand),
        "two loops": refusal(lambda: by_hand(both=True)),
        "rprop in parts": refusal(
            lambda: fit(loader(), optimizer=torch.optim.Rprop, strategy="fsdp")
        ),
        "a number in parts": refusal(lambda: fit(loader(), Scaled(), strategy="fsdp")),
        "dp": refusal(lambda: fit(loader(), strategy="dp")),
        "skip": refusal(lambda: fit(hasten.Loader(Noted(), batch_size=8, on_error="skip"))),
    }


def begin() -> None:
    """Make the group before a case asks whether there is one."""
    hasten.Run(**OPTIONS)


def main(target: Path, *, few: bool) -> None:
    begin()
    if few:
        thin = {"thin": thinly_spread(), "agreed": agreements(target)}
        torch.save(thin, target / f"few-{rank()}.pt")
        return
    found = {}
    for name, make in CASES.items():
        torch.manual_seed(0)
        found[name] = make()
    everything = {
        "cases": found,
        "refusals": refusals(),
        "parts": in_parts(),
        "journeys": journeys(target),
        "validating": stopped_in_validation(target),
    }
    torch.save(everything, target / f"rank-{rank()}.pt")


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        main(Path(sys.argv[1]), few="few" in sys.argv)
