"""Make a module's own forward pass compute at a run's precision, wherever it is called from."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from hasten.train.precision import Precision


class HasPrecision(Protocol):
    """What says, at each call, how to compute: a run."""

    precision: Precision
    device: torch.device


def compile_in_place(module: nn.Module) -> None:
    """Compile a module's call with ``torch.compile``; its names in checkpoints do not change.

    ``Module.compile`` leaves the containers of torch itself, ``nn.Sequential`` above all, as they
    are: the compiler does not look into torch's own files unless it is on its way from others.
    """
    call = module._call_impl

    def entered(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(entered)


def run_at(module: nn.Module, run: HasPrecision) -> None:
    """From now on ``module(…)`` runs under autocast, and its floating results are float32.

    Hooks do it, not a wrapper: the module stays what it is, with its names in checkpoints. A deep
    copy of it (an averaged model, say) behaves in the same way; a pickled one has forgotten it.

    A compiled module is entered at this precision from outside, as the compiler cannot look into
    such hooks; a copy of it is neither compiled nor at this precision.

    Args:
        module: changed in place. Prepared for another run before, it follows this one now.
        run: asked at each call.
    """
    compiled = module._compiled_call_impl
    if compiled is not None:
        inner = compiled.inner if isinstance(compiled, _CompiledAt) else compiled
        module._compiled_call_impl = _CompiledAt(inner, run)
        return
    for hook in module._forward_pre_hooks.values():
        prepared = getattr(hook, "__self__", None)
        if isinstance(prepared, _Autocast):
            prepared.run = run
            return
    hooks = _Autocast(run)
    module.register_forward_pre_hook(hooks.enter, prepend=True)
    module.register_forward_hook(hooks.leave, always_call=True)


class _CompiledAt:
    """What a compiled module calls, at a run's precision."""

    def __init__(self, inner: Callable[..., Any], run: HasPrecision) -> None:
        self.inner, self.run = inner, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.run.precision.autocast(self.run.device) as context:
            result = self.inner(*args, **kwargs)
        return result if context is None else to_float32(result)


class _Autocast:
    """The two hooks of a module. Each thread has its own stack: autocast is the thread's too."""

    def __init__(self, run: HasPrecision) -> None:
        self.run = run
        self._local = threading.local()

    def enter(self, module: nn.Module, args: Any) -> None:
        context = self.run.precision.autocast(self.run.device)
        context.__enter__()
        self._stack.append(context)

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        if not self._stack:  # the hook before it did not get to run
            return result
        context = self._stack.pop()
        context.__exit__(None, None, None)
        return result if isinstance(context, nullcontext) else to_float32(result)

    @property
    def _stack(self) -> list[Any]:
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        found: list[Any] = self._local.entered
        return found

    def __deepcopy__(self, memo: Any) -> _Autocast:
        return self

    def __reduce__(self) -> Any:
        return _Forgotten, ()


class _Forgotten:
    """What a pickled module has in place of :class:`_Autocast`: a file holds no run."""

    def enter(self, module: nn.Module, args: Any) -> None:
        """Leave the precision as it is."""

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Leave the result as it is."""


def to_float32(value: Any) -> Any:
    """Half-precision tensors of a nest as float32, so that a loss outside of autocast is exact."""
    if isinstance(value, torch.Tensor):
        half = value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if half else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_float32, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(to_float32, value))
    if isinstance(value, MutableMapping):
        changed = {k: new for k, old in value.items() if (new := to_float32(old)) is not old}
        if not changed:
            return value
        rebuilt = copy.copy(value)
        for key, item in changed.items():
            rebuilt[key] = item
        return rebuilt
    return value
