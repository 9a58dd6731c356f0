"""HST103: a tensor is moved and the moved one thrown away."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line
from hasten.script.rules.meetings import dropped_moves


class ToResultDropped(Rule):
    """`tensor.to(device)` gives a new tensor; here nobody keeps it.

    ## What it does

    Finds `.to(...)` and `.cuda()` of a tensor as a statement of its own, and loops that only give
    the loop's own name a new value (`for t in batch: t = t.to(device)`). Modules are moved in
    place and not reported.

    ## Why is this bad?

    The tensor stays where it was; the operation that needs it on the device fails.

    ## Bad

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(8, 4)
    x.to(device)
    ```

    ## Good

    ```python
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(8, 4)
    x = x.to(device)
    ```

    ## Fix safety

    Safe: the statement as it stands has no effect.
    """

    code = "HST103"

    def check(self, file: File) -> Iterator[Finding]:
        """Moves without effect."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        for drop in dropped_moves(file):
            related = [
                (mix.seen.node, f"{mix.what} meets it, still on the CPU, here")
                for mix in file.facts.mixes
                if mix.origin is not None
                and any(mix.origin.node is origin.node for origin in drop.origins)
            ]  # fmt: skip
            if drop.rebound:
                what = (
                    f"`{drop.rebound}` is only the loop's name: what it goes over keeps"
                    " its tensors on the CPU."
                )
                fix = (
                    f"build a new one: batch = [{drop.rebound}.to(device) for"
                    f" {drop.rebound} in batch]"
                )
            else:
                node = drop.node
                base = (
                    file.short(node.func.value)
                    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
                    else "x"
                )
                what = (
                    f"`{file.short(node)}` gives a new tensor and leaves `{base}` where"
                    " it is; the new one is dropped."
                )
                fix = f"{base} = {file.short(node)}"
            yield self.finding(
                file,
                drop.node,
                what,
                fix,
                severity="error" if drop.proven else "warning",
                related=related,
            )
