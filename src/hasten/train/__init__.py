"""Train: Run, Trainer, precision, checkpoints: the plain loop, with nothing hidden."""

from __future__ import annotations

from hasten.train.result import Result
from hasten.train.run import Run
from hasten.train.trainer import Trainer

__all__ = ["Result", "Run", "Trainer"]
