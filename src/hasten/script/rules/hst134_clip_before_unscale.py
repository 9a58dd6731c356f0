"""HST134: gradients are clipped while they are scaled."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule, first_of_each_line


class ClipBeforeUnscale(Rule):
    """Gradients are clipped before the scaler has taken its factor out of them.

    ## What it does

    Finds `clip_grad_norm_` and `clip_grad_value_` between `scaler.scale(loss).backward()` and
    `scaler.step(optimizer)` without `scaler.unscale_(optimizer)` before.

    ## Why is this bad?

    The gradients are multiplied by the loss scale (65536 at first): nearly every step is cut to a
    tiny one, and training is silently slow or wrong.

    ## Bad

    ```python
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, device=device)).mean()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    ```

    ## Good

    ```python
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, device=device)).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    ```

    ## Fix safety

    Changes training, to what was meant.
    """

    code = "HST134"

    def check(self, file: File) -> Iterator[Finding]:
        """Clipped too early."""
        return first_of_each_line(self._all(file))

    def _all(self, file: File) -> Iterator[Finding]:
        scaled = None
        for seen in file.facts.of("scaler", "clip", "step", "backward"):
            if seen.kind == "scaler" and seen.name == "scale":
                scaled = seen
            elif seen.kind == "scaler" and seen.name in ("unscale_", "step", "update"):
                scaled = None
            elif seen.kind == "clip" and scaled is not None:
                yield self.finding(
                    file, seen.node,
                    "the gradients still carry the loss scale of line"
                    f" {file.line(scaled.node)}: this clips nearly every step.",
                    "scaler.unscale_(optimizer) before clipping",
                    related=[(scaled.node, "the loss is scaled here")],
                )  # fmt: skip
