"""Processes of which one fails, or all do; each start by the launcher is another case."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import rank_cases
import torch

import hasten


class Broken(rank_cases.Noted):
    """A sample that only the last process reads, and cannot."""

    def __getitem__(self, index: int) -> Any:
        if rank_cases.rank() == 1 and len(self.asked) == 6:
            raise ValueError("the picture is cut off")
        return super().__getitem__(index)


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


def main(target: Path) -> None:
    rank_cases.begin()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"start {start}", file=sys.stderr, flush=True)
    if start == 0:
        rank_cases.fit(rank_cases.loader("inline", Broken()))
    elif start == 1:
        loop(fails=1)
    elif start == 2:
        loop(fails=2)
    else:
        loop(fails=-1)
        (target / f"done-{rank_cases.rank()}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
