"""A run's state: taken for a checkpoint, put back at resume."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

import hasten
from hasten import devices
from hasten.devices import runtime
from hasten.errors import CheckpointError, UsageError
from hasten.observe.records import EpochRecord
from hasten.train import weights
from hasten.train.checkpoint import Saved
from hasten.train.precision import Precision
from hasten.train.seed import rng_state, set_rng_state
from hasten.train.settings import RunSettings
from hasten.train.spent import Spent

if TYPE_CHECKING:
    from hasten.train.keeping import Keeper

# How an optimizer computes, not what it has learned: the device at hand decides, not the file.
_OWN_WAYS = ("fused", "foreach", "capturable", "differentiable")


def gather(run: Keeper) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a checkpoint holds: the first module's state, all else of training, and facts."""
    if not run.modules:
        raise UsageError("there is nothing to save: give the model to run.prepare(model, …)")
    training = {
        "modules": [weights.state_of(module) for module in run.modules[1:]],
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "rng": rng_state(run.device),
        "sources": [source.state() for source in run.sources],
        "loss": {"total": run.meter.total, "samples": run.meter.samples},
        "spent": run.spent.to_json(),
    }
    meta = {
        "step": run.global_step,
        "epoch": run.epoch,
        "device": str(run.device),
        "precision": run.precision.to_json(),
        "history": [record.to_json() for record in run.history],
        "best": run.best,
        "config": run.settings.config,
    }
    return weights.state_of(run.modules[0]), training, meta


def apply(run: Keeper, saved: Saved) -> list[dict[str, Any]]:
    """Put a checkpoint's state into a run that prepared the same things.

    Returns:
        The positions in the loaders, in the order in which the run first used them.

    Raises:
        CheckpointError: what was prepared does not fit what was saved.
    """
    training, source = saved.training, str(saved.path)
    states = [saved.model, *training["modules"]]
    for what, here, there in (
        ("modules", run.modules, states),
        ("optimizers", run.optimizers, training["optimizers"]),
        ("schedulers", run.schedulers, training["schedulers"]),
    ):
        if len(here) != len(there):
            raise CheckpointError(
                f"{source} holds {len(there)} {what}, this run has {len(here)};"
                " prepare the same ones in the same order"
            )
    for module, state in zip(run.modules, states, strict=True):
        weights.load_into(module, state, source=source)
    for optimizer, state in zip(run.optimizers, training["optimizers"], strict=True):
        _load_optimizer(optimizer, state, source)
    for scheduler, state in zip(run.schedulers, training["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    run.set_precision(Precision.from_json(saved.meta["precision"]))
    if run.scaler is not None and training["scaler"]:
        run.scaler.load_state_dict(training["scaler"])
    run.epoch, run.global_step = saved.meta["epoch"], saved.meta["step"]
    run.history = [EpochRecord.from_json(record) for record in saved.meta["history"]]
    run.best = tuple(saved.meta["best"]) if saved.meta["best"] else None
    run.spent = Spent.from_json(training["spent"])
    run.meter.reset(training["loss"]["total"], training["loss"]["samples"])
    set_rng_state(training["rng"], run.device)
    return list(training["sources"])


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any], source: str) -> None:
    ways = [{k: g[k] for k in _OWN_WAYS if k in g} for g in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the optimizer in {source} does not fit {type(optimizer).__name__}: {error}"
        ) from error
    for group, way in zip(optimizer.param_groups, ways, strict=True):
        group.update(way)


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state that an optimizer made before its model was moved (Adagrad does).

    Step counters of no dimension stay on the host, where the optimizers keep them.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (value.dim() or name != "step"):
                state[name] = devices.move(value, parameter.device)


def check_parameters(optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
    """Refuse an optimizer whose parameters belong to none of the modules.

    Raises:
        UsageError: it would train weights that no prepared model uses.
    """
    known = {id(p) for module in modules for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if modules and held and not any(id(p) in known for p in held):
        raise UsageError(
            f"{type(optimizer).__name__} holds no parameter of the prepared modules: make it from"
            " the model that you prepare, as in"
            f" {type(optimizer).__name__}(model.parameters()), and prepare both together"
        )


def describe(run: Keeper, epochs: int) -> dict[str, Any]:
    """All settings and versions of a run, as JSON, for ``config.json``."""
    skipped = ("stream", "sinks", "clock", "config")
    settings = {
        field.name: _plain(getattr(run.settings, field.name))
        for field in dataclasses.fields(RunSettings)
        if field.name not in skipped
    }
    return {
        "hasten": hasten.__version__,
        "epochs": epochs,
        "settings": settings,
        "config": run.settings.config,
        "device": {"device": str(run.device), "name": runtime.name(run.device)},
        "precision": run.precision.to_json(),
        "model": [type(module).__name__ for module in run.modules],
        "optimizer": [type(optimizer).__name__ for optimizer in run.optimizers],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": sys.argv,
        "platform": platform.platform(),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
