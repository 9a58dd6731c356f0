"""Optimizer steps and backward passes: counting them, and what goes wrong around them."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hasten.script.rehearsal.causes import Causes
from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.loops import Loops
from hasten.script.rehearsal.modules import Modules
from hasten.script.rehearsal.origins import address
from hasten.script.rehearsal.places import Place, Stack, Territory
from hasten.script.rehearsal.reasons import Cause

_PILED = 2  # steps on gradients of earlier steps before it is told


class Steps:
    """Follows optimizers, gradients and the gradient scaler."""

    def __init__(
        self,
        territory: Territory,
        loops: Loops,
        modules: Modules,
        collected: Collected,
        quietly: Any,
    ) -> None:
        self._territory, self._loops, self._modules = territory, loops, modules
        self._collected, self._quietly = collected, quietly
        self.count = 0
        self.rounds = 0  # in each of which every optimizer steps once at most
        self._round: set[int] = set()
        self.listeners: list[Any] = []  # called with (optimizer, stack) before each step
        self._made: weakref.WeakKeyDictionary[Optimizer, Stack] = weakref.WeakKeyDictionary()
        self._loaded: weakref.WeakKeyDictionary[Optimizer, Stack] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._piled: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._emptied: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # A gradient that was there before the first backward since the step.
        self._old: weakref.WeakKeyDictionary[Optimizer, torch.Tensor] = weakref.WeakKeyDictionary()
        self._first_backward: weakref.WeakKeyDictionary[Optimizer, Stack] = (
            weakref.WeakKeyDictionary()
        )
        # Identities of what were parameters of modules when the optimizer was made.
        self._owned: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._last_backward: weakref.WeakKeyDictionary[Optimizer, Stack] = (
            weakref.WeakKeyDictionary()
        )
        self._born_with_state: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._running: list[Optimizer] = []  # whose step runs now
        self.backwards = 0
        self.scaled = False  # gradients carry the loss scale now
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._restored: weakref.WeakSet[Any] = weakref.WeakSet()  # scalers with a loaded state
        self.unsaved = False  # whether a checkpoint without the scaler's state was told of

    def install(self, causes: Causes) -> None:
        """Watch optimizers, backward and the scaler for the life of this process."""
        causes.states = self._cause_of_state
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_optimizer()
        self._watch_backward(causes)
        self._watch_scaler()

    def _watch_optimizer(self) -> None:
        plain_init, plain_load = Optimizer.__init__, Optimizer.load_state_dict
        made, loaded, stack = self._made, self._loaded, self._territory.stack

        def init(this: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(this, *args, **kwargs)
            made.setdefault(this, stack(sys._getframe(1)))
            self._owned.setdefault(this, frozenset(self._parameters()))

        def load(this: Optimizer, *args: Any, **kwargs: Any) -> Any:
            loaded[this] = stack(sys._getframe(1))
            return plain_load(this, *args, **kwargs)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        Optimizer.load_state_dict = load  # type: ignore[method-assign, assignment]

    def _watch_backward(self, causes: Causes) -> None:
        plain, plain_grad = torch.autograd.backward, torch.autograd.grad

        def watched(function: Any, is_backward: bool) -> Any:
            def backward(*args: Any, **kwargs: Any) -> Any:
                frames = self._territory.frames(sys._getframe(1))
                stack = self._territory.stack(sys._getframe(1))
                if is_backward:
                    self._before_backward(stack)
                    self._loops.backward(sys._getframe(1))
                    for listener in self.backward_listeners:
                        listener(args, kwargs)
                outer, causes.backward = causes.backward, (frames, stack)
                try:
                    return function(*args, **kwargs)
                finally:
                    causes.backward = outer

            return backward

        self.backward_listeners: list[Any] = []
        torch.autograd.backward = watched(plain, True)
        torch.autograd.grad = watched(plain_grad, False)

    def _watch_scaler(self) -> None:
        scaler: Any = torch.amp.GradScaler
        plain_scale, plain_unscale, plain_update = scaler.scale, scaler.unscale_, scaler.update
        plain_clip, plain_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_

        def scale(this: Any, outputs: Any) -> Any:
            if this.is_enabled():
                self.scaled = True
                self.scalers.add(this)
            return plain_scale(this, outputs)

        def unscale(this: Any, optimizer: Any) -> Any:
            self.scaled = False
            return plain_unscale(this, optimizer)

        def update(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.scaled = False
            return plain_update(this, *args, **kwargs)

        self._watch_resume(scaler)

        def clipper(plain: Any) -> Any:
            def clip(*args: Any, **kwargs: Any) -> Any:
                stack = self._territory.stack(sys._getframe(1))
                if self.scaled and stack:
                    self._collected.add(
                        "HST134",
                        stack[0].file,
                        stack[0].line,
                        "gradients are clipped while they still carry the loss scale, so that "
                        "nearly every step is cut.",
                        fix="scaler.unscale_(optimizer) before clipping",
                    )
                return plain(*args, **kwargs)

            return clip

        scaler.scale, scaler.unscale_, scaler.update = scale, unscale, update
        for name, plain in (("clip_grad_norm_", plain_clip), ("clip_grad_value_", plain_value)):
            watched = clipper(plain)
            setattr(nn.utils, name, watched)
            setattr(nn.utils.clip_grad, name, watched)

    def _watch_resume(self, scaler: Any) -> None:
        plain_load, plain_step = scaler.load_state_dict, scaler.step

        def load(this: Any, state: Any) -> Any:
            self._restored.add(this)
            return plain_load(this, state)

        def step(this: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            resumed = self._loaded.get(optimizer, ())
            if resumed and this.is_enabled() and this not in self._restored and not self.unsaved:
                self._restored.add(this)
                stack = self._territory.stack(sys._getframe(1))
                self._collected.add(
                    "HST135",
                    resumed[0].file,
                    resumed[0].line,
                    "the optimizer's state is loaded, and the gradient scaler that steps it starts "
                    "again at the default loss scale.",
                    fix='scaler.load_state_dict(saved["scaler"]) too',
                    severity="warning",
                    related=tuple((p.file, p.line, "the scaler is used here") for p in stack[:1]),
                )
            return plain_step(this, optimizer, *args, **kwargs)

        scaler.load_state_dict, scaler.step = load, step

    def _before_backward(self, stack: Stack) -> None:
        """Note for each optimizer whether its gradients were ever empty since its last step."""
        self.backwards += 1
        for optimizer in list(self._stepped):
            first = self._first_backward.setdefault(optimizer, stack)
            self._last_backward[optimizer] = stack
            if optimizer in self._emptied or not first:
                continue
            gradients = (p.grad for g in optimizer.param_groups for p in g["params"])
            gradient = next((g for g in gradients if g is not None), None)
            if gradient is None or not self._any(gradient):
                self._emptied.add(optimizer)
            else:
                self._old.setdefault(optimizer, gradient)

    def _any(self, gradient: torch.Tensor) -> bool:
        with self._quietly(), torch.no_grad():
            values = gradient.detach()
            return bool((values.coalesce().values() if values.is_sparse else values).any())

    def _check_piled(self, optimizer: Optimizer, stack: Stack) -> None:
        """At a step: whether the gradients still hold those of the step before."""
        first = self._first_backward.pop(optimizer, ())
        if not first or optimizer not in self._stepped:
            return
        old = self._old.pop(optimizer, None)
        gradients = (p.grad for g in optimizer.param_groups for p in g["params"])
        # Adding to a gradient changes it in place: another one was put there by the script.
        if optimizer in self._emptied or all(gradient is not old for gradient in gradients):
            self._piled[optimizer] = 0
            return
        self._piled[optimizer] = self._piled.get(optimizer, 0) + 1
        if self._piled[optimizer] >= _PILED:
            last = self._last_backward.get(optimizer, ()) or first
            self._tell_piled(optimizer, last[0], stack)

    def _tell_piled(self, optimizer: Optimizer, place: Place, stack: Stack) -> None:
        made = self._made.get(optimizer, ())
        related = (
            *((p.file, p.line, "the optimizer steps here") for p in stack[:1]),
            *((p.file, p.line, "the optimizer is made here") for p in made[:1]),
        )
        self._collected.add(
            "HST136",
            place.file,
            place.line,
            "the gradients of earlier steps are still there when new ones are added: each step "
            "goes along the sum of all.",
            fix="optimizer.zero_grad() before loss.backward()",
            severity="warning",
            related=related,
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stack = self._territory.stack(sys._getframe(1))
        self._loops.step(sys._getframe(1), id(optimizer))
        self.count += 1
        if not self.rounds or id(optimizer) in self._round:
            self.rounds += 1
            self._round.clear()
        self._round.add(id(optimizer))
        self._running.append(optimizer)
        if optimizer not in self._stepped and optimizer not in self._loaded and optimizer.state:
            self._born_with_state.add(optimizer)
        self._check_piled(optimizer, stack)
        self._check_parameters(optimizer, stack)
        for listener in self.listeners:
            listener(optimizer, stack)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
        self._emptied.discard(optimizer)
        self._first_backward.pop(optimizer, None)
        if optimizer in self._running:
            self._running.remove(optimizer)

    def _parameters(self) -> set[int]:
        """Identities of the parameters of all modules."""
        return {
            id(parameter)
            for module in self._modules.alive()
            for parameter in module._parameters.values()
            if parameter is not None
        }

    def _check_parameters(self, optimizer: Optimizer, stack: Stack) -> None:
        """Whether the optimizer holds parameters that its model has no more."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.grad is not None for p in held) and all(p.grad is not None for p in held):
            return
        alive, owned = self._parameters(), self._owned.get(optimizer, frozenset())
        lost = [p for p in held if p.grad is None and id(p) in owned and id(p) not in alive]
        if not lost:
            return
        everywhere = {
            id(p) for other in list(self._made) for g in other.param_groups for p in g["params"]
        }
        orphans = [
            module
            for module in self._modules.alive()
            for p in module._parameters.values()
            if p is not None and p.grad is not None and id(p) not in everywhere
        ]
        if not orphans:
            return
        made = self._made.get(optimizer, stack)
        built = [self._modules.built(module) for module in orphans[:2]]
        self._collected.add(
            "HST140",
            made[0].file,
            made[0].line,
            f"the optimizer holds {len(lost)} parameters that no module has any more, and "
            f"{type(orphans[0]).__name__}, which got gradients, is in no optimizer: it is never "
            "trained.",
            fix="make the optimizer after the model is complete",
            related=tuple(
                (s[0].file, s[0].line, "the part that is not trained is made here")
                for s in built
                if s
            ),
        )

    def _cause_of_state(self, tensor: torch.Tensor, here: Place) -> Cause | None:
        """A mismatch in an optimizer: its state lies elsewhere than its parameters."""
        memory = address(tensor)
        for optimizer in list(self._made):
            for state in list(optimizer.state.values()):
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and (
                        value is tensor or (memory and address(value) == memory)
                    ):
                        return self._state_cause(optimizer, str(name), here)
        if self._running:  # what a step computes itself comes from its state
            return self._state_cause(self._running[-1], "state", here)
        return None

    def _state_cause(self, optimizer: Optimizer, name: str, here: Place) -> Cause:
        loaded = self._loaded.get(optimizer, ())
        kind = type(optimizer).__name__
        if loaded:
            return Cause(
                "HST141",
                loaded[0].file,
                loaded[0].line,
                f"`{name}` of {kind} was loaded while the parameters were on the CPU, and they "
                "have moved since.",
                "move the model first, then load the optimizer's state",
            )
        made = self._made.get(optimizer, ())
        place = made[0] if made else here
        if optimizer not in self._born_with_state:
            return Cause(
                "HST141",
                here.file,
                here.line,
                f"`{name}` of {kind} stays on the CPU: the parameters moved after a step.",
                "move the model before training, or the optimizer's state with it",
                ((place.file, place.line, "the optimizer is made here"),),
            )
        shared, moved = self._modules.shared(made)
        asked = shared or place
        related = [(place.file, place.line, "the optimizer is made here")]
        if moved is not None:
            related.append((moved.file, moved.line, "the model is moved here"))
        return Cause(
            "HST107",
            asked.file,
            asked.line,
            f"{kind} makes its state (`{name}`) when it is built, and here the model is still on "
            "the CPU.",
            "move the model to the device before making the optimizer",
            tuple(related),
        )
