"""A script of two ranks, for a launcher: the second one sleeps in a step until a file is there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import rank_cases
import torch
from train_helpers import Hook

import hasten


def main(folder: Path) -> None:
    def asleep() -> None:
        while not (folder / "awake").exists():
            time.sleep(0.05)

    loss = Hook(9, asleep) if os.environ["RANK"] == "1" else torch.nn.CrossEntropyLoss()
    trainer = hasten.Trainer(
        rank_cases.mlp(),
        loss=loss,
        loss_over="samples",
        optimizer=rank_cases.sgd,
        folder=folder / "run",
        hang_after_s=1.0,
        **rank_cases.OPTIONS,
    )
    trainer.fit(rank_cases.loader("inline", rank_cases.Noted()), epochs=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
