"""A backward pass over simulated tensors: names known in hooks, and their errors kept whole.

PyTorch aborts the process when a hook raises while it unwinds through a device that is written
in Python. So an error of a hook is put aside here and raised when the backward pass has returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.hooks

from hasten.simulate import current
from hasten.simulate.naming import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.simulate.naming import Naming
    from hasten.simulate.patches import Patches


def _kept(hook: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, with its error put aside while a backward pass of a simulation runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        thread = current.thread
        if current.session is None or not thread.backward:
            return hook(*args, **kwargs)
        if thread.error is not None:
            return instead(*args)
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again by `_running`
            thread.error = error
            return instead(*args)

    return call


def _nothing(*_: Any) -> None:
    return None


def _no_tensor(*_: Any) -> torch.Tensor:
    return torch.empty(0)


def _running(run: Callable[..., Any], mode: Naming) -> Callable[..., Any]:
    """The engine's entry: in the mode, raising what a hook has raised."""

    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        thread = current.thread
        outer, thread.backward = thread.backward, True
        before, thread.error = thread.error, None
        try:
            if torch._C._len_torch_function_stack():
                out = run(*args, **kwargs)
            else:
                with mode:
                    out = run(*args, **kwargs)
        except Exception:
            if thread.error is not None:
                raise thread.error from None
            raise
        finally:
            thread.backward = outer
            error, thread.error = thread.error, before
        if error is not None:
            raise error
        return out

    return engine_run_backward


def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, hook = args
    return func(x, _kept(hook, _nothing), **kwargs)


def patch(patches: Patches, mode: Naming) -> None:
    """Replace the engine's entry and what takes hooks."""
    engine: Any = torch.autograd
    run = engine._engine_run_backward
    patches.set(torch.autograd, "_engine_run_backward", _running(run, mode))
    saved = torch.autograd.graph.saved_tensors_hooks
    begin = saved.__init__

    def init(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        begin(self, pack_hook, _kept(unpack_hook, _no_tensor))

    patches.set(saved, "__init__", init)
    modules = torch.utils.hooks.BackwardHook
    begin_module = modules.__init__

    def init_module(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
        begin_module(
            self,
            module,
            [_kept(hook, _nothing) for hook in user_hooks],
            [_kept(hook, _nothing) for hook in user_pre_hooks],
        )

    patches.set(modules, "__init__", init_module)


HANDLERS[torch.Tensor.register_hook] = _register_hook
HANDLERS[torch.Tensor.register_post_accumulate_grad_hook] = _register_hook
