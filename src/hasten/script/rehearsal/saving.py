"""Checkpoints in a rehearsal: what is saved, and whether it loads elsewhere."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.places import Place, Territory
from hasten.script.rehearsal.steps import Steps

_PREFIX = "module."


class Saving:
    """Watches `torch.save`, `torch.load` and `load_state_dict`."""

    def __init__(self, territory: Territory, collected: Collected, steps: Steps) -> None:
        self._territory, self._collected, self._steps = territory, collected, steps
        self._saved: list[Place] = []  # where weights of a parallel wrapper were saved

    def install(self) -> None:
        """Watch saving for the life of this process."""
        plain_save, plain_load = torch.save, torch.load
        plain_state = torch.nn.Module.load_state_dict
        signature = inspect.signature(plain_load)

        def save(obj: Any, *args: Any, **kwargs: Any) -> None:
            stack = self._territory.stack(sys._getframe(1))
            if stack:
                self._look_at(obj, stack[0])
            plain_save(obj, *args, **kwargs)

        def load(*args: Any, **kwargs: Any) -> Any:
            out = plain_load(*args, **kwargs)
            stack = self._territory.stack(sys._getframe(1))
            given = signature.bind_partial(*args, **kwargs).arguments
            if stack and given.get("map_location") is None and _on_device(out):
                self._collected.add(
                    "HST117",
                    stack[0].file,
                    stack[0].line,
                    "the checkpoint holds tensors of the device and is loaded without "
                    "map_location: on a machine without a GPU this fails.",
                    fix="torch.load(path, map_location=device)",
                    severity="warning",
                )
            return out

        def load_state(this: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            stack = self._territory.stack(sys._getframe(1))
            own = this.state_dict()
            extra = [key for key in state if isinstance(key, str) and key not in own]
            if (
                stack
                and extra
                and len(extra) == len(state)
                and all(key.startswith(_PREFIX) and key[len(_PREFIX) :] in own for key in extra)
            ):
                self._tell_prefix(stack[0])
                state = {key[len(_PREFIX) :]: value for key, value in state.items()}
            return plain_state(this, state, *args, **kwargs)

        torch.save, torch.load = save, load
        torch.nn.Module.load_state_dict = load_state  # type: ignore[method-assign, assignment]

    def _look_at(self, obj: Any, place: Place) -> None:
        if not isinstance(obj, dict):
            return
        if obj and all(isinstance(key, str) and key.startswith(_PREFIX) for key in obj):
            self._saved.append(place)
        inner = [value for value in obj.values() if isinstance(value, dict)]
        for value in inner:
            if value and all(isinstance(k, str) and k.startswith(_PREFIX) for k in value):
                self._saved.append(place)
        optimizers = any({"state", "param_groups"} <= value.keys() for value in inner)
        scalers = any("growth_factor" in value for value in inner)
        if optimizers and not scalers and len(self._steps.scalers):
            self._steps.unsaved = True
            self._collected.add(
                "HST135",
                place.file,
                place.line,
                "the optimizer's state is saved without that of the gradient scaler in use: a "
                "resume starts again at the default loss scale.",
                fix='save "scaler": scaler.state_dict() and load it on resume',
                severity="warning",
            )

    def _tell_prefix(self, place: Place) -> None:
        saved = self._saved[-1] if self._saved else place
        self._collected.add(
            "HST116",
            saved.file,
            saved.line,
            "the weights are saved with the wrapper's `module.` prefix and do not load into the "
            "plain model.",
            fix="save model.module.state_dict() when the model is wrapped",
            severity="error",
            related=((place.file, place.line, "does not load here: Missing key(s)"),),
        )


def _on_device(value: Any, depth: int = 4) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "cpu"
    if isinstance(value, torch.nn.Module):
        return any(p.device.type != "cpu" for p in value.parameters())
    if not depth:
        return False
    if isinstance(value, dict):
        return any(_on_device(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_on_device(item, depth - 1) for item in value)
    return False
