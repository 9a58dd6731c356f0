"""HST108: a loss with weights that are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.script.findings import Finding
from hasten.script.rules.file import File, Rule
from hasten.script.rules.meetings import meetings


class LossWeightOnCpu(Rule):
    """The loss has class weights on the CPU and is given outputs on the device.

    ## What it does

    Follows `weight=` and `pos_weight=` of the losses of `torch.nn` and `torch.nn.functional`.

    ## Why is this bad?

    The weights are a buffer of the loss: they stay on the CPU until the loss, a module too, is
    moved. On a GPU its first call fails.

    ## Bad

    ```python
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0]))
    logits = nn.Linear(3, 2).to(device)(torch.randn(5, 3, device=device))
    loss = criterion(logits, torch.zeros(5, dtype=torch.long, device=device))
    ```

    ## Good

    ```python
    import torch
    from torch import nn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0])).to(device)
    logits = nn.Linear(3, 2).to(device)(torch.randn(5, 3, device=device))
    loss = criterion(logits, torch.zeros(5, dtype=torch.long, device=device))
    ```

    ## Fix safety

    Safe.
    """

    code = "HST108"

    def check(self, file: File) -> Iterator[Finding]:
        """Weights left on the CPU."""
        for meeting in meetings(file, self.code):
            related = [
                (meeting.mix.seen.node, "the loss is called with tensors of the device here")
            ]
            if meeting.origin is not None:
                related.append((meeting.origin.node, "the weights are made here"))
            yield self.finding(
                file, meeting.node,
                f"the weights of `{file.short(meeting.node)}` are on the CPU; on line"
                f" {file.line(meeting.mix.seen.node)} the loss meets outputs on the device.",
                "move the loss too: .to(device), or make the weights with device=device",
                severity=meeting.severity, related=related,
            )  # fmt: skip
