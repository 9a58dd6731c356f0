"""A script as people write them, for two launchers that meet: it goes on where it was stopped."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import rank_cases
import torch

import hasten


class Slow(rank_cases.Noted):
    """Takes its time, so that a launcher can be killed in the middle."""

    def __getitem__(self, index: int) -> object:
        time.sleep(0.002)
        return super().__getitem__(index)


def main(folder: Path) -> None:
    model = rank_cases.mlp()
    trainer = hasten.Trainer(
        model,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=rank_cases.sgd,
        folder=folder / "run",
        resume=True,
        checkpoint_every="4 steps",
        **rank_cases.OPTIONS,
    )
    trainer.fit(rank_cases.loader("inline", Slow()), epochs=20)
    if rank_cases.rank() == 0:
        torch.save(model.state_dict(), folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
