"""Torch's own errors, told as what they mean here and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hasten import devices
from hasten.devices import runtime
from hasten.errors import HastenError, OutOfDeviceMemory
from hasten.train import diagnose
from hasten.train.result import write_stopped_report
from hasten.train.source import count

if TYPE_CHECKING:
    from hasten.train.run import Run
    from hasten.train.trainer import Trainer


@contextmanager
def errors(run: Run, trainer: Trainer) -> Iterator[None]:
    """Inside, out-of-memory, mixed devices and a compiler's failure become hasten's errors.

    Raises:
        OutOfDeviceMemory: with the batch that ran and what to try.
        DeviceMismatch: naming each tensor that is not where the others are.
        HastenError: ``torch.compile`` failed.
    """
    try:
        with run.world.reaching():
            yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, HastenError):
            raise
        if runtime.is_out_of_memory(error):
            size = count(run.last_batch) if run.last_batch is not None else None
            text = diagnose.out_of_memory(
                error, run.device, batch=size, ran=run.largest_batch or None
            )
            raise OutOfDeviceMemory(text) from error
        if "same device" in str(error):
            loss = trainer.loss if isinstance(trainer.loss, torch.nn.Module) else None
            devices.same_device(model=trainer.model, loss=loss, batch=run.last_batch)
        if run.settings.compile and type(error).__module__.startswith(("torch._", "triton")):
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = " ".join(lines[:2]) or type(error).__name__  # the reason is often in the second
            raise HastenError(
                f"torch.compile failed: {why}\nIt needs a C++ compiler on the CPU (g++) and"
                " Triton on a GPU; train without --compile, or install what is missing"
            ) from error
        raise


@contextmanager
def stopped(run: Run, trainer: Trainer) -> Iterator[None]:
    """A training run inside ends with what it holds given back, and with a report of what it did,
    whatever ends it."""
    try:
        yield
    except KeyboardInterrupt as error:  # the second: the step under way is not finished
        if run.last_good is not None:
            error.add_note(f"the last checkpoint is {run.last_good}\n{run.how_to_resume}")
        raise
    except HastenError as error:
        run.close()
        try:
            if run.world.is_main:
                write_stopped_report(run, trainer, error)
        except HastenError as second:
            error.add_note(f"Nor could its report be written: {second}")
        raise
    finally:
        run.close()
