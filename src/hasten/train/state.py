"""A run's state: taken for a checkpoint, put back at resume."""

from __future__ import annotations

import dataclasses
import inspect
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import hasten
from hasten.devices import runtime
from hasten.devices.runtime import autocast_dtypes
from hasten.errors import CheckpointError, HastenError, UsageError
from hasten.observe.records import EpochRecord
from hasten.train import pieces, weights
from hasten.train.checkpoint import Saved
from hasten.train.precision import Precision
from hasten.train.seed import fork_generators, rng_state, set_rng_state
from hasten.train.settings import RunSettings
from hasten.train.spent import Spent

if TYPE_CHECKING:
    from hasten.train.keeping import Keeper

# How an optimizer computes, not what it has learned: the device at hand decides, not the file.
_OF_OTHERS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
_OWN_WAYS = ("fused", "foreach", "capturable", "differentiable")


class Content(NamedTuple):
    """What a checkpoint holds."""

    model: dict[str, Any]
    """The first module's state."""
    training: dict[str, Any]
    """All else of training."""
    meta: dict[str, Any]
    """Facts, as JSON."""
    in_parts: dict[str, torch.Tensor]
    """Tensors that lie in parts, by where they belong; None stands there."""


def gather(run: Keeper) -> Content:
    """What a checkpoint of a run holds now."""
    if not run.modules:
        raise UsageError("there is nothing to save: give the model to run.prepare(model, …)")
    training = {
        "modules": [weights.state_of(module) for module in run.modules[1:]],
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "rng": rng_state(run.device),
        "rng_of_ranks": run.world.gather(rng_state(run.device)) if run.world.size > 1 else [],
        "sources": run.loops.state(),
        "loss": run.meter.state(),
        "spent": run.spent.to_json(),
        "seconds": run.elapsed_s,
    }
    meta = {
        "step": run.global_step,
        "epoch": run.epoch,
        "device": str(run.device),
        "precision": run.precision.to_json(),
        "history": [record.to_json() for record in run.history],
        "best": run.best,
        "kinds": kinds(run),
        "config": run.settings.config,
    }
    model, in_parts = weights.state_of(run.modules[0]), dict[str, torch.Tensor]()
    if run.strategy.in_parts:
        model = pieces.take_out(model, ("model",), in_parts)
        training = pieces.take_out(training, ("training",), in_parts)
    return Content(model, training, meta, in_parts)


def kinds(run: Keeper) -> dict[str, list[str]]:
    """The classes of what a run trains with, by name."""
    return {
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
        "schedulers": [type(scheduler).__name__ for scheduler in run.schedulers],
    }


def apply(run: Keeper, saved: Saved) -> list[dict[str, Any]]:
    """Put a checkpoint's state into a run that prepared the same things.

    Returns:
        The positions of the loops, by their place in the epoch.

    Raises:
        CheckpointError: what was prepared does not fit what was saved, or that is not what hasten
            saves.
    """
    try:
        return _apply(run, saved)
    except HastenError:
        raise
    except _OF_OTHERS as error:  # its checksums are right, and somebody else has written it
        if runtime.is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{saved.path} holds what hasten does not write, or what this run cannot take"
            f" ({type(error).__name__}: {error}); use another checkpoint"
        ) from error


def _apply(run: Keeper, saved: Saved) -> list[dict[str, Any]]:
    training, source = saved.training, str(saved.path)
    states = [saved.model, *training["modules"]]
    if len(run.modules) != len(states):
        raise CheckpointError(
            f"{source} holds {len(states)} modules, this run has {len(run.modules)};"
            " prepare the same ones in the same order"
        )
    for what, here in kinds(run).items():
        there = saved.meta["kinds"][what]
        if here != there:
            raise CheckpointError(
                f"the {what} in {source} are {_listed(there)}, this run has {_listed(here)};"
                " prepare the same ones in the same order"
            )
    _apply_precision(run, Precision.from_json(saved.meta["precision"]))
    for scheduler, state in zip(run.schedulers, training["schedulers"], strict=True):
        planned, laid_out = getattr(scheduler, "total_steps", 0), state.get("total_steps", 0)
        if planned > laid_out:
            raise CheckpointError(
                f"the learning rate in {source} follows {type(scheduler).__name__} over"
                f" {laid_out} steps, so it cannot go on to {planned}: keep the number of epochs"
            )
    for module, state in zip(run.modules, states, strict=True):
        weights.load_into(module, state, source=source, part=run.strategy.part)
    for optimizer, state in zip(run.optimizers, training["optimizers"], strict=True):
        _load_optimizer(optimizer, _parts(run, optimizer, state), source)
    for scheduler, state in zip(run.schedulers, training["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    if run.scaler is not None and training["scaler"]:
        run.scaler.load_state_dict(training["scaler"])
    run.epoch, run.global_step = saved.meta["epoch"], saved.meta["step"]
    run.history = [EpochRecord.from_json(record) for record in saved.meta["history"]]
    run.best = None
    if saved.meta["best"]:
        value, step = saved.meta["best"]
        run.best = float(value), int(step)
    run.spent = Spent.from_json(training["spent"])
    if run.world.is_main:  # the sums are those of all processes
        run.meter.restore(training["loss"])
    run.elapsed_s = training["seconds"]
    rank, generators = run.world.rank, training.get("rng_of_ranks") or [training["rng"]]
    if rank < len(generators):
        set_rng_state(generators[rank], run.device)
    else:
        fork_generators(rank, run.device)
    positions = list(training["sources"])
    for position in positions:  # what is taken from them later must be there
        _ = int(position["batches"]), position["of"], [*position["generators"]]
        if position["batches"] and position["loader"]:
            _ = int(position["loader"]["epoch"]), int(position["loader"]["batch"])
    return positions


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _apply_precision(run: Keeper, saved: Precision) -> None:
    """Go on at the precision of before, unless another is asked for or the device has it not."""
    asked = run.settings.precision
    able = ("float32", *(str(d).removeprefix("torch.") for d in autocast_dtypes(run.device)))
    if asked not in ("auto", saved.name):
        run.say(f"Precision: {asked}, as asked for; it was {saved.name}")
        saved = Precision(name=asked, channels_last=saved.channels_last)
    elif saved.name not in able:
        run.say(f"Precision: float32, for {run.device} cannot compute in {saved.name}")
        saved = Precision(name="float32", channels_last=saved.channels_last)
    fixed = run.strategy.fixed
    if fixed is not None and fixed.name != saved.name:
        run.say(f"Precision: {fixed.name}, as {run.strategy.name} began; it was {saved.name}")
    run.set_precision(fixed or saved)


def _parts(run: Keeper, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with what this process holds of each tensor."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parts = {
        number: {
            name: run.strategy.part(p, value) for name, value in state["state"][number].items()
        }
        for number, p in zip(numbers, held, strict=False)
        if number in state["state"]
    }
    return state | {"state": state["state"] | parts}


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
    # A scheduler warns if it steps before its optimizer has: this one has, in another process.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def check_module(module: nn.Module) -> None:
    """Refuse a module that is not complete yet.

    Raises:
        UsageError: it has lazy parameters, whose shapes its first batch is to give.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(
            f"{type(module).__name__} has parameters without a shape yet ({', '.join(lazy[:3])}):"
            " call it on one batch before it is trained, so that its lazy layers take their shapes"
        )


def rebind(
    optimizer: Optimizer,
    replaced: Mapping[torch.Tensor, torch.Tensor],
    part: Callable[[Any, Any], Any],
) -> None:
    """Make an optimizer step the parameters that took the place of those it was made with.

    Moving a module changes its parameters in place for the devices of torch itself, and makes new
    ones for others.

    Args:
        optimizer: changed in place, with the state that it has already.
        replaced: the new parameter of each old one.
        part: of a whole tensor what this process holds where it holds the first.
    """
    for group in optimizer.param_groups if replaced else ():
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in replaced]:
        new, state = replaced[old], optimizer.state.pop(old)
        optimizer.state[new] = {name: part(new, value) for name, value in state.items()}


def check_optimizer(optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
    """Refuse an optimizer that cannot train the modules.

    Raises:
        UsageError: its parameters are those of no prepared module, or its step needs a closure.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{name} computes the loss several times a step, by a closure; hasten takes one"
            " forward and backward pass a step: use another optimizer"
        )
    known = {id(p) for module in modules for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if modules and held and not any(id(p) in known for p in held):
        raise UsageError(
            f"{name} holds no parameter of the prepared modules: make it from the model that you"
            f" prepare, as in {name}(model.parameters()), and prepare both together"
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
        "modules": [type(module).__name__ for module in run.modules],
        **kinds(run),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "command": sys.argv,
        "platform": platform.platform(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # which JSON has no number for
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
