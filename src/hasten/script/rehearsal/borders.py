"""Where host code meets device tensors by its own rules: NumPy, packed lengths, moving models."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from torch.nn.utils import rnn

from hasten.script.rehearsal.collected import Collected
from hasten.script.rehearsal.modules import ById, Modules
from hasten.script.rehearsal.origins import Origins
from hasten.script.rehearsal.places import Territory, argument_line, source_line

_MOST = 0.6  # share of the steps that makes a habit


class Borders:
    """Repairs what CUDA refuses for other reasons than mixed devices, and reports it."""

    def __init__(
        self, territory: Territory, origins: Origins, collected: Collected, quietly: Any
    ) -> None:
        self._territory, self._collected, self._quietly = territory, collected, quietly
        self._origins = origins
        origins.special[torch.Tensor.numpy] = self._numpy
        origins.special[torch.Tensor.__array__] = self._numpy

    def _numpy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if tensor.device.type == "cpu":
            return None
        stack = self._territory.stack(sys._getframe(2))
        if not stack:
            return None
        device = tensor.device
        self._collected.add(
            "HST112",
            stack[0].file,
            stack[0].line,
            f"`{source_line(stack[0].file, stack[0].line)}`: can't convert {device} device type "
            "tensor to numpy.",
            fix="tensor.cpu().numpy() (tensor.detach().cpu().numpy() where it has a gradient)",
        )
        with torch.no_grad(), self._quietly():
            host = tensor.detach().cpu()
        return (func(host, *args[1:], **kwargs),)

    def install(self) -> None:
        """Watch packing for the life of this process."""
        plain = rnn.pack_padded_sequence

        def pack(input: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
            if isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu":
                stack = self._territory.stack(sys._getframe(1))
                if stack:
                    placed = self._origins.placed(lengths)
                    at = argument_line(stack[0], "pack_padded_sequence", 1, "lengths")
                    self._collected.add(
                        "HST113",
                        stack[0].file,
                        at,
                        "'lengths' argument should be a 1D CPU int64 tensor, but got "
                        f"{lengths.dim()}D {lengths.device} tensor.",
                        fix="pack_padded_sequence(..., lengths.cpu(), ...), or leave the lengths "
                        "on the CPU",
                        related=tuple(
                            (p.file, p.line, note)
                            for p, note in (
                                (stack[0], "they are packed here"),
                                (placed, "they came to the device here"),
                            )
                            if p is not None
                        ),
                    )
                    with self._quietly():
                        lengths = lengths.cpu()
            return plain(input, lengths, *args, **kwargs)

        rnn.pack_padded_sequence = pack
        torch.nn.utils.rnn.pack_padded_sequence = pack


def watch_parallel(territory: Territory, collected: Collected) -> None:
    """Watch what `nn.DataParallel` gives to each device, for the life of this process."""
    plain: Any = torch.nn.DataParallel.scatter

    def scatter(this: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        given = plain(this, inputs, kwargs, device_ids)
        parts = len(given[0])
        stack = territory.stack(sys._getframe(1))
        if stack and parts < len(device_ids):
            collected.add(
                "HST142",
                stack[0].file,
                stack[0].line,
                f"DataParallel has {len(device_ids)} devices and the batch fills {parts}: the "
                "others wait.",
                fix="a batch of at least as many samples as there are devices",
                severity="warning",
            )
        return given

    torch.nn.DataParallel.scatter = scatter  # type: ignore[method-assign, assignment]


class Habits:
    """Costly habits in the loop: emptying the cache, moving the model."""

    def __init__(self, territory: Territory, modules: Modules, collected: Collected) -> None:
        self._territory, self._modules, self._collected = territory, modules, collected
        self._emptied: dict[tuple[str, int], int] = defaultdict(int)
        self._since: set[tuple[str, int]] = set()
        self._moves = self._steps = 0
        self._moved: dict[tuple[str, int], int] = defaultdict(int)
        self._by_module: ById[dict[tuple[str, int], int]] = ById()

    def install(self) -> None:
        """Watch the cache for the life of this process; after the simulation has begun."""
        plain = torch.cuda.empty_cache

        def empty_cache() -> None:
            stack = self._territory.stack(sys._getframe(1))
            if stack:
                self._since.add((stack[0].file, stack[0].line))
            plain()

        torch.cuda.empty_cache = empty_cache

    def step(self, optimizer: Any, stack: Any) -> None:
        """Told before each step."""
        self._steps += 1
        for emptied in self._since:
            self._emptied[emptied] += 1
        self._since.clear()
        for move in self._modules.moves[self._moves :]:
            module = move.module()
            if module is not None and move.direct:
                counts = self._by_module.get(module, defaultdict(int))
                self._by_module[module] = counts
                at = move.stack[0].file, move.stack[0].line
                counts[at] += move.moved
                self._moved[at] = max(counts[at], self._moved[at])
        self._moves = len(self._modules.moves)

    def tell(self) -> None:
        """Say what came again and again."""
        for place in self._since:
            self._emptied[place] += 1
        for (file, line), count in self._emptied.items():
            if count > 1 and count > _MOST * (self._steps - 1):
                self._collected.add(
                    "HST121",
                    file,
                    line,
                    "memory is given back to the driver at each step and must be asked for again.",
                    fix="remove empty_cache from the loop",
                    severity="warning",
                    count=count,
                )
        for (file, line), moved in self._moved.items():
            if moved > 1:
                self._collected.add(
                    "HST138",
                    file,
                    line,
                    "the model is moved again and again while it trains.",
                    fix="move the model once, before the loop",
                    severity="warning",
                    count=moved,
                )
