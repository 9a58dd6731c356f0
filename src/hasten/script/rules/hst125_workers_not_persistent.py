"""HST125: loader workers are started anew at each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.flow.facts import Loop
from hasten.script.flow.values import Const, Guard, Loader
from hasten.script.rules.file import File, Rule, first_of_each_line


class WorkersNotPersistent(Rule):
    """Workers are stopped and started between epochs.

    ## What it does

    Finds `DataLoader`s with workers and without `persistent_workers=True` that an outer loop goes
    through several times. With a number of workers that is not in the source it is a suggestion.

    ## Why is this bad?

    Each epoch begins by starting processes, importing modules in them and copying the data set,
    while the device waits.

    ## Bad

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=8, num_workers=2)
    for epoch in range(10):
        for (x,) in loader:
            x.mean()
    ```

    ## Good

    ```python
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(
        TensorDataset(torch.randn(64, 3)), batch_size=8, num_workers=2, persistent_workers=True
    )
    for epoch in range(10):
        for (x,) in loader:
            x.mean()
    ```

    ## Fix safety

    Workers keep their copy of the data set: changes made to it between epochs do not reach them.
    """

    code = "HST125"

    def check(self, file: File) -> Iterator[Finding]:
        """Workers that do not last."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        for seen in file.facts.of("loader"):
            loader = seen.receiver
            if not isinstance(loader, Loader) or loader.extra.get("loose"):
                continue
            workers = loader.settings.get("num_workers", Const(0))
            if isinstance(workers, Const) and not workers.value:
                continue
            keep = loader.settings.get("persistent_workers", Const(False))
            if isinstance(keep, Guard) or not isinstance(keep, Const) or keep.value:
                continue
            epochs = epoch_loop(file, loader)
            if epochs is None:
                epochs = _made_anew(file, loader)
            if epochs is None:
                continue
            proven = isinstance(workers, Const)
            yield self.finding(
                file, seen.node,
                "its workers are started anew in each round of the loop on line"
                f" {file.line(epochs.node)}.",
                "make the loader once, with persistent_workers=True",
                severity="warning" if proven else "suggestion",
                related=[(epochs.node, "the epochs")],
            )  # fmt: skip


def epoch_loop(file: File, loader: Loader) -> Loop | None:
    """A loop that goes through the whole loader in each of its rounds, more than one."""
    for seen in file.facts.of("loader-use"):
        if seen.receiver is not loader:
            continue
        outer = [
            loop for loop in seen.loops()
            if loop.over is not loader and not _goes_over(file, loop, seen.node)
        ]  # fmt: skip
        made = loader.origin.loops if loader.origin is not None else ()
        outer = [loop for loop in outer if loop not in made and loop.rounds != 1]
        if outer:
            return outer[-1]
    return None


def _made_anew(file: File, loader: Loader) -> Loop | None:
    """A loop that makes the loader in each of its rounds, to go through it once."""
    made = loader.origin.loops if loader.origin is not None else ()
    if not made or made[-1].rounds == 1 or not made[-1].has_backward:
        return None
    used = any(s.receiver is loader for s in file.facts.of("loader-use"))
    return made[-1] if used and not made[-1].backward else None


def _goes_over(file: File, loop: Loop, node: cst.CSTNode) -> bool:
    """Whether the node is part of what the loop goes over."""
    head = getattr(loop.node, "for_in", loop.node)
    return isinstance(head, (cst.For, cst.CompFor)) and file.holds(head.iter, node)
