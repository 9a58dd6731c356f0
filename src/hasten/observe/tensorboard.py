"""A sink for records that writes TensorBoard's event files; used where it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.errors import UsageError
from hasten.observe.records import AnyRecord, EpochRecord, StepRecord


class TensorBoardSink:
    """Writes the numbers of step and epoch records, by optimizer step.

    Args:
        folder: of the event files; made if need be.

    Raises:
        UsageError: tensorboard is not installed; the message says how to install it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "writing for TensorBoard needs a package that is not installed: "
                "pip install hasten[tensorboard]"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: AnyRecord) -> None:
        """Write one record; events have no numbers and are passed over."""
        values: dict[str, float | None]
        match record:
            case StepRecord():
                values = {
                    "step/loss": record.loss,
                    "step/images_per_s": record.images_per_s,
                    "step/learning_rate": record.learning_rate,
                }
                values |= {f"phase_s/{name}": seconds for name, seconds in record.phases.items()}
            case EpochRecord():
                values = {
                    "epoch/loss": record.loss,
                    "epoch/val_loss": record.val_loss,
                    "epoch/val_accuracy": record.val_accuracy,
                    "epoch/seconds": record.seconds,
                    "epoch/images_per_s": record.images_per_s,
                }
            case _:
                return
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write what is buffered and end the writer's thread."""
        self._writer.close()
