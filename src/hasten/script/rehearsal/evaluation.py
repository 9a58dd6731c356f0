"""Evaluation passes: calls of a trained model whose output never meets a backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.modules import ById
from hasten.script.rehearsal.places import Stack

_WALK = 3000  # nodes of a graph that are looked at
_WAY = 3  # calls that lead to a model by which passes are told apart
_IN_A_ROW = 2  # calls without a backward between them that make an evaluation pass
_CHANGING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class _Site:
    """One line that calls a model from outside, and the calls that lead to it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.trained = False
        self.row = self.longest = 0
        self.training = self.graph = 0  # calls in training mode; with gradients on


class Evaluation:
    """Tells training calls from evaluation calls, and looks at the modes of the latter."""

    def __init__(self, collected: Collected, modules: Any) -> None:
        self._collected, self._modules = collected, modules
        self._sites: dict[tuple[tuple[str, int], ...], _Site] = {}
        self._outputs: dict[Any, _Site] = {}
        self._trained: ById[bool] = ById()

    def called(self, module: nn.Module, out: Any, stack: Stack) -> None:
        """Told after each outermost call of a module."""
        if not stack:
            return
        way = tuple((place.file, place.line) for place in stack[:_WAY])
        site = self._sites.setdefault(way, _Site(module))
        site.row += 1
        site.longest = max(site.longest, site.row)
        site.training += any(
            isinstance(part, _CHANGING) and part.training for part in module.modules()
        )
        nodes = [t.grad_fn for t in _tensors(out) if t.grad_fn is not None]
        site.graph += bool(nodes)
        for node in nodes:
            self._outputs[node] = site

    def backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Told before each backward pass."""
        for site in self._sites.values():
            site.row = 0
        roots = args[0] if args else kwargs.get("tensors", ())
        todo = [t.grad_fn for t in _tensors(roots)]
        seen: set[Any] = set()
        while todo and len(seen) < _WALK:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            met = self._outputs.get(node)
            if met is not None:
                met.trained = True
                module = met.module()
                if module is not None:
                    self._trained[module] = True
            todo.extend(following for following, _ in node.next_functions)

    def step(self, optimizer: Any, stack: Stack) -> None:
        """Told before each step: outputs of earlier steps are of no interest any more."""
        self._outputs.clear()

    def tell(self) -> None:
        """Say what the evaluation passes showed."""
        trained = {place for way, site in self._sites.items() if site.trained for place in way}
        for way, site in self._sites.items():
            module = site.module()
            if site.trained or site.longest < _IN_A_ROW or module not in self._trained:
                continue
            # A helper that training calls too is not what lacks the mode: its caller is.
            file, line = next((place for place in way if place not in trained), way[0])
            if site.training:
                self._collected.add(
                    "HST131",
                    file,
                    line,
                    f"{type(module).__name__} is evaluated in training mode: dropout drops and "
                    "batch statistics change.",
                    fix="model.eval() before, model.train() after",
                    severity="warning",
                    count=site.training,
                )
            if site.graph:
                self._collected.add(
                    "HST132",
                    file,
                    line,
                    "this evaluation builds graphs that nobody uses.",
                    fix="with torch.no_grad():",
                    severity="suggestion",
                    count=site.graph,
                )


def _tensors(value: Any, depth: int = 3) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if not depth:
        return []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item, depth - 1)]
    return []
