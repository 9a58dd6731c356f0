"""Processes of which one fails, or all do; each start by the launcher is another case."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_cases
import torch
from torch.utils.data import DataLoader, default_collate

import hasten


class Broken(rank_cases.Noted):
    """A sample that only the last process reads, and cannot."""

    def __getitem__(self, index: int) -> Any:
        if rank_cases.rank() == 1 and len(self.asked) == 6:
            raise ValueError("the picture is cut off")
        return super().__getitem__(index)


def sample() -> None:
    rank_cases.fit(rank_cases.loader("inline", Broken()))


def loop(fails: int) -> None:
    """A loop of one's own, in which something fails at the third step."""
    run = hasten.Run(**rank_cases.OPTIONS)
    model = rank_cases.mlp()
    model, optimizer = run.prepare(model, rank_cases.sgd(model.parameters()))
    for _ in run.epochs(2):
        for x, y in run.batches(rank_cases.loader()):
            if run.global_step == 2 and fails in (run.world.rank, 2):
                raise KeyError("something of one's own")
            run.backward(torch.nn.functional.cross_entropy(model(x), y))
            run.step(optimizer)


class Fails(torch.nn.Module):
    """Has the last process fail in its n-th forward pass, training or not."""

    def __init__(self, at: int, fails: Callable[[torch.Tensor], torch.Tensor], training: bool):
        super().__init__()
        self.layers, self.calls = rank_cases.mlp(), 0
        self.at, self.fails, self.when = at, fails, training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training == self.when
        out: torch.Tensor = self.layers(x)
        strikes = self.calls == self.at and self.training == self.when and rank_cases.rank() == 1
        return self.fails(out) if strikes else out


def no_memory(out: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class Backwards(torch.autograd.Function):
    """Cannot compute its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no gradient of this")


def cannot_validate(out: torch.Tensor) -> torch.Tensor:
    raise LookupError("a class that nobody knows")


def failing(fails: Callable[[torch.Tensor], torch.Tensor], *, training: bool = True) -> None:
    rank_cases.fit(rank_cases.loader(), Fails(3, fails, training))


def cut_off(samples: Any) -> Any:
    if rank_cases.rank() == 1 and len(samples) < 4:
        raise TypeError("samples that do not go together")
    return default_collate(samples)


def collating() -> None:
    rank_cases.fit(DataLoader(rank_cases.data(), batch_size=8, collate_fn=cut_off))


class Sometimes(torch.nn.Module):
    """A part that the last process leaves out at its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.extra = rank_cases.mlp(), torch.nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.layers(x)
        if self.calls == 3 and rank_cases.rank() == 1:
            return out
        return out + self.extra(x)


def left_out() -> None:
    rank_cases.fit(rank_cases.loader(), Sometimes())


class Slow(rank_cases.Noted):
    """Samples that the last process waits for."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02 * rank_cases.rank())
        return super().__getitem__(index)


def slow() -> None:
    rank_cases.fit(rank_cases.loader("inline", Slow()), epochs=1)


CASES: dict[str, Callable[[], None]] = {
    "sample": sample,
    "one loop": lambda: loop(fails=1),
    "both loops": lambda: loop(fails=2),
    "memory": lambda: failing(no_memory),
    "backward": lambda: failing(Backwards.apply),
    "validation": lambda: failing(cannot_validate, training=False),
    "collate": collating,
    "left out": left_out,
    "none": slow,
}


def main(target: Path) -> None:
    rank_cases.begin()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    name = list(CASES)[start]
    print(f"start of {name}", file=sys.stderr, flush=True)
    CASES[name]()
    (target / f"done-{rank_cases.rank()}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
